#pragma once

// What a phase of a step would take on a modelled cluster: an event-driven replay of its plan.
//
// Model. Ranks meet at every exchange of rows, so a phase is a chain of turns (one for each pass, micro-step and layer,
//   transfer/turn_order.h), and a turn a chain of parts
//     forward    dense, [planning], dispatch, experts, combine
//     backward   combine's exchange, experts, dispatch's exchange, dense
//   each as long as its slowest rank. Beside them copies flow, by deadline, over links that have what the exchanges
//   leave (a rank's links to peers, network and host, the switch's uplink, the host's memory); a copy begins when its
//   slot is free (the schedule's `opens`), or after its layer's router where the policy works online. Experts wait for
//   what is not there: that wait is exposed. Where a policy has a rank compute its own experts first, copies begin
//   after dispatch, and guests alone wait. Where it plans after dispatch too, rows are exchanged with homes, which pass
//   on those of guests. Their results return to the homes in an exchange between experts and combine, all of it
//   exposed, or in no time (OnlineWork::results_return). A guest's gradient goes home when it leaves its slot, over the
//   same links; what is still on its way at the phase's end is exposed. Before a phase the arenas are filled, at the
//   end the optimizer runs. A plan of fewer layers than the model stands for all of
//   them: each of its layers for moe_layers ÷ layers, in seconds and in bytes. What a micro-step runs besides its MoE
//   layers comes with the first.
// Method. Time advances from part to part; within a part each link drains its queue at a constant rate, so that
//   the work is O(turns · ranks + copies), whatever the bandwidths.
// Guarantees. Deterministic: equal inputs, equal bytes. No wall clock. Every row that is sent is received, every byte
//   queued is delivered; nothing is used before it has arrived.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/core/array.h"
#include "foremoe/core/parallel.h"
#include "foremoe/core/timeline.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/policy/online_work.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

struct SimulationOptions {
  Phase phase = Phase::kRecompute;
  // auto: of peers alone, the engine's balance of both paths (none under `free`) and the host path alone the quickest.
  // Online systems (OnlineWork::copies_after_router): the quicker of peers and host path, with all experts in the
  // arena.
  PathChoice path = PathChoice::kAuto;
  int depth = kDefaultDepth;  // turns ahead of which copies may begin
  OnlineWork online;          // of the policy
  // Of a plan of residency `free`: recompute leaves its last placement as it is, and the policy update begins with it.
  bool placement_stays = false;
  bool plans_ahead = false;      // by the loads of the whole step: ranks gather them before recompute
  ThreadPool* pool = nullptr;    // counts rows and expert times; null: the caller alone. The result is the same
  Timeline* timeline = nullptr;  // spans in modelled nanoseconds, rank by rank, of the plan's layers
  double timeline_begins = 0;    // seconds
};

struct SimulationInput {
  const LoadTable& load;
  const StepPlan& plan;  // that check_plan accepts for this load
  const CostModel& cost;
  // The tokens behind the load. Null: unknown; dispatch by token is then an expectation (plan/expected_dispatch.h).
  const BatchedTrace* tokens = nullptr;
  bool repeat_load = false;  // the plan has more micro-steps than the load, which repeats
};

// Seconds of the critical path, by what the ranks were doing; they sum to the phase's.
struct PhaseSeconds {
  double arena_refresh = 0;
  double dense = 0;
  // Online, with gathering the loads; what is planned while own experts compute is part of exposed_copies, where it
  // shows. Where the whole step is planned ahead: gathering its loads, in recompute.
  double planning = 0;
  double dispatch = 0;
  double experts = 0;
  double combine = 0;
  double exposed_copies = 0;
  double exposed_gradients = 0;
  double optimizer = 0;

  double sum() const;
};

struct PhasePart {
  std::string_view name;  // "exposed_copies"
  double PhaseSeconds::*seconds;
};

// All of them, in the order in which they occur.
std::span<const PhasePart> phase_parts();

// Of the rank that holds most, bytes.
struct RankMemory {
  Bytes state;  // weights, gradients, optimizer of what it owns
  Bytes guest_weights;
  Bytes guest_gradients;
  Bytes activations;  // kept and working, at the peak
  Bytes sum() const { return state + guest_weights + guest_gradients + activations; }
};

// Bytes that crossed each kind of link in the phase, all ranks together, and of its busiest one.
struct LinkTraffic {
  std::string link;  // "peers", "network", "host", "switch", "host memory"
  Bytes rows;
  Bytes copies;
  Bytes gradients;
  Bytes busiest;           // of the one link that carried most, one direction
  double busiest_use = 0;  // of that link's time, 0 to 1
};

struct SimulatedPhase {
  Dispatch dispatch = Dispatch::kToken;
  bool dispatch_estimated = false;  // where the tokens behind the load are not known
  Phase phase = Phase::kRecompute;
  PathChoice path = PathChoice::kAuto;  // of its schedule: what the engine must be given to run the same one
  double seconds = 0;
  PhaseSeconds parts;
  double ideal_seconds = 0;  // the same phase with every rank at the mean load of every turn, and nothing copied
  double ideal_exchange_seconds = 0;  // of those, dispatch and combine
  double mean_expert_seconds = 0;     // of parts.experts, what the mean rank computes: the rest is imbalance
  double utilisation = 0;             // Σ over ranks of time computing ÷ (ranks · seconds)
  Tokens peak_tokens;                 // the most assignments that any rank computes in any turn
  RankMemory memory;
  std::vector<LinkTraffic> traffic;
  Array<Bytes, 2> between_nodes;  // [from][to], rows and copies
  std::int64_t copies = 0;        // of the plan's layers
  Bytes arena;                    // host memory of the node whose arena holds most
};

// Throws InputError when plan, load and model do not fit each other. Of a plan of residency `free` the policy update is
// simulated too, with gradients going home from wherever an expert was: what such a policy would cost in training.
SimulatedPhase simulate_phase(const SimulationInput& input, const SimulationOptions& options);

struct StepOptions {
  SimulationOptions phase;      // its `phase` is not read
  std::int64_t home_moves = 0;  // experts whose owner changed before the step: their state travels first
  double rollout_seconds = 0;   // of the RL step, the same for every policy
  // Of planning, what must be done before the first micro-step begins: it needs the routes of all of them, so that only
  // the rollout's tail, in which the last sequences are generated and those before are counted, can hide it.
  double placement_seconds = 0;
  double rollout_tail_seconds = 0;
};

struct SimulatedStep {
  SimulatedPhase recompute;
  SimulatedPhase policy_update;
  double home_move_seconds = 0;
  double step_seconds = 0;               // recompute, policy update, moves of homes
  double exposed_placement_seconds = 0;  // that the rollout's tail does not hide
  double placed_step_seconds = 0;        // the step with them
  double ideal_step_seconds = 0;
  double exposed_copy_seconds = 0;  // of both phases, gradients included
  Tokens peak_tokens_per_rank;
  Bytes memory_bytes_per_rank;
  double rl_step_seconds = 0;  // with the rollout
};

// A whole step: recompute, then policy update, on the same load. The input has the plan of the policy update.
// recompute_plan: null: the same plan.
SimulatedStep simulate_step(const SimulationInput& input, const StepPlan* recompute_plan, const StepOptions& options);

// What placement adds to a step: what the rollout's tail does not hide. simulate_step() does it.
void charge_placement(double placement_seconds, double rollout_tail_seconds, SimulatedStep& step);

}  // namespace foremoe
