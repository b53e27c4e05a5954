#include "foremoe/transfer/transfer_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "foremoe/core/error.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/transfer/copy_paths.h"
#include "foremoe/transfer/slot_leases.h"
#include "foremoe/transfer/staged_copies.h"

namespace foremoe {

namespace {

int home_slots(const StepPlan& plan) { return plan.num_slots() - plan.guest_slots; }

// `shared`: each turn fetches its guests into the set of buffers last used by the turn `depth` before it.
std::vector<ScheduledCopy> leases_of_turns(const StepPlan& plan, const TurnOrder& order, int depth, int first,
                                           int last) {
  std::vector<ScheduledCopy> copies;
  std::vector<CopyFinder> finder;  // [layer]
  for (int l = 0; l < plan.num_layers(); ++l) finder.emplace_back(plan, LayerId{l});
  for (int t = first; t < last; ++t) {
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

// Sorts the copies that arrive directly in their slots, and chooses their paths.
void sort_and_choose_paths(const StepPlan& plan, const TurnOrder& order, const ExpertLayout& layout,
                           const ScheduleOptions& options, std::vector<ScheduledCopy>& copies) {
  std::ranges::sort(copies, {}, [](const ScheduledCopy& c) {
    return std::tuple(c.arrives, c.rank, c.slot, c.layer);  // only returning homes differ in layer alone
  });
  const ClusterLinks links = links_between(
      options.cluster, {.num_ranks = plan.num_ranks(), .ranks_per_node = plan.ranks_per_node}, options.shares_uplink);
  choose_paths({.plan = plan, .order = order, .layout = layout, .links = links, .choice = options.path}, copies);
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
  return make_transfer_schedule(plan, make_turn_order(plan, options.phase), layout, options);
}

TransferSchedule make_transfer_schedule(const StepPlan& plan, TurnOrder order, const ExpertLayout& layout,
                                        const ScheduleOptions& options) {
  expect_valid(plan);
  refuse_bad_options(options);
  TransferSchedule schedule{.phase = options.phase, .depth = options.depth, .order = std::move(order)};
  schedule.buffers_per_rank = num_buffers(plan, options.depth);
  SlotLeases leases;
  if (plan.residency == Residency::kShared) {
    leases.copies = leases_of_turns(plan, schedule.order, options.depth, 0, schedule.order.size());
  } else {
    leases = slot_leases(plan, schedule.order, options);
  }
  if (plan.residency == Residency::kFree && options.path == PathChoice::kPeer) {
    schedule.buffers_per_rank += stage_copies(plan, schedule.order, options, leases);
  } else {
    sort_and_choose_paths(plan, schedule.order, layout, options, leases.copies);
  }
  schedule.copies = std::move(leases.copies);
  schedule.from_before = std::move(leases.from_before);
  index_copies(schedule);
  schedule.arena = experts_of_arenas(plan, schedule.copies);
  return schedule;
}

TransferSchedule begin_lending(const StepPlan& plan, const ScheduleOptions& options) {
  refuse_bad_options(options);
  TransferSchedule schedule{
      .phase = options.phase, .depth = options.depth, .order = make_turn_order(plan, options.phase)};
  schedule.buffers_per_rank = num_buffers(plan, options.depth);
  schedule.arena.resize(static_cast<std::size_t>(plan.topology().num_nodes()));
  index_copies(schedule);
  return schedule;
}

void lend_turns(const StepPlan& plan, TurnId end, TransferSchedule& schedule) {
  std::vector<ScheduledCopy> copies =
      leases_of_turns(plan, schedule.order, schedule.depth, schedule.lent_turns, end.value);
  for (ScheduledCopy& copy : copies) {
    copy.path = Path::kPeer;
    copy.source = plan.home(copy.layer, copy.expert);
  }
  schedule.copies.insert(schedule.copies.end(), copies.begin(), copies.end());  // sorted by arrives, rank, slot
  schedule.lent_turns = end.value;
  index_copies(schedule);
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

GuestMemory guest_memory(const StepPlan& plan, const ExpertLayout& layout, const TransferSchedule& schedule) {
  const std::int64_t homes = plan.residency == Residency::kFree ? plan.num_layers() * home_slots(plan) : 0;
  GuestMemory memory;
  memory.weights = Bytes{(schedule.buffers_per_rank - homes) * layout.bytes().value};
  if (schedule.phase == Phase::kPolicyUpdate) {
    // Under `shared`, gradients return home after each turn, so one set serves all layers.
    const std::int64_t layers = plan.residency == Residency::kShared ? 1 : plan.num_layers();
    memory.gradients = Bytes{layers * plan.guest_slots * layout.elements() * std::int64_t{sizeof(float)}};
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
