#include "foremoe/sim/phase_transfers.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "foremoe/core/error.h"
#include "foremoe/sim/copy_sources.h"
#include "foremoe/transfer/copy_paths.h"
#include "foremoe/transfer/staged_copies.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

namespace {

// ---- a plan of residency `free` over the host path ----
//
// Such a plan is forward-only in execution (transfer/turn_order.h refuses its backward): an expert away from its home
// has no rank to keep its gradient. To say what it would cost in training, the leases that recompute has are stretched:
// a replica that serves a micro-step's forward stays until that micro-step's backward is done, and the next one may
// come after that. Homes are not copied back, because the optimizer writes them anew. Where recompute ran by the same
// plan, it need not copy homes back either: the policy update begins with the placement that recompute leaves.

struct FreeUpdateOptions {
  ScheduleOptions schedule;      // its `phase` is not read
  bool after_recompute = false;  // begin with the placement of the plan's last event, not with homes
};

bool holds(const StepPlan& plan, EventId event, const ScheduledCopy& where) {
  return std::ranges::find(plan.slot_expert.row(event, where.layer, where.rank), where.expert) !=
         plan.slot_expert.row(event, where.layer, where.rank).end();
}

// The turn after which a slot no longer holds what it holds at the first event.
TurnId end_of_first_lease(const StepPlan& plan, const TurnOrder& order, const ScheduledCopy& copy) {
  int event = 0;
  while (event + 1 < plan.num_events() &&
         plan.slot_expert(event + 1, copy.layer, copy.rank, copy.slot) == copy.expert) {
    ++event;
  }
  return order.last(event, copy.layer);
}

// The copies of the first event are those of what the last event does not hold: homes among them.
void begin_with_last_placement(const StepPlan& plan, TransferSchedule& schedule) {
  const EventId last{plan.num_events() - 1};
  const auto first_turn = [&](LayerId layer) { return schedule.order.first(0, layer); };
  std::erase_if(schedule.copies, [&](const ScheduledCopy& copy) {
    return copy.arrives == first_turn(copy.layer) && holds(plan, last, copy);
  });
  for (int l = 0; l < plan.num_layers(); ++l) {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      for (int s = 0; s < plan.num_slots(); ++s) {
        const ExpertId expert = plan.slot_expert(0, l, r, s);
        if (expert == kNoExpert || plan.home(l, expert) != RankId{r}) continue;  // those away from home are there
        ScheduledCopy copy{.rank = RankId{r},
                           .layer = LayerId{l},
                           .expert = expert,
                           .slot = SlotId{s},
                           .buffer = l * plan.num_slots() + s,
                           .opens = TurnId{0},
                           .arrives = first_turn(LayerId{l}),
                           .path = Path::kHost,
                           .source = RankId{r}};
        if (holds(plan, last, copy)) continue;
        copy.closes = end_of_first_lease(plan, schedule.order, copy);
        schedule.copies.push_back(copy);
      }
    }
  }
  std::ranges::sort(schedule.copies, {},
                    [](const ScheduledCopy& copy) { return std::tuple(copy.arrives, copy.rank, copy.slot); });
}

void drop_return_to_homes(TransferSchedule& schedule) {
  std::erase_if(schedule.copies,
                [&](const ScheduledCopy& copy) { return copy.arrives.value >= schedule.order.size(); });
}

// Throws InputError for a plan of more than one micro-step in flight.
TransferSchedule free_update_schedule(const StepPlan& plan, const ExpertLayout& layout,
                                      const FreeUpdateOptions& options) {
  if (plan.in_flight != 1) {
    throw InputError({.field = "in_flight"},
                     fmt::format("a plan of residency free has one micro-step in flight, not {}", plan.in_flight));
  }
  ScheduleOptions forward = options.schedule;
  forward.phase = Phase::kRecompute;
  TransferSchedule schedule = make_transfer_schedule(plan, layout, forward);
  drop_return_to_homes(schedule);
  const TurnOrder recompute = std::move(schedule.order);
  schedule.phase = Phase::kPolicyUpdate;
  schedule.order = turns_of(plan, Phase::kPolicyUpdate);

  const auto backward_of = [&](TurnId t) {
    return schedule.order.backward(recompute[t].micro_step, recompute[t].layer);
  };
  for (ScheduledCopy& copy : schedule.copies) {
    // opens is the turn after the last reader of what was there before
    if (copy.opens > TurnId{0}) copy.opens = TurnId{backward_of(TurnId{copy.opens.value - 1}).value + 1};
    copy.arrives = schedule.order.forward(recompute[copy.arrives].micro_step, recompute[copy.arrives].layer);
    copy.closes = backward_of(copy.closes);
  }
  if (options.after_recompute) begin_with_last_placement(plan, schedule);
  index_copies(schedule);
  schedule.arena = experts_of_arenas(plan, schedule.copies);
  return schedule;
}

