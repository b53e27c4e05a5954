#include "foremoe/sim/simulation.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "foremoe/sim/phase_figures.h"
#include "foremoe/sim/phase_profile.h"
#include "foremoe/sim/phase_replay.h"
#include "foremoe/sim/phase_transfers.h"

namespace foremoe {

namespace {

// Returns the number of model layers that each plan layer represents.
double layer_scale(const SimulationInput& input) {
  return static_cast<double>(input.cost.model().moe_layers) / std::max(1, input.plan.num_layers());
}

// If the step is planned ahead, ranks gather the loads of all micro-steps and layers of the model at once.
double seconds_to_gather_step(const SimulationInput& input, const SimulationOptions& options) {
  if (!options.plans_ahead || options.phase != Phase::kRecompute) return 0;
  const std::int64_t layers = std::int64_t{input.cost.model().moe_layers} * input.plan.num_micro_steps();
  return input.cost.gather_loads(input.plan.topology(), layers);
}

void scale(PhaseSeconds& parts, double by) {
  for (double* part : {&parts.dense, &parts.planning, &parts.dispatch, &parts.experts, &parts.combine,
                       &parts.exposed_copies, &parts.exposed_gradients, &parts.data_parallel}) {
    *part *= by;
  }
}

SimulatedPhase simulate_path(const SimulationInput& input, const SimulationOptions& options,
                             const PhaseProfile& profile) {
  const PhaseTransfers transfers = make_phase_transfers(input, options);
  const ClusterLinks links(input.cost.cluster(), input.plan.topology(), input.cost.options().shares_uplink);
  const ArenaLoad arena = load_arenas(transfers.arena, input.plan, input.cost.expert_weights(), links);
  const double gathering = seconds_to_gather_step(input, options);
  const double layers_per_layer = layer_scale(input);
  const ReplayProblem problem{.input = input,
                              .options = options,
                              .profile = profile,
                              .transfers = transfers,
                              .links = links,
                              .layer_scale = layers_per_layer,
                              .start_seconds = options.timeline_begins + gathering / layers_per_layer + arena.seconds};
  const Replay replay = replay_phase(problem);

  const Dispatch dispatch = input.cost.options().dispatch;
  SimulatedPhase phase{.dispatch = dispatch,
                       .dispatch_estimated = dispatch == Dispatch::kToken && input.tokens == nullptr,
                       .rows = input.rows,
                       .attention = attention_of(input.squared_lengths.size() > 0, input.cost),
                       .phase = options.phase,
                       .path = options.path,
                       .parts = replay.parts};
  scale(phase.parts, problem.layer_scale);
  phase.parts.planning += gathering;
  phase.parts.arena_refresh = arena.seconds * problem.layer_scale;
  if (options.phase == Phase::kPolicyUpdate) {
    const int experts = problem.home_experts();
    const int layers = input.cost.model().moe_layers;
    phase.parts.optimizer = input.cost.optimizer(experts * layers);
    phase.parts.data_parallel += input.cost.gather_weights(experts).seconds * layers;
  }
  phase.seconds = phase.parts.sum();
  phase.ideal_seconds = replay.ideal_seconds * problem.layer_scale + phase.parts.optimizer + phase.parts.data_parallel;
  phase.ideal_exchange_seconds = replay.ideal_exchange_seconds * problem.layer_scale;
  phase.mean_expert_seconds = replay.mean_expert_seconds * problem.layer_scale;
  const double ranks = input.plan.num_ranks();
  if (phase.seconds > 0) {
    phase.utilisation =
        (replay.computing_seconds * problem.layer_scale + ranks * phase.parts.optimizer) / (ranks * phase.seconds);
  }
  for (const LayerProfile& layer : profile.layers) phase.peak_tokens = std::max(phase.peak_tokens, layer.most_tokens);
  phase.activations = activations(problem);
  phase.memory = rank_memory(problem, phase.activations);
  const TrafficProblem traffic{.phase = problem, .replay = replay, .arena = arena, .seconds = phase.seconds};
  phase.network_rows = network_rows(profile, links.topology());
  phase.traffic = link_traffic(traffic);
  phase.between_nodes = bytes_between_nodes(traffic);
  phase.copies = transfers.num_copies;
  phase.arena = scaled(arena.largest, problem.layer_scale);
  return phase;
}

SimulatedPhase simulate(const SimulationInput& input, SimulationOptions options, const PhaseProfile& profile) {
  OnlineWork& online = options.online;
  online.planning_seconds += online.planning_seconds_per_slot * input.plan.num_ranks() * input.plan.num_slots();
  if (online.gathers_loads) online.planning_seconds += input.cost.gather_loads(input.plan.topology());
  if (online.shards_experts) options.path = PathChoice::kPeer;
  if (options.path != PathChoice::kAuto) return simulate_path(input, options, profile);
  SimulationOptions trial = options;
  trial.timeline = nullptr;
  trial.path = PathChoice::kPeer;
  SimulatedPhase best = simulate_path(input, trial, profile);
  if (best.parts.exposed_copies + best.parts.exposed_gradients > 0) {  // otherwise others gain at most in data_parallel
    for (const PathChoice path : {PathChoice::kAuto, PathChoice::kHost}) {
      const bool has_balance = input.plan.residency != Residency::kFree && !online.copies_after_router;
      if (path == PathChoice::kAuto && !has_balance) continue;
      trial.path = path;
      SimulatedPhase phase = simulate_path(input, trial, profile);
      if (phase.seconds < best.seconds) best = std::move(phase);
    }
  }
  if (options.timeline == nullptr) return best;
  options.path = best.path;
  return simulate_path(input, options, profile);
}

// The caller's pool, or a pool with only the calling thread.
class Pool {
 public:
  explicit Pool(const SimulationOptions& options) : lent_(options.pool) {
    if (lent_ == nullptr) own_.emplace(1);
  }
  ThreadPool& operator*() { return lent_ != nullptr ? *lent_ : *own_; }

