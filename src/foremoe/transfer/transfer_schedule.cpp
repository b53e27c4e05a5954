#include "foremoe/transfer/transfer_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "foremoe/core/error.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/transfer/copy_paths.h"
#include "foremoe/transfer/staged_copies.h"

namespace foremoe {

namespace {

TurnId turn_after(TurnId t) { return TurnId{t.value + 1}; }

int home_slots(const StepPlan& plan) { return plan.num_slots() - plan.guest_slots; }

// The slots of one rank in one layer as the events pass: who is leased which, and since when it may be overwritten.
// Under every residency but `shared`, where nothing stays.
class LeasedSlots {
 public:
  LeasedSlots(const StepPlan& plan, const TurnOrder& order, LayerId layer, RankId rank)
      : plan_(plan), order_(order), layer_(layer), rank_(rank), finder_(plan, layer), slots_(plan.num_slots()) {
    int s = 0;
    for (int e = 0; e < plan.num_experts(); ++e) {
      if (plan.home(layer, e) != rank) continue;
      slots_[s].holds = slots_[s].contents = ExpertId{e};
      ++s;
    }
  }

  void pass(EventId event, std::vector<ScheduledCopy>& copies) {
    const std::span<const Copy> fetched = finder_.into(event, rank_);
    auto next = fetched.begin();
    for (int s = 0; s < plan_.num_slots(); ++s) {
      Slot& slot = slots_[s];
      const ExpertId e = plan_.slot_expert(event, layer_, rank_, s);
      if (next != fetched.end() && next->slot == SlotId{s}) {
        slot.lease = static_cast<std::ptrdiff_t>(copies.size());
        slot.contents = e;
        if (pins_homes() && s < home_slots(plan_)) refuse(event, SlotId{s}, "a home slot does not hold its expert");
        copies.push_back(lease(SlotId{s}, e, slot.free_from, order_.first(event, layer_)));
        ++next;
      } else if (e != kNoExpert && e != slot.holds) {
        refuse(event, SlotId{s}, fmt::format("expert {} stays on the rank, but was in another slot before", e.value));
      }
      slot.holds = e;
      if (e == kNoExpert) continue;
      const TurnId last = order_.last(event, layer_);
      if (slot.lease >= 0) copies[slot.lease].closes = last;
      slot.free_from = turn_after(last);
    }
  }

  // After the last turn: what was overwritten in home slots comes back.
  void restore_homes(std::vector<ScheduledCopy>& copies) const {
    int s = 0;
    for (int e = 0; e < plan_.num_experts(); ++e) {
      if (plan_.home(layer_, e) != rank_) continue;
      const Slot& slot = slots_[s];
      if (slot.contents != ExpertId{e}) {
        copies.push_back(lease(SlotId{s}, ExpertId{e}, slot.free_from, TurnId{order_.size()}));
      }
      ++s;
    }
  }

 private:
  struct Slot {
    ExpertId holds = kNoExpert;     // at the last event
    ExpertId contents = kNoExpert;  // last written there
    std::ptrdiff_t lease = -1;      // its copy; −1: never written
    TurnId free_from;               // the turn after its last reader
  };

  bool pins_homes() const { return plan_.residency != Residency::kFree; }

