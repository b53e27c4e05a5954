#include "foremoe/sim/phase_transfers.h"

#include <algorithm>
#include <numeric>

#include "foremoe/sim/copy_sources.h"
#include "foremoe/sim/sharded_experts.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

namespace {

ExpertLayout layout_of(const CostModel& cost) {
  return ExpertLayout({{.name = "expert", .elements = cost.expert_weights().value / 2, .type = DataType::kBfloat16}});
}

// A policy that learns only at the router which experts to copy cannot fill buffers for later turns.
int depth_of(const StepPlan& plan, const SimulationOptions& options) {
  const OnlineWork& online = options.online;
  const bool waits = online.copies_after_router && !online.prefetches_in_backward;
  return waits && plan.residency == Residency::kShared ? 1 : options.depth;
}

// Guests stay only if the backward does not recompute the forward, which would fetch them again.
bool guests_stay(const SimulationInput& input, const SimulationOptions& options) {
  return options.online.keeps_guests && options.phase == Phase::kPolicyUpdate &&
         input.plan.residency == Residency::kShared && !input.cost.options().recompute_activations;
}

TurnOrder order_of(const StepPlan& plan, Phase phase) {
  const bool only_simulated = plan.residency == Residency::kFree && phase == Phase::kPolicyUpdate;
  return only_simulated ? turns_of(plan, phase) : make_turn_order(plan, phase);
}

TransferSchedule schedule_of(const SimulationInput& input, const SimulationOptions& options) {
  const bool update = options.phase == Phase::kPolicyUpdate;
  return make_transfer_schedule(input.plan, order_of(input.plan, options.phase), layout_of(input.cost),
                                {.phase = options.phase,
                                 .path = options.path,
                                 .depth = depth_of(input.plan, options),
                                 .cluster = &input.cost.cluster(),
                                 .shares_uplink = input.cost.options().shares_uplink,
                                 .begins_with_last_placement = update && options.placement_stays,
                                 .leaves_last_placement = update || options.placement_stays});
}

// Returns the arenas, [node], of a system that does not know before the phase which experts it will fetch.
std::vector<std::vector<ArenaExpert>> all_experts(const StepPlan& plan) {
  std::vector<ArenaExpert> all;
  for (int l = 0; l < plan.num_layers(); ++l) {
    for (int e = 0; e < plan.num_experts(); ++e) all.push_back({LayerId{l}, ExpertId{e}});
  }
  std::vector<std::vector<ArenaExpert>> of_nodes(static_cast<std::size_t>(plan.topology().num_nodes()), all);
  return of_nodes;
}

Transfer transfer_of(const ScheduledCopy& copy, Bytes bytes, const TransferSchedule& schedule,
                     const OnlineWork& online) {
  Transfer transfer{.way = {.path = copy.path, .from = copy.source, .to = copy.rank},
                    .expert = copy.expert,
                    .bytes = bytes,
                    .begins = std::max(copy.opens, TurnId{copy.arrives.value - schedule.depth}),
                    .deadline = std::min(copy.arrives, TurnId{schedule.order.size()})};
  const bool is_turn = copy.arrives.value < schedule.order.size();
  if (online.copies_after_router && is_turn && schedule.order[copy.arrives].pass == Pass::kForward) {
    transfer.begins = copy.arrives;
    transfer.moment = online.own_experts_first ? Moment::kDispatched : Moment::kRouter;
  }
  if (transfer.begins.value >= schedule.order.size()) {  // its buffer is still read by the last turn
    transfer.begins = TurnId{schedule.order.size() - 1};
    transfer.moment = Moment::kExpertsDone;
  }
  return transfer;
}

// Gradient transfers of the guests, by lease, in the order in which leases begin.
class Returns {
 public:
  Returns(const SimulationInput& input, const TransferSchedule& schedule, const OnlineWork& online)
      : plan_(input.plan),
        bytes_(input.cost.expert_gradient()),
        schedule_(schedule),
        online_(online),
        turns_(schedule.order) {
    const int places = plan_.residency == Residency::kShared ? plan_.guest_slots : schedule.buffers_per_rank;
    last_.assign(static_cast<std::size_t>(plan_.num_ranks()) * static_cast<std::size_t>(places), kNone);
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
                         .bytes = bytes_,
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

  // Whether the guest serves tokens in any backward pass of its lease.
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
  Bytes bytes_;
  const TransferSchedule& schedule_;
  const OnlineWork& online_;
  LayerTurns turns_;
  std::vector<std::size_t> last_;  // [rank][place], into transfers; kNone: no guest before
  std::size_t places_ = 0;
};

// Stable counting sort of indices by bucket.
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

bool is_guest(const ScheduledCopy& lease, const StepPlan& plan) {
  return lease.slot.value >= plan.num_slots() - plan.guest_slots;
}

void add_scheduled(const SimulationInput& input, const SimulationOptions& options, PhaseTransfers& phase) {
  TransferSchedule schedule = schedule_of(input, options);
  choose_sources(options.online.sources, input.plan.topology(), schedule.copies);
  phase.depth = schedule.depth;
  phase.staging_buffers = schedule.buffers_per_rank - num_buffers(input.plan, schedule.depth);
  phase.guests_stay = guests_stay(input, options);
  for (const std::vector<ScheduledCopy>* leases : {&schedule.copies, &schedule.from_before}) {
    phase.has_guests = phase.has_guests || std::ranges::any_of(*leases, [&](const ScheduledCopy& lease) {
                         return is_guest(lease, input.plan);
                       });
  }
  phase.transfers.reserve(schedule.copies.size());
  for (const ScheduledCopy& copy : schedule.copies) {
    if (phase.guests_stay && schedule.order[copy.arrives].pass == Pass::kBackward) continue;
    if (copy.staged() && copy.source == copy.rank) continue;  // only moves to another slot
    phase.transfers.push_back(transfer_of(copy, input.cost.expert_weights(), schedule, options.online));
  }
  phase.num_copies = static_cast<std::int64_t>(phase.transfers.size());
  if (options.phase == Phase::kPolicyUpdate) {
    Returns returns(input, schedule, options.online);
    for (const ScheduledCopy& lease : schedule.from_before) returns.add(lease, phase.transfers);
    for (const ScheduledCopy& copy : schedule.copies) returns.add(copy, phase.transfers);
  }
  phase.arena = options.online.copies_after_router && options.path == PathChoice::kHost ? all_experts(input.plan)
                                                                                        : std::move(schedule.arena);
  phase.order = std::move(schedule.order);
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
  PhaseTransfers phase;
  if (options.online.shards_experts) {
    phase.depth = options.depth;
    phase.order = order_of(input.plan, options.phase);
    const Topology topology{.num_ranks = input.plan.num_ranks(), .ranks_per_node = input.plan.ranks_per_node};
    phase.arena.resize(static_cast<std::size_t>(topology.num_nodes()));
    ShardedTransfers sharded = sharded_transfers(input, phase.order, phase.depth);
    phase.transfers = std::move(sharded.transfers);
    phase.num_copies = sharded.gathered;
  } else {
    add_scheduled(input, options, phase);
  }
  sort(phase);
  return phase;
}

}  // namespace foremoe