// Takes from a recompute's schedule the copies that bring homes back at its end.
void leave_placement(TransferSchedule& schedule, const StepPlan& plan) {
  drop_return_to_homes(schedule);
  index_copies(schedule);
  schedule.arena = experts_of_arenas(plan, schedule.copies);
}

// ---- a plan of residency `free` from peers ----

// In the policy update, too, a replica stays until its micro-step's backward is done: the last turn of its event.
TransferSchedule free_schedule_from_peers(const SimulationInput& input, const SimulationOptions& options) {
  const bool update = options.phase == Phase::kPolicyUpdate;
  TransferSchedule schedule{.phase = options.phase, .depth = options.depth};
  schedule.order = turns_of(input.plan, options.phase);
  StagedCopies staged = staged_copies(input.plan, schedule.order,
                                      {.depth = options.depth,
                                       .begin_with_last_placement = update && options.placement_stays,
                                       .bring_homes_back = !update && !options.placement_stays});
  schedule.copies = std::move(staged.copies);
  schedule.buffers_per_rank = input.plan.num_layers() * input.plan.num_slots() + staged.buffers;
  index_copies(schedule);
  schedule.arena = experts_of_arenas(input.plan, schedule.copies);
  return schedule;
}

// ---- copies and gradients of any plan ----

ExpertLayout layout_of(const CostModel& cost) {
  return ExpertLayout({{.name = "expert", .elements = cost.expert_weights().value / 2, .type = DataType::kBfloat16}});
}

// Who learns at a turn's router what to copy has no use for the buffers of turns ahead.
int depth_of(const StepPlan& plan, const SimulationOptions& options) {
  return options.online.copies_after_router && plan.residency == Residency::kShared ? 1 : options.depth;
}

// A forward that is computed anew fetches its guests anew.
bool guests_stay(const SimulationInput& input, const SimulationOptions& options) {
  return options.online.keeps_guests && options.phase == Phase::kPolicyUpdate &&
         input.plan.residency == Residency::kShared && !input.cost.options().recompute_activations;
}

TransferSchedule schedule_of(const SimulationInput& input, const SimulationOptions& options) {
  const StepPlan& plan = input.plan;
  const ExpertLayout layout = layout_of(input.cost);
  const bool from_peers = options.path == PathChoice::kAuto && options.online.copies_after_router;
  const ScheduleOptions schedule_options{.phase = options.phase,
                                         .path = from_peers ? PathChoice::kPeer : options.path,
                                         .depth = depth_of(plan, options),
                                         .cluster = &input.cost.cluster(),
                                         .shares_uplink = input.cost.options().shares_uplink};
  const bool free = plan.residency == Residency::kFree;
  if (free && schedule_options.path == PathChoice::kPeer) return free_schedule_from_peers(input, options);
  if (free && options.phase == Phase::kPolicyUpdate) {
    return free_update_schedule(plan, layout,
                                {.schedule = schedule_options, .after_recompute = options.placement_stays});
  }
  TransferSchedule schedule = make_transfer_schedule(plan, layout, schedule_options);
  if (free && options.placement_stays) leave_placement(schedule, plan);
  return schedule;
}

