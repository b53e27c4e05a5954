#include "foremoe/transfer/staged_copies.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "foremoe/core/error.h"

namespace foremoe {

namespace {

// What the slots of one layer contain, on all ranks, as the events pass.
class LayerSlots {
 public:
  LayerSlots(const StepPlan& plan, const TurnOrder& order, const StagingOptions& options, LayerId layer)
      : plan_(plan),
        order_(order),
        options_(options),
        layer_(layer),
        finder_(plan, layer),
        slots_({static_cast<std::size_t>(plan.num_ranks()), static_cast<std::size_t>(plan.num_slots())}) {
    std::vector<int> homes(slots_.extent(0));
    for (int e = 0; e < plan.num_experts(); ++e) {
      const RankId home = plan.home(layer, e);
      slots_(home, homes[home.index()]++).expert = ExpertId{e};
    }
    homes_ = slots_;
    if (!options.begin_with_last_placement) return;
    const EventId last{plan.num_events() - 1};
    for (int r = 0; r < plan.num_ranks(); ++r) {
      for (int s = 0; s < plan.num_slots(); ++s) slots_(r, s).expert = plan.slot_expert(last, layer, r, s);
    }
  }

  void pass(EventId event, std::vector<ScheduledCopy>& copies) {
    const std::size_t first = copies.size();
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      for (const Copy& copy : into(event, RankId{r})) {
        copies.push_back(copy_of(copy.expert, RankId{r}, copy.slot, order_.first(event, layer_)));
      }
    }
    find_sources(std::span(copies).subspan(first), event);
    for (std::size_t i = first; i < copies.size(); ++i) {
      slots_(copies[i].rank, copies[i].slot) = {.expert = copies[i].expert,
                                                .readable = TurnId{copies[i].arrives.value + 1},
                                                .copy = static_cast<std::ptrdiff_t>(i)};
    }
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      for (int s = 0; s < plan_.num_slots(); ++s) {
        const ExpertId e = plan_.slot_expert(event, layer_, r, s);
        if (e == kNoExpert) continue;
        const Slot& slot = slots_(r, s);
        if (slot.expert != e) refuse(event, RankId{r}, s, "stays on the rank, but was in another slot before", e);
        if (slot.copy >= 0) copies[static_cast<std::size_t>(slot.copy)].closes = order_.last(event, layer_);
      }
    }
  }

  void bring_homes_back(std::vector<ScheduledCopy>& copies) {
    const std::size_t first = copies.size();
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      for (int s = 0; s < plan_.num_slots() - plan_.guest_slots; ++s) {
        const ExpertId home = homes_(r, s).expert;
        if (slots_(r, s).expert == home) continue;
        copies.push_back(copy_of(home, RankId{r}, SlotId{s}, TurnId{order_.size() + layer_.value}));
      }
    }
    find_sources(std::span(copies).subspan(first), EventId{plan_.num_events()});
  }

 private:
  struct Slot {
    ExpertId expert = kNoExpert;
    TurnId readable;           // by other ranks, from the beginning of this turn on
    std::ptrdiff_t copy = -1;  // that brought it; −1: it is at home
  };

  // Of a placement that a former phase has left, an expert may stay on its rank and change its slot.
  std::span<const Copy> into(EventId event, RankId rank) {
    if (event > EventId{0} || !options_.begin_with_last_placement) return finder_.into(event, rank);
    changed_.clear();
    for (int s = 0; s < plan_.num_slots(); ++s) {
      const ExpertId e = plan_.slot_expert(event, layer_, rank, s);
      if (e != kNoExpert && e != slots_(rank, s).expert) changed_.push_back({e, SlotId{s}});
    }
    return changed_;
  }

  ScheduledCopy copy_of(ExpertId e, RankId rank, SlotId slot, TurnId arrives) const {
    return {.rank = rank,
            .layer = layer_,
            .expert = e,
            .slot = slot,
            .buffer = layer_.value * plan_.num_slots() + slot.value,
            .opens = TurnId{std::max(0, arrives.value - options_.depth + 1)},
            .arrives = arrives,
            .closes = arrives,
            .path = Path::kPeer};
  }

  // Copies that arrive together read what was there before any of them.
  void find_sources(std::span<ScheduledCopy> copies, EventId event) {
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
      if (of_expert.empty()) refuse(event, copy.rank, copy.slot.value, "is on no rank before", copy.expert);
      const auto [source, slot] = *std::ranges::min_element(of_expert, {}, [&](const auto& holder) {
        const RankId rank = holder.first;
        return std::tuple(rank != copy.rank, !topology.same_node(rank, copy.rank), sent[rank.index()], rank);
      });
      copy.source = source;
      copy.source_buffer = layer_.value * plan_.num_slots() + slot.value;
      copy.opens = std::max(copy.opens, slots_(source, slot).readable);
      ++sent[source.index()];
    }
  }

  [[noreturn]] void refuse(EventId event, RankId rank, int slot, std::string_view what, ExpertId e) const {
    throw InputError(
        {.field = "slot_expert", .index = fmt::format("[{}, {}, {}, {}]", event.value, layer_.value, rank.value, slot)},
        fmt::format("expert {} {}", e.value, what));
  }

  const StepPlan& plan_;
  const TurnOrder& order_;
  StagingOptions options_;
  LayerId layer_;
  CopyFinder finder_;
  std::vector<Copy> changed_;
  Array<Slot, 2> slots_;  // [rank][slot]
  Array<Slot, 2> homes_;  // likewise, before the first event
};

// Each turn has its set, in which the copies of a rank count up from 0.
void number_buffers(const StepPlan& plan, int depth, StagedCopies& staged) {
  int most = 0;
  const ScheduledCopy* before = nullptr;
  for (ScheduledCopy& copy : staged.copies) {
    const bool same = before != nullptr && copy.arrives == before->arrives && copy.rank == before->rank;
    copy.staging = same ? before->staging + 1 : 0;
    most = std::max(most, copy.staging + 1);
    before = &copy;
  }
  staged.buffers = depth * most;
  for (ScheduledCopy& copy : staged.copies) {
    copy.staging += num_buffers(plan, depth) + copy.arrives.value % depth * most;
  }
}

}  // namespace

StagedCopies staged_copies(const StepPlan& plan, const TurnOrder& order, const StagingOptions& options) {
  StagedCopies staged;
  for (int l = 0; l < plan.num_layers(); ++l) {
    LayerSlots slots(plan, order, options, LayerId{l});
    for (int t = 0; t < plan.num_events(); ++t) slots.pass(EventId{t}, staged.copies);
    if (options.bring_homes_back && order.size() > 0) slots.bring_homes_back(staged.copies);
  }
  std::ranges::sort(staged.copies, {}, [](const ScheduledCopy& c) { return std::tuple(c.arrives, c.rank, c.slot); });
  number_buffers(plan, options.depth, staged);
  return staged;
}

}  // namespace foremoe
