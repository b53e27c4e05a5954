#include "foremoe/runtime/slot_pool.h"

#include <algorithm>

namespace foremoe {
SlotPool::SlotPool(const PhaseParts& parts, const HomeExperts& homes)
    : parts_(parts), homes_(homes), homes_per_rank_(parts.plan().num_slots() - parts.plan().guest_slots) {
  lay_out_buffers(homes);
  if (parts.schedule().phase == Phase::kPolicyUpdate) lay_out_gradients();
}

void SlotPool::lay_out_buffers(const HomeExperts& homes) {
  const StepPlan& plan = parts_.plan();
  const bool free = plan.residency == Residency::kFree;
  const int lent = free ? plan.num_layers() * homes_per_rank_ : 0;
  const int owned = parts_.schedule().buffers_per_rank - lent;
  const auto expert_bytes = static_cast<std::size_t>(parts_.layout.bytes().value);
  const Bytes bytes{owned * parts_.layout.bytes().value};
  const bool peers_map_homes =
      std::ranges::any_of(homes.regions, [](const auto& region) { return !region.name.empty(); });
  const bool peers_read = parts_.schedule().buffers_per_rank > num_buffers(plan, parts_.schedule().depth);  // staging
  if (peers_read && peers_map_homes) {
    shared_guests_ = SharedMemory::create("guests", bytes);
  } else {
    guest_weights_ = allocate_memory(bytes);
  }

  std::byte* next = region().bytes.data();
  const auto own_buffer = [&] {
    SegmentPointers segments;
    for (std::size_t i = 0; i < parts_.layout.num_segments(); ++i) segments.push_back(next + parts_.layout.offset(i));
    next += expert_bytes;
    return segments;
  };
  if (!free) {
    for (int b = 0; b < owned; ++b) buffers_.push_back(own_buffer());
    return;
  }
  for (int l = 0; l < plan.num_layers(); ++l) {
    for (int s = 0; s < homes_per_rank_; ++s) buffers_.push_back(homes.experts(l, s).weights);
    for (int g = 0; g < plan.guest_slots; ++g) buffers_.push_back(own_buffer());
  }
  while (std::ssize(buffers_) < parts_.schedule().buffers_per_rank) buffers_.push_back(own_buffer());
}

SharedRegion SlotPool::region() const {
  if (!shared_guests_.bytes().empty()) return {shared_guests_.bytes(), shared_guests_.name()};
  return {{guest_weights_.data(), static_cast<std::size_t>(guest_weights_.bytes().value)}, ""};
}

void SlotPool::lay_out_gradients() {
  const StepPlan& plan = parts_.plan();
  const int experts = plan.residency == Residency::kShared ? plan.guest_slots : plan.num_layers() * plan.guest_slots;
  guest_gradients_ =
      allocate_memory(Bytes{experts * parts_.layout.elements() * static_cast<std::int64_t>(sizeof(float))});
  float* next = guest_gradients_.floats();
  for (int i = 0; i < experts; ++i) {
    std::vector<float*>& segments = gradients_.emplace_back();
    for (const Segment& segment : parts_.layout.segments()) {
      segments.push_back(next);
      next += segment.elements;
    }
  }
}

std::span<std::byte* const> SlotPool::weights(TurnId turn, SlotId slot) const {
  const StepPlan& plan = parts_.plan();
  const LayerId layer = parts_.schedule().order[turn].layer;
  if (plan.residency == Residency::kFree) return buffer(layer.value * plan.num_slots() + slot.value);
  if (slot.value < homes_per_rank_) return home_weights(layer, slot);
  const int guest = slot.value - homes_per_rank_;
  const int set = plan.residency == Residency::kShared ? turn.value % parts_.schedule().depth : layer.value;
  return buffer(set * plan.guest_slots + guest);
}

std::span<float* const> SlotPool::gradients(LayerId layer, SlotId slot) const {
  if (slot.value < homes_per_rank_) return homes_.experts(layer, slot).gradients;
  const int guest = slot.value - homes_per_rank_;
  const bool shared = parts_.plan().residency == Residency::kShared;
  return gradients_[static_cast<std::size_t>(shared ? guest : layer.value * parts_.plan().guest_slots + guest)];
}

std::span<std::byte* const> SlotPool::home_weights(LayerId layer, SlotId home_slot) const {
  return homes_.experts(layer, home_slot).weights;
}

}  // namespace foremoe