Transfer transfer_of(const ScheduledCopy& copy, const TransferSchedule& schedule, const OnlineWork& online) {
  Transfer transfer{.way = {.path = copy.path, .from = copy.source, .to = copy.rank},
                    .expert = copy.expert,
                    .begins = std::max(copy.opens, TurnId{copy.arrives.value - schedule.depth}),
                    .deadline = std::min(copy.arrives, TurnId{schedule.order.size()})};
  const bool is_turn = copy.arrives.value < schedule.order.size();
  if (online.copies_after_router && is_turn && schedule.order[copy.arrives].pass == Pass::kForward) {
    transfer.begins = copy.arrives;
    transfer.moment = online.own_experts_first ? Moment::kDispatched : Moment::kRouter;
  }
  if (transfer.begins.value >= schedule.order.size()) {  // into a buffer that the last turn still reads
    transfer.begins = TurnId{schedule.order.size() - 1};
    transfer.moment = Moment::kExpertsDone;
  }
  return transfer;
}

// What guests leave, lease by lease in the order in which leases begin.
class Returns {
 public:
  Returns(const StepPlan& plan, const TransferSchedule& schedule, const OnlineWork& online)
      : plan_(plan), schedule_(schedule), online_(online), turns_(schedule.order) {
    const int places = plan.residency == Residency::kShared ? plan.guest_slots : schedule.buffers_per_rank;
    last_.assign(static_cast<std::size_t>(plan.num_ranks()) * static_cast<std::size_t>(places), kNone);
    places_ = static_cast<std::size_t>(places);
  }

  void add(const ScheduledCopy& copy, std::vector<Transfer>& transfers) {
    if (plan_.home(copy.layer, copy.expert) == copy.rank) return;
    const std::optional<TurnId> begins = first_backward(copy);
    if (!begins || !serves(copy)) return;
    std::size_t& last = last_[copy.rank.index() * places_ + place(copy)];
    if (last != kNone) transfers[last].deadline = *begins;
    last = transfers.size();
    const RankId to = online_.gradients_go_to_sources ? copy.source : plan_.home(copy.layer, copy.expert);
    transfers.push_back({.way = {.path = Path::kPeer, .from = copy.rank, .to = to},
                         .expert = copy.expert,
                         .begins = copy.closes,
                         .moment = Moment::kExpertsDone,
                         .gradient = true,
                         .deadline = TurnId{schedule_.order.size()}});
  }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  std::size_t place(const ScheduledCopy& copy) const {
    const int guest = copy.slot.value - (plan_.num_slots() - plan_.guest_slots);
    return static_cast<std::size_t>(plan_.residency == Residency::kShared ? guest : copy.buffer);
  }

  std::optional<TurnId> first_backward(const ScheduledCopy& copy) const {
    std::optional<TurnId> turn = copy.arrives;
    while (turn && *turn <= copy.closes && schedule_.order[*turn].pass != Pass::kBackward) {
      turn = turns_.next(copy.layer, *turn);
    }
    return turn && *turn <= copy.closes ? turn : std::nullopt;
  }

  // Has the guest tokens in any backward pass of its lease?
  bool serves(const ScheduledCopy& copy) const {
    const bool shared_events = plan_.in_flight == 1;
    const EventId last = schedule_.order[copy.closes].event;
    for (EventId t = schedule_.order[copy.arrives].event; t <= last; t = EventId{t.value + 1}) {
      if (!shared_events && plan_.event_pass[t.index()] != Pass::kBackward) continue;
      if (plan_.slot_tokens(t, copy.layer, copy.rank, copy.slot) > Tokens{0}) return true;
    }
    return false;
  }

  const StepPlan& plan_;
  const TransferSchedule& schedule_;
  const OnlineWork& online_;
  LayerTurns turns_;
  std::vector<std::size_t> last_;  // [rank][place], into transfers; kNone: nobody was there
  std::size_t places_ = 0;
};

