#include "foremoe/runtime/gradient_returns.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "foremoe/runtime/cpu/optimizers.h"

namespace foremoe {

GradientReturns::GradientReturns(const PhaseParts& parts, const SlotPool& pool, Communicator& communicator)
    : parts_(parts),
      pool_(pool),
      communicator_(communicator),
      expert_elements_(parts.layout.elements()),
      begun_(static_cast<std::size_t>(parts.plan().num_layers() * parts.plan().guest_slots)) {
  // Upper bound for one exchange: every other rank sends the gradients of its guests of this rank's experts. These
  // guests are at most E/R different experts of one layer.
  const std::int64_t guests = parts.plan().guest_slots;
  const std::int64_t homes = pool.homes_per_rank();
  const std::int64_t incoming = (communicator.num_ranks() - 1) * std::min(guests, homes);
  const std::int64_t expert_bytes = expert_elements_ * static_cast<std::int64_t>(sizeof(float));
  sent_ = allocate_memory(Bytes{guests * expert_bytes});
  received_ = allocate_memory(Bytes{incoming * expert_bytes});
}

char& GradientReturns::begun(LayerId layer, SlotId slot) {
  return begun_[static_cast<std::size_t>(layer.value * parts_.plan().guest_slots + slot.value -
                                         pool_.homes_per_rank())];
}

bool GradientReturns::begins(LayerId layer, SlotId slot) { return std::exchange(begun(layer, slot), 1) == 0; }

Bytes GradientReturns::send_home(LayerId layer, std::span<const GradientReturn> guests) {
  const RankId self = communicator_.rank();
  const auto num_ranks = static_cast<std::size_t>(communicator_.num_ranks());
  const std::int64_t expert_bytes = expert_elements_ * static_cast<std::int64_t>(sizeof(float));
  bytes_to_.assign(num_ranks, 0);
  bytes_from_.assign(num_ranks, 0);

  std::byte* next = sent_.data();
  for (int to = 0; to < communicator_.num_ranks(); ++to) {
    for (const GradientReturn& guest : guests) {
      if (guest.guest != self || guest.home != RankId{to}) continue;
      if (std::exchange(begun(layer, guest.slot), 0) != 0) {
        const auto gradients = pool_.gradients(layer, guest.slot);  // segments are contiguous
        std::memcpy(next, gradients.front(), static_cast<std::size_t>(expert_bytes));
      } else {
        std::memset(next, 0, static_cast<std::size_t>(expert_bytes));
      }
      next += expert_bytes;
      bytes_to_[static_cast<std::size_t>(to)] += expert_bytes;
    }
  }
  for (const GradientReturn& guest : guests) {
    if (guest.home == self) bytes_from_[guest.guest.index()] += expert_bytes;
  }
  communicator_.exchange({sent_.data(), bytes_to_, received_.data(), bytes_from_});
  add_to_homes(layer, guests);
  return Bytes{next - sent_.data()};
}

void GradientReturns::add_to_homes(LayerId layer, std::span<const GradientReturn> guests) {
  std::vector<std::int64_t> at(bytes_from_.size());  // [source] → offset of its next gradient
  std::exclusive_scan(bytes_from_.begin(), bytes_from_.end(), at.begin(), std::int64_t{0});
  const std::vector<SlotId> slots = home_slots(parts_.plan().home.row(layer));
  for (const GradientReturn& guest : guests) {  // in ascending (expert, rank) order
    if (guest.home != communicator_.rank()) continue;
    const auto gradients = pool_.gradients(layer, slots[guest.expert.index()]);
    std::int64_t& from = at[guest.guest.index()];
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const Segment& segment = parts_.layout.segments()[i];
      cpu::add({gradients[i], static_cast<std::size_t>(segment.elements)},
               reinterpret_cast<const float*>(received_.data() + from));
      from += segment.elements * static_cast<std::int64_t>(sizeof(float));
    }
  }
}

}  // namespace foremoe
