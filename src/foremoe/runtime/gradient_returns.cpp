#include "foremoe/runtime/gradient_returns.h"

#include <algorithm>
#include <cstring>

#include "foremoe/runtime/cpu/optimizers.h"

namespace foremoe {

GuestGradients::GuestGradients(const StepPlan& plan)
    : plan_(plan),
      homes_per_rank_(plan.num_slots() - plan.guest_slots),
      dirty_(static_cast<std::size_t>(plan.num_layers()) * static_cast<std::size_t>(plan.num_ranks()) *
                 static_cast<std::size_t>(plan.guest_slots),
             kNoExpert) {}

std::size_t GuestGradients::index(LayerId layer, RankId rank, SlotId slot) const {
  const auto ranks = static_cast<std::size_t>(plan_.num_ranks());
  const auto guests = static_cast<std::size_t>(plan_.guest_slots);
  return (layer.index() * ranks + rank.index()) * guests + static_cast<std::size_t>(slot.value - homes_per_rank_);
}

bool GuestGradients::dirty(LayerId layer, RankId rank, SlotId slot) const {
  return dirty_[index(layer, rank, slot)] != kNoExpert;
}

void GuestGradients::ran_backward(EventId event, LayerId layer) {
  for (int r = 0; r < plan_.num_ranks(); ++r) {
    for (int s = homes_per_rank_; s < plan_.num_slots(); ++s) {
      if (plan_.slot_tokens(event, layer, r, s) > Tokens{0}) {
        dirty_[index(layer, RankId{r}, SlotId{s})] = plan_.slot_expert(event, layer, r, s);
      }
    }
  }
}

template <class Goes>
std::vector<GuestGradients::Guest> GuestGradients::take(LayerId layer, Goes goes) {
  std::vector<Guest> guests;
  for (int r = 0; r < plan_.num_ranks(); ++r) {
    for (int s = homes_per_rank_; s < plan_.num_slots(); ++s) {
      ExpertId& expert = dirty_[index(layer, RankId{r}, SlotId{s})];
      if (expert == kNoExpert || !goes(expert, r, s)) continue;
      guests.push_back({expert, RankId{r}, SlotId{s}});
      expert = kNoExpert;
    }
  }
  std::ranges::sort(guests);
  return guests;
}

std::vector<GuestGradients::Guest> GuestGradients::take_leaving(EventId event, LayerId layer) {
  if (plan_.residency == Residency::kShared) return take_all(layer);
  const EventId next{event.value + 1};
  if (next.value == plan_.num_events()) return {};
  return take(layer, [&](ExpertId expert, int r, int s) { return plan_.slot_expert(next, layer, r, s) != expert; });
}

std::vector<GuestGradients::Guest> GuestGradients::take_all(LayerId layer) {
  return take(layer, [](ExpertId, int, int) { return true; });
}

GradientReturns::GradientReturns(const PhaseParts& parts, const SlotPool& pool, Communicator& communicator)
    : parts_(parts), pool_(pool), communicator_(communicator), expert_elements_(parts.layout.elements()) {
  // The most that one exchange can bring: each rank's guests of a layer whose home is here, at most E/R different
  // experts on each of the other ranks.
  const std::int64_t guests = parts.plan.guest_slots;
  const std::int64_t homes = pool.homes_per_rank();
  const std::int64_t incoming = (communicator.num_ranks() - 1) * std::min(guests, homes);
  const std::int64_t expert_bytes = expert_elements_ * static_cast<std::int64_t>(sizeof(float));
  sent_ = allocate_memory(Bytes{guests * expert_bytes});
  received_ = allocate_memory(Bytes{incoming * expert_bytes});
}

Bytes GradientReturns::send_home(LayerId layer, std::span<const GuestGradients::Guest> guests) {
  const RankId self = communicator_.rank();
  const auto num_ranks = static_cast<std::size_t>(communicator_.num_ranks());
  const std::int64_t expert_bytes = expert_elements_ * static_cast<std::int64_t>(sizeof(float));
  bytes_to_.assign(num_ranks, 0);
  bytes_from_.assign(num_ranks, 0);

  std::byte* next = sent_.data();
  for (int to = 0; to < communicator_.num_ranks(); ++to) {
    for (const GuestGradients::Guest& guest : guests) {
      if (guest.rank != self || parts_.plan.home(layer, guest.expert) != RankId{to}) continue;
      const auto gradients = pool_.gradients(layer, guest.slot);  // segments lie one after the other
      std::memcpy(next, gradients.front(), static_cast<std::size_t>(expert_bytes));
      next += expert_bytes;
      bytes_to_[static_cast<std::size_t>(to)] += expert_bytes;
    }
  }
  for (const GuestGradients::Guest& guest : guests) {
    if (parts_.plan.home(layer, guest.expert) == self) bytes_from_[guest.rank.index()] += expert_bytes;
  }
  communicator_.exchange({sent_.data(), bytes_to_, received_.data(), bytes_from_});
  add_to_homes(layer, guests, received_.floats());
  return Bytes{next - sent_.data()};
}

void GradientReturns::add_to_homes(LayerId layer, std::span<const GuestGradients::Guest> guests,
                                   const float* received) {
  const RankId self = communicator_.rank();
  std::vector<std::int64_t> at(
      static_cast<std::size_t>(communicator_.num_ranks()));  // next of each source, in elements
  for (std::size_t r = 1; r < at.size(); ++r) {
    at[r] = at[r - 1] + bytes_from_[r - 1] / static_cast<std::int64_t>(sizeof(float));
  }
  for (const GuestGradients::Guest& guest : guests) {  // ascending (expert, rank)
    if (parts_.plan.home(layer, guest.expert) != self) continue;
    const auto gradients = pool_.gradients(layer, pool_.home_slot(layer, guest.expert));
    std::int64_t& from = at[guest.rank.index()];
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const std::int64_t n = parts_.layout.segments()[i].elements;
      cpu::add({gradients[i], static_cast<std::size_t>(n)}, received + from);
      from += n;
    }
  }
}

}  // namespace foremoe