 private:
  ThreadPool* lent_;
  std::optional<ThreadPool> own_;
};

// A home moves with the expert's weights and one rank's shard of the optimizer state.
double seconds_of_home_moves(const SimulationInput& input, std::int64_t moves) {
  if (moves == 0) return 0;
  const CostModel& cost = input.cost;
  const CostOptions& options = cost.options();
  const double bytes_per_expert = static_cast<double>(cost.expert_weights().value) +
                                  static_cast<double>(cost.model().expert_parameters()) *
                                      options.optimizer_bytes_per_parameter / cost.optimizer_shards();
  const bool one_node = input.plan.num_ranks() <= input.plan.ranks_per_node;
  const LinkSpeed& link = one_node ? cost.cluster().peers : cost.cluster().network;
  const double per_rank = std::ceil(static_cast<double>(moves) * layer_scale(input) / input.plan.num_ranks());
  return per_rank * (link.latency_seconds + bytes_per_expert / link.bytes_per_second);
}

}  // namespace

Attention attention_of(bool knows_lengths, const CostModel& cost) {
  return knows_lengths && !cost.options().sequence_tokens ? Attention::kSequences : Attention::kMean;
}

std::string_view to_string(Attention attention) { return attention == Attention::kSequences ? "sequences" : "mean"; }

double PhaseSeconds::sum() const {
  double sum = 0;
  for (const PhasePart& part : phase_parts()) sum += this->*part.seconds;
  return sum;
}

std::span<const PhasePart> phase_parts() {
  static constexpr PhasePart kParts[] = {{"arena_refresh", &PhaseSeconds::arena_refresh},
                                         {"dense", &PhaseSeconds::dense},
                                         {"planning", &PhaseSeconds::planning},
                                         {"dispatch", &PhaseSeconds::dispatch},
                                         {"experts", &PhaseSeconds::experts},
                                         {"combine", &PhaseSeconds::combine},
                                         {"exposed_copies", &PhaseSeconds::exposed_copies},
                                         {"exposed_gradients", &PhaseSeconds::exposed_gradients},
                                         {"optimizer", &PhaseSeconds::optimizer},
                                         {"data_parallel", &PhaseSeconds::data_parallel}};
  return kParts;
}

SimulationInput with_plan(const SimulationInput& input, const StepPlan& plan) {
  return {.load = input.load,
          .plan = plan,
          .cost = input.cost,
          .tokens = input.tokens,
          .fitted = input.fitted,
          .rows = input.rows,
          .squared_lengths = input.squared_lengths,
          .repeat_load = input.repeat_load};
}

SimulatedPhase simulate_phase(const SimulationInput& input, const SimulationOptions& options) {
  Pool pool(options);
  return simulate(input, options, profile_phase(input, options.phase, options.online, *pool));
}

SimulatedStep simulate_step(const SimulationInput& input, const StepPlan* recompute_plan, const StepOptions& options,
                            const StepProfile* profile) {
  SimulationOptions phase = options.phase;
  Pool pool(phase);
  std::optional<StepProfile> made;
  if (profile == nullptr) profile = &made.emplace(profile_step(input, recompute_plan, phase.online, *pool));
  const SimulationInput recompute = recompute_plan != nullptr ? with_plan(input, *recompute_plan) : input;
  SimulatedStep result;
  result.home_move_seconds = seconds_of_home_moves(recompute, options.home_moves);

  phase.timeline_begins += result.home_move_seconds;
  phase.phase = Phase::kRecompute;
  phase.placement_stays = recompute_plan == nullptr;
  result.recompute = simulate(recompute, phase, *profile->recompute);

  phase.timeline_begins += result.recompute.seconds / layer_scale(recompute);  // in seconds of the plan's layers
  phase.phase = Phase::kPolicyUpdate;
  result.policy_update = simulate(input, phase, *profile->policy_update);

  result.step_seconds = result.home_move_seconds + result.recompute.seconds + result.policy_update.seconds;
  result.ideal_step_seconds = result.recompute.ideal_seconds + result.policy_update.ideal_seconds;
  for (const SimulatedPhase* part : {&result.recompute, &result.policy_update}) {
    result.exposed_copy_seconds += part->parts.exposed_copies + part->parts.exposed_gradients;
    result.peak_tokens_per_rank = std::max(result.peak_tokens_per_rank, part->peak_tokens);
    result.memory_bytes_per_rank = std::max(result.memory_bytes_per_rank, part->memory.sum());
  }
  charge_placement(options.placement_seconds, options.rollout_tail_seconds, result);
  result.rl_step_seconds = result.step_seconds + options.rollout_seconds;
  return result;
}

void charge_placement(double placement_seconds, double rollout_tail_seconds, SimulatedStep& step) {
  step.exposed_placement_seconds = std::max(0.0, placement_seconds - rollout_tail_seconds);
  step.placed_step_seconds = step.step_seconds + step.exposed_placement_seconds;
}

}  // namespace foremoe