  ScheduledCopy lease(SlotId slot, ExpertId e, TurnId opens, TurnId arrives) const {
    const int buffer = pins_homes() ? layer_.value * plan_.guest_slots + slot.value - home_slots(plan_)
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

  [[noreturn]] void refuse(EventId event, SlotId slot, const std::string& what) const {
    throw InputError({.field = "slot_expert",
                      .index = fmt::format("[{}, {}, {}, {}]", event.value, layer_.value, rank_.value, slot.value)},
                     what);
  }

  const StepPlan& plan_;
  const TurnOrder& order_;
  LayerId layer_;
  RankId rank_;
  CopyFinder finder_;
  std::vector<Slot> slots_;
};

std::vector<ScheduledCopy> leases_that_stay(const StepPlan& plan, const TurnOrder& order) {
  std::vector<ScheduledCopy> copies;
  for (int l = 0; l < plan.num_layers(); ++l) {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      LeasedSlots slots(plan, order, LayerId{l}, RankId{r});
      for (int t = 0; t < plan.num_events(); ++t) slots.pass(EventId{t}, copies);
      if (plan.residency == Residency::kFree && order.size() > 0) slots.restore_homes(copies);
    }
  }
  return copies;
}

// `shared`: each turn fetches its guests anew, into the set that the turn `depth` before it has left.
std::vector<ScheduledCopy> leases_of_one_turn(const StepPlan& plan, const TurnOrder& order, int depth) {
  std::vector<ScheduledCopy> copies;
  std::vector<CopyFinder> finder;  // [layer]
  for (int l = 0; l < plan.num_layers(); ++l) finder.emplace_back(plan, LayerId{l});
  for (int t = 0; t < order.size(); ++t) {
    const Turn& turn = order[TurnId{t}];
    for (int r = 0; r < plan.num_ranks(); ++r) {
      for (const Copy& copy : finder[turn.layer.index()].into(turn.event, RankId{r})) {
        const int guest = copy.slot.value - home_slots(plan);
        copies.push_back({.rank = RankId{r},
                          .layer = turn.layer,
                          .expert = copy.expert,
                          .slot = copy.slot,
                          .buffer = t % depth * plan.guest_slots + guest,
                          .opens = TurnId{std::max(0, t - depth + 1)},
                          .arrives = TurnId{t},
                          .closes = TurnId{t}});
      }
    }
  }
  return copies;
}

// Copies that arrive where they are read, by arrives, with their paths.
std::vector<ScheduledCopy> copies_in_place(const StepPlan& plan, const TurnOrder& order, const ExpertLayout& layout,
                                           const ScheduleOptions& options) {
  std::vector<ScheduledCopy> copies = plan.residency == Residency::kShared
                                          ? leases_of_one_turn(plan, order, options.depth)
                                          : leases_that_stay(plan, order);
  std::ranges::sort(copies, {}, [](const ScheduledCopy& c) {
    return std::tuple(c.arrives, c.rank, c.slot, c.layer);  // layers differ among the homes that come back alone
  });
  const ClusterLinks links = links_between(
      options.cluster, {.num_ranks = plan.num_ranks(), .ranks_per_node = plan.ranks_per_node}, options.shares_uplink);
  choose_paths({.plan = plan, .order = order, .layout = layout, .links = links, .choice = options.path}, copies);
  return copies;
}

void refuse_bad_options(const ScheduleOptions& options) {
  if (options.depth < 1) throw InputError({.field = "depth"}, fmt::format("{} is less than 1", options.depth));
  if (options.depth > kMostDepth) {
    throw InputError({.field = "depth"}, fmt::format("{} is more than {}", options.depth, kMostDepth));
  }
}

}  // namespace

std::string_view to_string(PathChoice choice) {
  return choice == PathChoice::kAuto ? "auto" : choice == PathChoice::kHost ? "host" : "peer";
}

TransferSchedule make_transfer_schedule(const StepPlan& plan, const ExpertLayout& layout,
                                        const ScheduleOptions& options) {
  refuse_bad_options(options);
  TransferSchedule schedule{.phase = options.phase, .depth = options.depth};
  schedule.order = make_turn_order(plan, options.phase);
  schedule.buffers_per_rank = num_buffers(plan, options.depth);
  if (plan.residency == Residency::kFree && options.path == PathChoice::kPeer) {
    StagedCopies staged = staged_copies(plan, schedule.order, {.depth = options.depth});
    schedule.copies = std::move(staged.copies);
    schedule.buffers_per_rank += staged.buffers;
  } else {
    schedule.copies = copies_in_place(plan, schedule.order, layout, options);
  }
  index_copies(schedule);
  schedule.arena = experts_of_arenas(plan, schedule.copies);
  return schedule;
}

int num_buffers(const StepPlan& plan, int depth) {
  switch (plan.residency) {
    case Residency::kShared:
      return depth * plan.guest_slots;
    case Residency::kFree:
      return plan.num_layers() * plan.num_slots();
    default:
      return plan.num_layers() * plan.guest_slots;
  }
}

void index_copies(TransferSchedule& schedule) {
  schedule.first_of_turn.clear();
  auto next = schedule.copies.begin();
  const int last = schedule.copies.empty() ? 0 : schedule.copies.back().arrives.value;
  for (int t = 0; t < std::max(schedule.order.size(), last) + 2; ++t) {
    while (next != schedule.copies.end() && next->arrives < TurnId{t}) ++next;
    schedule.first_of_turn.push_back(static_cast<std::size_t>(next - schedule.copies.begin()));
  }
}

std::span<const ScheduledCopy> TransferSchedule::arriving(TurnId t) const {
  const std::size_t first = first_of_turn[t.index()];
  return std::span(copies).subspan(first, first_of_turn[t.index() + 1] - first);
}

GuestMemory guest_memory(const StepPlan& plan, const ExpertLayout& layout, const ScheduleOptions& options) {
  const std::int64_t guests = plan.guest_slots;
  const std::int64_t in_all_layers = guests * plan.num_layers();
  const bool shared = plan.residency == Residency::kShared;
  std::int64_t buffers = shared ? options.depth * guests : in_all_layers;
  if (plan.residency == Residency::kFree && options.path == PathChoice::kPeer) {
    buffers += staged_copies(plan, make_turn_order(plan, options.phase), {.depth = options.depth}).buffers;
  }
  GuestMemory memory;
  memory.weights = Bytes{buffers * layout.bytes().value};
  if (options.phase == Phase::kPolicyUpdate) {
    // Under `shared` a turn's gradients go home with it, so that one set serves all layers.
    memory.gradients = Bytes{(shared ? guests : in_all_layers) * layout.elements() * std::int64_t{sizeof(float)}};
  }
  return memory;
}

LayerTurns::LayerTurns(const TurnOrder& order) : num_turns_(order.size()) {
  for (int t = 0; t < order.size(); ++t) {
    const Turn& turn = order[TurnId{t}];
    if (turn.layer.index() >= of_layer_.size()) {
      of_layer_.resize(turn.layer.index() + 1);
      forwards_before_.resize(of_layer_.size(), {0});
    }
    of_layer_[turn.layer.index()].push_back(TurnId{t});
    std::vector<int>& forwards = forwards_before_[turn.layer.index()];
    forwards.push_back(forwards.back() + (turn.pass == Pass::kForward ? 1 : 0));
  }
}

std::optional<TurnId> LayerTurns::next(LayerId layer, TurnId after) const {
  const std::vector<TurnId>& turns = of_layer_[layer.index()];
  const auto at = std::ranges::upper_bound(turns, after);
  return at == turns.end() ? std::nullopt : std::optional(*at);
}

bool LayerTurns::any(const ScheduledCopy& copy, Pass pass) const {
  const std::vector<TurnId>& turns = of_layer_[copy.layer.index()];
  const auto begin = std::ranges::lower_bound(turns, copy.arrives) - turns.begin();
  const auto end = std::ranges::upper_bound(turns, copy.closes) - turns.begin();
  const auto before = [&](std::ptrdiff_t i) {
    return forwards_before_[copy.layer.index()][static_cast<std::size_t>(i)];
  };
  const auto forwards = before(end) - before(begin);
  return pass == Pass::kForward ? forwards > 0 : end - begin > forwards;
}

bool LayerTurns::needs(const ScheduledCopy& copy, const Segment& segment) const {
  if (copy.arrives.value >= num_turns_ || copy.staged()) return true;
  return (segment.in_forward && any(copy, Pass::kForward)) || (segment.in_backward && any(copy, Pass::kBackward));
}

}  // namespace foremoe