// Of a plan of residency `free` whose placement recompute has left: what is away from home at the first event and needs
// no copy.
std::vector<ScheduledCopy> leases_from_before(const StepPlan& plan, const TransferSchedule& schedule) {
  std::vector<ScheduledCopy> leases;
  if (plan.residency != Residency::kFree) return leases;
  for (int l = 0; l < plan.num_layers(); ++l) {
    const TurnId first = schedule.order.first(0, l);
    for (int r = 0; r < plan.num_ranks(); ++r) {
      for (int s = 0; s < plan.num_slots(); ++s) {
        const ExpertId expert = plan.slot_expert(0, l, r, s);
        if (expert == kNoExpert || plan.home(l, expert) == RankId{r}) continue;
        const int buffer = l * plan.num_slots() + s;
        const auto brings = [&](const ScheduledCopy& copy) { return copy.rank == RankId{r} && copy.buffer == buffer; };
        if (std::ranges::any_of(schedule.arriving(first), brings)) continue;
        ScheduledCopy lease{.rank = RankId{r},
                            .layer = LayerId{l},
                            .expert = expert,
                            .slot = SlotId{s},
                            .buffer = buffer,
                            .arrives = first,
                            .source = plan.home(l, expert)};
        lease.closes = end_of_first_lease(plan, schedule.order, lease);
        leases.push_back(lease);
      }
    }
  }
  return leases;
}

// Indices by bucket, in their order: counting sort.
template <class BucketOf>
std::vector<std::size_t> sorted_by(std::size_t count, std::size_t buckets, const BucketOf& bucket_of,
                                   std::vector<std::size_t>& first) {
  first.assign(buckets + 1, 0);
  for (std::size_t i = 0; i < count; ++i) ++first[bucket_of(i) + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<std::size_t> cursor = first;
  std::vector<std::size_t> sorted(count);
  for (std::size_t i = 0; i < count; ++i) sorted[cursor[bucket_of(i)]++] = i;
  return sorted;
}

void sort(PhaseTransfers& phase) {
  const auto turns = static_cast<std::size_t>(phase.order.size());
  const auto begins = [&](std::size_t i) {
    return phase.transfers[i].begins.index() * kNumMoments + static_cast<std::size_t>(phase.transfers[i].moment);
  };
  std::vector<Transfer> sorted;
  sorted.reserve(phase.transfers.size());
  for (const std::size_t i : sorted_by(phase.transfers.size(), turns * kNumMoments, begins, phase.first_beginning)) {
    sorted.push_back(phase.transfers[i]);
  }
  phase.transfers = std::move(sorted);
  const auto deadline = [&](std::size_t i) { return phase.transfers[i].deadline.index(); };
  phase.by_deadline = sorted_by(phase.transfers.size(), turns + 1, deadline, phase.first_due);
}

}  // namespace

std::span<const Transfer> PhaseTransfers::beginning(TurnId t, Moment moment) const {
  const std::size_t at = t.index() * kNumMoments + static_cast<std::size_t>(moment);
  return std::span(transfers).subspan(first_beginning[at], first_beginning[at + 1] - first_beginning[at]);
}

std::span<const std::size_t> PhaseTransfers::due(TurnId t) const {
  return std::span(by_deadline).subspan(first_due[t.index()], first_due[t.index() + 1] - first_due[t.index()]);
}

PhaseTransfers make_phase_transfers(const SimulationInput& input, const SimulationOptions& options) {
  TransferSchedule schedule = schedule_of(input, options);
  choose_sources(options.online.sources, input.plan.num_ranks(), schedule.copies);
  PhaseTransfers phase;
  phase.depth = schedule.depth;
  phase.staging_buffers = schedule.buffers_per_rank - num_buffers(input.plan, schedule.depth);
  phase.guests_stay = guests_stay(input, options);
  phase.transfers.reserve(schedule.copies.size());
  for (const ScheduledCopy& copy : schedule.copies) {
    if (phase.guests_stay && schedule.order[copy.arrives].pass == Pass::kBackward) continue;
    if (copy.staged() && copy.source == copy.rank) continue;  // it only changes its slot
    phase.transfers.push_back(transfer_of(copy, schedule, options.online));
  }
  phase.num_copies = static_cast<std::int64_t>(phase.transfers.size());
  if (options.phase == Phase::kPolicyUpdate) {
    Returns returns(input.plan, schedule, options.online);
    for (const ScheduledCopy& lease : leases_from_before(input.plan, schedule)) returns.add(lease, phase.transfers);
    for (const ScheduledCopy& copy : schedule.copies) returns.add(copy, phase.transfers);
  }
  phase.arena = std::move(schedule.arena);
  phase.order = std::move(schedule.order);
  sort(phase);
  return phase;
}

}  // namespace foremoe
