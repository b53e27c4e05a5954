#include "foremoe/transfer/staged_copies.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "foremoe/core/error.h"

namespace foremoe {

namespace {

// Tracks the slot contents of one layer on all ranks over its turns.
class LayerContents {
 public:
  LayerContents(const StepPlan& plan, const ScheduleOptions& options, LayerId layer)
      : plan_(plan),
        layer_(layer),
        slots_({static_cast<std::size_t>(plan.num_ranks()), static_cast<std::size_t>(plan.num_slots())}) {
    if (options.begins_with_last_placement) {
      const EventId last{plan.num_events() - 1};
      for (int r = 0; r < plan.num_ranks(); ++r) {
        for (int s = 0; s < plan.num_slots(); ++s) slots_(r, s).expert = plan.slot_expert(last, layer, r, s);
      }
      return;
    }
    const std::vector<SlotId> home_slot = home_slots(plan.home.row(layer));
    for (int e = 0; e < plan.num_experts(); ++e) slots_(plan.home(layer, e), home_slot[e]).expert = ExpertId{e};
  }

  // Copies that arrive together all read the slots as they were before any of these copies arrived.
  void find_sources(std::span<ScheduledCopy> copies, EventId event) const {
    if (copies.empty()) return;
    const Topology topology{.num_ranks = plan_.num_ranks(), .ranks_per_node = plan_.ranks_per_node};
    std::vector<std::vector<std::pair<RankId, SlotId>>> holders(static_cast<std::size_t>(plan_.num_experts()));
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      for (int s = 0; s < plan_.num_slots(); ++s) {
        const ExpertId e = slots_(r, s).expert;
        if (e != kNoExpert) holders[e.index()].emplace_back(r, s);
      }
    }
    std::vector<int> sent(static_cast<std::size_t>(plan_.num_ranks()));
    for (ScheduledCopy& copy : copies) {
      const auto& of_expert = holders[copy.expert.index()];
      if (of_expert.empty()) refuse(event, copy);
      const auto [source, slot] = *std::ranges::min_element(of_expert, {}, [&](const auto& holder) {
        const RankId rank = holder.first;
        return std::tuple(rank != copy.rank, !topology.same_node(rank, copy.rank), sent[rank.index()], rank);
      });
      copy.path = Path::kPeer;
      copy.source = source;
      copy.source_buffer = layer_.value * plan_.num_slots() + slot.value;
      copy.opens = std::max(copy.opens, slots_(source, slot).readable);
      ++sent[source.index()];
    }
  }

  void arrive(std::span<const ScheduledCopy> copies) {
    for (const ScheduledCopy& copy : copies) {
      slots_(copy.rank, copy.slot) = {.expert = copy.expert, .readable = TurnId{copy.arrives.value + 1}};
    }
  }

  void stay(std::span<const ScheduledCopy> leases) {
    for (const ScheduledCopy& lease : leases) slots_(lease.rank, lease.slot).expert = lease.expert;
  }

 private:
  struct Slot {
    ExpertId expert = kNoExpert;
    TurnId readable;  // first turn at which other ranks may read the expert
  };

  [[noreturn]] void refuse(EventId event, const ScheduledCopy& copy) const {
    throw InputError(
        {.field = "slot_expert",
         .index = fmt::format("[{}, {}, {}, {}]", event.value, layer_.value, copy.rank.value, copy.slot.value)},
        fmt::format("no rank holds expert {} before this copy", copy.expert.value));
  }

  const StepPlan& plan_;
  LayerId layer_;
  Array<Slot, 2> slots_;  // [rank][slot]
};

// Gives each layer its own turn for returning homes, and opens copies when their set of buffers is free.
void set_turns(const TurnOrder& order, int depth, std::span<ScheduledCopy> copies) {
  for (ScheduledCopy& copy : copies) {
    if (copy.arrives.value == order.size()) copy.arrives = copy.closes = TurnId{order.size() + copy.layer.value};
    copy.opens = TurnId{std::max(0, copy.arrives.value - depth)};
  }
}

// Assigns staging buffers, numbered from `first`, to the copies of each rank. Returns the number of buffers per rank.
int number_buffers(int first, int sets, std::span<ScheduledCopy> copies) {
  int most = 0;
  const ScheduledCopy* before = nullptr;
  for (ScheduledCopy& copy : copies) {
    const bool same = before != nullptr && copy.arrives == before->arrives && copy.rank == before->rank;
    copy.staging = same ? before->staging + 1 : 0;
    most = std::max(most, copy.staging + 1);
    before = &copy;
  }
  for (ScheduledCopy& copy : copies) copy.staging += first + copy.arrives.value % sets * most;
  return sets * most;
}

std::span<ScheduledCopy> of_layer(std::vector<ScheduledCopy>& leases, LayerId layer) {
  const auto begin = std::ranges::lower_bound(leases, layer, {}, &ScheduledCopy::layer);
  return {begin, std::ranges::upper_bound(begin, leases.end(), layer, {}, &ScheduledCopy::layer)};
}

}  // namespace

int stage_copies(const StepPlan& plan, const TurnOrder& order, const ScheduleOptions& options, SlotLeases& leases) {
  const auto by_arrival = [](const ScheduledCopy& c) { return std::tuple(c.arrives, c.rank, c.slot); };
  set_turns(order, options.depth, leases.copies);
  for (int l = 0; l < plan.num_layers(); ++l) {
    LayerContents contents(plan, options, LayerId{l});
    const std::span<ScheduledCopy> copies = of_layer(leases.copies, LayerId{l});
    std::ranges::sort(copies, {}, by_arrival);
    auto next = copies.begin();
    for (int t = 0; t <= plan.num_events(); ++t) {
      const auto end = t < plan.num_events()
                           ? std::ranges::find_if(next, copies.end(),
                                                  [at = order.first(t, l)](const auto& c) { return c.arrives > at; })
                           : copies.end();
      contents.find_sources({next, end}, EventId{t});
      contents.arrive({next, end});
      if (t == 0) contents.stay(of_layer(leases.from_before, LayerId{l}));
      next = end;
    }
  }
  std::ranges::sort(leases.copies, {}, by_arrival);
  return number_buffers(num_buffers(plan, options.depth), options.depth + 1, leases.copies);
}

}  // namespace foremoe
