#include "foremoe/transfer/slot_leases.h"

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/core/error.h"

namespace foremoe {

namespace {

// Tracks the slots of one rank in one layer over the events.
class Slots {
 public:
  Slots(const StepPlan& plan, const TurnOrder& order, bool begins_with_last, LayerId layer, RankId rank)
      : plan_(plan),
        order_(order),
        begins_with_last_(begins_with_last),
        layer_(layer),
        rank_(rank),
        finder_(plan, layer),
        slots_(plan.num_slots()) {
    int homes = 0;
    for (int e = 0; e < plan.num_experts(); ++e) {
      if (plan.home(layer, e) == rank) slots_[homes++].home = ExpertId{e};
    }
    for (int s = 0; s < plan.num_slots(); ++s) {
      Slot& slot = slots_[s];
      slot.holds = begins_with_last_ ? plan.slot_expert(plan.num_events() - 1, layer, rank, s) : slot.home;
      slot.contents = slot.holds;
    }
  }

  void pass(EventId event, SlotLeases& leases) {
    const std::vector<SlotId> brought = newcomers(event);
    auto next = brought.begin();
    for (int s = 0; s < plan_.num_slots(); ++s) {
      Slot& slot = slots_[s];
      const ExpertId e = plan_.slot_expert(event, layer_, rank_, s);
      if (next != brought.end() && *next == SlotId{s}) {
        if (pins_homes() && s < home_slots()) refuse(event, s, "a home slot does not hold its expert");
        slot.begin(leases.copies, lease(SlotId{s}, e, slot.free_from, order_.first(event, layer_)));
        ++next;
      } else if (begins_with_last_ && event == EventId{0} && e != kNoExpert) {
        slot.begin(leases.from_before, lease(SlotId{s}, e, TurnId{0}, order_.first(event, layer_)));
      } else if (e != kNoExpert && e != slot.holds) {
        refuse(event, s, fmt::format("expert {} stays on the rank, but was in another slot before", e.value));
      }
      slot.holds = e;
      if (e != kNoExpert) slot.read_until(order_.last(event, layer_));
    }
  }

  void bring_homes_back(SlotLeases& leases) {
    for (int s = 0; s < home_slots(); ++s) {
      Slot& slot = slots_[s];
      if (slot.contents == slot.home) continue;
      slot.begin(leases.copies, lease(SlotId{s}, slot.home, slot.free_from, TurnId{order_.size()}));
    }
  }

 private:
  struct Slot {
    ExpertId home = kNoExpert;
    ExpertId holds = kNoExpert;                  // at the previous event
    ExpertId contents = kNoExpert;               // expert last copied into the buffer
    TurnId free_from;                            // the turn after its last reader
    std::vector<ScheduledCopy>* list = nullptr;  // contains its lease; null: never leased
    std::size_t at = 0;

    void begin(std::vector<ScheduledCopy>& leases, const ScheduledCopy& lease) {
      list = &leases;
      at = leases.size();
      contents = lease.expert;
      leases.push_back(lease);
    }
    void read_until(TurnId last) {
      if (list != nullptr) (*list)[at].closes = last;
      free_from = TurnId{last.value + 1};
    }
  };

  bool pins_homes() const { return plan_.residency != Residency::kFree; }
  int home_slots() const { return plan_.num_slots() - plan_.guest_slots; }

  std::vector<SlotId> newcomers(EventId event) {
    std::vector<SlotId> slots;
    if (event > EventId{0} || !begins_with_last_) {
      for (const Copy& copy : finder_.into(event, rank_)) slots.push_back(copy.slot);
      return slots;
    }
    for (int s = 0; s < plan_.num_slots(); ++s) {
      const ExpertId e = plan_.slot_expert(event, layer_, rank_, s);
      if (e != kNoExpert && std::ranges::find(slots_, e, &Slot::holds) == slots_.end()) slots.emplace_back(s);
    }
    return slots;
  }

  ScheduledCopy lease(SlotId slot, ExpertId e, TurnId opens, TurnId arrives) const {
    const int buffer = pins_homes() ? layer_.value * plan_.guest_slots + slot.value - home_slots()
                                    : layer_.value * plan_.num_slots() + slot.value;
    return {.rank = rank_,
            .layer = layer_,
            .expert = e,
            .slot = slot,
            .buffer = buffer,
            .opens = opens,
            .arrives = arrives,
            .closes = arrives};
  }

  [[noreturn]] void refuse(EventId event, int slot, const std::string& what) const {
    throw InputError({.field = "slot_expert",
                      .index = fmt::format("[{}, {}, {}, {}]", event.value, layer_.value, rank_.value, slot)},
                     what);
  }

  const StepPlan& plan_;
  const TurnOrder& order_;
  bool begins_with_last_;
  LayerId layer_;
  RankId rank_;
  CopyFinder finder_;
  std::vector<Slot> slots_;
};

}  // namespace

SlotLeases slot_leases(const StepPlan& plan, const TurnOrder& order, const ScheduleOptions& options) {
  const bool free = plan.residency == Residency::kFree && order.size() > 0;
  SlotLeases leases;
  for (int l = 0; l < plan.num_layers(); ++l) {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      Slots slots(plan, order, free && options.begins_with_last_placement, LayerId{l}, RankId{r});
      for (int t = 0; t < plan.num_events(); ++t) slots.pass(EventId{t}, leases);
      if (free && !options.leaves_last_placement) slots.bring_homes_back(leases);
    }
  }
  return leases;
}

}  // namespace foremoe
