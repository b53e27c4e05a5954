#pragma once

// Models the time of a phase of a step on a cluster by an event-driven replay of its plan.
//
// Model. Every exchange of rows synchronises the ranks. A phase is therefore a sequence of turns (one per pass,
//   micro-step and layer, transfer/turn_order.h), and a turn is a sequence of parts
//     forward    dense, [planning], dispatch, experts, combine
//     backward   combine's exchange, experts, dispatch's exchange, dense
//   each as long as its slowest rank. Copies run concurrently, earliest deadline first, over the link capacity that the
//   exchanges leave (a rank's links to peers, network and host, the switch's uplink, the host's memory). A copy begins
//   when its slot is free (the schedule's `opens`), or after its layer's router if the policy works online. The time
//   that experts wait for copies is exposed. If a policy computes each rank's own experts first, copies begin after
//   dispatch and only guests wait. If it also plans after dispatch, rows are exchanged with homes, which forward the
//   guests' rows. Results of guests return to the homes between experts and combine, either fully exposed or in no time
//   (OnlineWork::results_return). A guest's gradient is sent home over the same links when the guest leaves its slot;
//   gradients still in transit at the end of the phase are exposed. Arenas are filled before a phase; the optimizer
//   runs at the end. If the plan has fewer layers than the model, each plan layer counts moe_layers ÷ layers times, in
//   seconds and bytes. The parts of the model outside its MoE layers run once per micro-step, with the first layer.
// Data parallelism. If the job has several expert-parallel groups, each layer's expert gradients are reduced over them
//   after the layer's last backward (CostModel::reduce_gradients), over the network, or over peers if all groups share
//   a node. The reduction overlaps with the backward of earlier layers. It gets the link time that exchanges, copies
//   and guests' gradients leave; the rest is exposed. After the optimizer, updated weights are gathered if the
//   optimizer is sharded (CostModel::gather_weights). That is exposed in full, since the rollout needs all weights
//   before the next forward. If a plan layer represents several layers, only the last of them must wait for its turn to
//   end; this understates the exposed time by at most one layer's backward of one micro-step.
// Method. Time advances from part to part. Within a part each link drains its queue at a constant rate, so the work is
//   O(turns · ranks + copies), independent of the bandwidths.
// Guarantees. Equal inputs produce equal bytes; the wall clock is never read. Every row sent is received, every byte
//   queued is delivered, and nothing is used before it has arrived.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/cluster/online_work.h"
#include "foremoe/core/array.h"
#include "foremoe/core/parallel.h"
#include "foremoe/core/timeline.h"
#include "foremoe/plan/route_tokens.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

struct SimulationOptions {
  Phase phase = Phase::kRecompute;
  // auto: the fastest of peers only, host path only and (except under `free`) the engine's balance of both. For online
  // systems (OnlineWork::copies_after_router): the faster of peers and host path, with all experts in the arena.
  PathChoice path = PathChoice::kAuto;
  int depth = kDefaultDepth;  // how many turns ahead copies may begin
  OnlineWork online = {};     // of the policy
  // For residency `free`: the policy update begins with the last placement of recompute.
  bool placement_stays = false;
  bool plans_ahead = false;      // plans from the loads of the whole step, which ranks gather before recompute
  ThreadPool* pool = nullptr;    // counts rows and expert times; null: calling thread only. Does not change the result
  Timeline* timeline = nullptr;  // receives spans per rank in modelled nanoseconds, for the plan's layers
  double timeline_begins = 0;    // seconds
};

// Lengths that determine the scores of attention: each sequence's own, or CostModel::sequence_tokens() for all.
enum class Attention : std::uint8_t { kSequences, kMean };

std::string_view to_string(Attention attention);

// The lengths that determine the scores, if the input knows its sequences or not.
Attention attention_of(bool knows_lengths, const CostModel& cost);

class FittedChoices;  // plan/token_choice.h

struct SimulationInput {
  const LoadTable& load;
  const StepPlan& plan;  // accepted by check_plan for this load
  const CostModel& cost;
  // The tokens behind the load. If null, dispatch by token uses expected counts (plan/expected_dispatch.h).
  const BatchedTrace* tokens = nullptr;
  FittedChoices* fitted = nullptr;  // keeps what expected counts need, for further plans of this load; null: nothing
  Rows rows = Rows::kOrder;         // kToken needs known tokens and dispatch by token
  // [micro_step][rank]: Σ length² over the sequences of the batch, tokens², for at least the load's micro-steps. Empty:
  // unknown. CostOptions::sequence_tokens overrides it.
  ArrayView<const double, 2> squared_lengths = {};
  bool repeat_load = false;  // the plan has more micro-steps than the load, which repeats
};

// Seconds of the critical path by activity; their sum is the phase's time.
struct PhaseSeconds {
  double arena_refresh = 0;
  double dense = 0;
  // Online planning and gathering of loads. Exposed planning that is concurrent with own experts counts as
  // exposed_copies. If the whole step is planned ahead, gathering its loads counts here, in recompute.
  double planning = 0;
  double dispatch = 0;
  double experts = 0;
  double combine = 0;
  double exposed_copies = 0;
  double exposed_gradients = 0;
  double optimizer = 0;
  double data_parallel = 0;  // exposed reduction of gradients over expert-parallel groups, gathering of weights

  double sum() const;
};

struct PhasePart {
  std::string_view name;  // "exposed_copies"
  double PhaseSeconds::*seconds;
};

// All parts, in the order in which they occur.
std::span<const PhasePart> phase_parts();

// Bytes of the rank with the most memory.
struct RankMemory {
  Bytes state;  // weights, gradients and optimizer state of its own experts and layers
  Bytes guest_weights;
  Bytes guest_gradients;
  Bytes activations;  // kept and working memory at the peak of the rank with the most
  Bytes sum() const { return state + guest_weights + guest_gradients + activations; }
};

// Activations of one rank at one event.
struct Activations {
  Bytes kept;     // from forward to backward, of all micro-steps in flight
  Bytes working;  // of the running layer; of the layer in which the rank computes the most rows
  Bytes sum() const { return kept + working; }
};

// Bytes over each kind of link in the phase, summed over ranks, and for the busiest link.
struct LinkTraffic {
  std::string link;  // "peers", "network", "host", "switch", "host memory"
  Bytes rows;
  Bytes copies;
  Bytes gradients;         // and updated weights that groups gather
  Bytes busiest;           // of the link that carried the most, in one direction
  double busiest_use = 0;  // share of that link's time, 0 to 1
};

// Rows between nodes in one dispatch of every layer in every micro-step of the plan. With dispatch by token, a row is a
// token on its way to another node that serves it: a pair of token and node.
struct NetworkRows {
  std::int64_t pairs = 0;
  double mean = 0;  // that a rank sends in a dispatch
  double max = 0;   // that the busiest rank sends or receives in a dispatch, mean over dispatches
};

struct SimulatedPhase {
  Dispatch dispatch = Dispatch::kToken;
  bool dispatch_estimated = false;  // true if the tokens behind the load are unknown
  Rows rows = Rows::kOrder;
  Attention attention = Attention::kMean;
  Phase phase = Phase::kRecompute;
  PathChoice path = PathChoice::kAuto;  // of its schedule; with this choice the engine runs the same schedule
  double seconds = 0;
  PhaseSeconds parts;
  double ideal_seconds = 0;           // if every rank had the mean load in every turn and nothing were copied
  double ideal_exchange_seconds = 0;  // dispatch and combine of ideal_seconds
  double mean_expert_seconds = 0;     // the mean rank's share of parts.experts; the rest is imbalance
  double utilisation = 0;             // Σ over ranks of computing time ÷ (ranks · seconds)
  Tokens peak_tokens;                 // the most assignments that any rank computes in any turn
  RankMemory memory;
  Array<Activations, 2> activations;  // [event][rank]
  NetworkRows network_rows;
  std::vector<LinkTraffic> traffic;
  Array<Bytes, 2> between_nodes;  // [from][to], rows and copies
  std::int64_t copies = 0;        // of the plan's layers
  Bytes arena;                    // host memory of the largest node arena
};

// Throws InputError if plan, load and model do not fit each other. Also simulates the policy update of a plan of
// residency `free`, to estimate its cost in training. Gradients are then sent home from the slots of each expert.
SimulatedPhase simulate_phase(const SimulationInput& input, const SimulationOptions& options);

struct StepOptions {
  SimulationOptions phase = {};  // `phase` is ignored
  std::int64_t home_moves = 0;   // experts whose owner changed before the step; their state is moved first
  double rollout_seconds = 0;    // of the RL step, the same for every policy
  // Planning time before the first micro-step. Planning needs the routes of all micro-steps, so only the rollout's tail
  // can hide it: earlier sequences are counted while the last are generated.
  double placement_seconds = 0;
  double rollout_tail_seconds = 0;
};

struct SimulatedStep {
  SimulatedPhase recompute;
  SimulatedPhase policy_update;
  double home_move_seconds = 0;
  double step_seconds = 0;               // recompute, policy update, moves of homes
  double exposed_placement_seconds = 0;  // placement not hidden by the rollout's tail
  double placed_step_seconds = 0;        // step_seconds + exposed_placement_seconds
  double ideal_step_seconds = 0;
  double exposed_copy_seconds = 0;  // both phases, gradients included
  Tokens peak_tokens_per_rank;
  Bytes memory_bytes_per_rank;
  double rl_step_seconds = 0;  // with the rollout
};

struct StepProfile;  // phase_profile.h

// Simulates recompute, then the policy update, on the same load. `input` has the plan of the policy update.
// recompute_plan: null means the same plan. profile: of these plans, also if other cost models made it whose experts
// and exchanges take as long; null: made here, which takes most of the time.
SimulatedStep simulate_step(const SimulationInput& input, const StepPlan* recompute_plan, const StepOptions& options,
                            const StepProfile* profile = nullptr);

// The same input with another plan.
SimulationInput with_plan(const SimulationInput& input, const StepPlan& plan);

// Adds the placement time that the rollout's tail does not hide. simulate_step() calls this.
void charge_placement(double placement_seconds, double rollout_tail_seconds, SimulatedStep& step);

}  // namespace foremoe
