#include "foremoe/sim/reproduce/columns.h"

#include <fmt/format.h>

#include <algorithm>

namespace foremoe {

namespace {

using M = const Measured&;

double pairs_of(M of) { return std::max(1.0, static_cast<double>(of.figures.layers) * of.figures.micro_steps); }

// Of one layer's turn, milliseconds. A simulated phase has all layers of the model.
double ms_per_turn(M of, double seconds) { return 1e3 * seconds / (pairs_of(of) * of.model_layers_per_layer); }

double turns(const SimulatedPhase& phase) { return phase.seconds - phase.parts.arena_refresh - phase.parts.optimizer; }

double forward_ms(M of) { return ms_per_turn(of, turns(of.step->recompute)); }

// What copying and planning add to a step: nothing of ForeMoE-opt's.
double overhead(const SimulatedStep& step) {
  const auto of = [](const PhaseSeconds& p) {
    return p.arena_refresh + p.planning + p.exposed_copies + p.exposed_gradients;
  };
  return of(step.recompute.parts) + of(step.policy_update.parts);
}

double gib(double bytes) { return bytes / (1 << 30); }

double busiest_node_link(const SimulatedPhase& phase) {
  std::int64_t most = 0;
  for (const Bytes bytes : phase.between_nodes.flat()) most = std::max(most, bytes.value);
  return static_cast<double>(most);
}

double less_than(double first, double of) { return first == 0 ? 0 : 100 * (first - of) / first; }

std::vector<Column> columns_of_plans() {
  return {
      {"rho_mean", "ρ mean", "largest rank load ÷ mean, mean over layers and micro-steps", Origin::kExact, 4, false,
       false, [](M of, M) { return of.figures.rho.mean; }},
      {"rho_p99", "ρ p99", "its 99th percentile", Origin::kExact, 4, false, false,
       [](M of, M) { return of.figures.rho.p99; }},
      {"rho_max", "ρ max", "its largest value", Origin::kExact, 4, false, false,
       [](M of, M) { return of.figures.rho.max; }},
      {"below_1.1", "ρ < 1.1, %", "share of (layer, micro-step) pairs", Origin::kExact, 1, false, false,
       [](M of, M) { return 100 * of.pairs.share_of_bucket[0]; }},
      {"below_1.3", "1.1 to 1.3, %", "share of pairs", Origin::kExact, 1, false, false,
       [](M of, M) { return 100 * of.pairs.share_of_bucket[1]; }},
      {"below_1.5", "1.3 to 1.5, %", "share of pairs", Origin::kExact, 1, false, false,
       [](M of, M) { return 100 * of.pairs.share_of_bucket[2]; }},
      {"below_2", "1.5 to 2, %", "share of pairs", Origin::kExact, 1, false, false,
       [](M of, M) { return 100 * of.pairs.share_of_bucket[3]; }},
      {"from_2", "ρ ≥ 2, %", "share of pairs", Origin::kExact, 1, false, false,
       [](M of, M) { return 100 * of.pairs.share_of_bucket[4]; }},
      {"straggler", "straggler", "tokens of the busiest rank above the mean, mean over pairs", Origin::kExact, 0, false,
       false, [](M of, M) { return of.pairs.straggler; }},
      {"straggler_less", "straggler, % less", "than the first system's", Origin::kExact, 1, false, false,
       [](M of, M first) { return less_than(first.pairs.straggler, of.pairs.straggler); }},
      {"waste", "waste, %", "(max − mean) ÷ max rank load, mean over pairs", Origin::kExact, 1, false, false,
       [](M of, M) { return 100 * of.pairs.waste; }},
      {"copies", "copies", "expert weights moved per layer and event, whole group", Origin::kExact, 1, false, false,
       [](M of, M) { return of.figures.copies_per_layer_event; }},
      {"copies_warm", "copies, warm", "the same after the first event", Origin::kExact, 1, false, false,
       [](M of, M) { return of.pairs.copies_after_first_event; }},
      {"guests", "guests", "experts that serve tokens away from home, per layer and event", Origin::kExact, 1, false,
       false, [](M of, M) { return of.figures.guests_per_layer; }},
      {"home_moves", "home moves", "experts whose owner changed, all layers", Origin::kExact, 0, false, false,
       [](M of, M) { return of.figures.home_moves; }},
      {"node_link", "node link", "tokens of the busiest node's link to others, mean over pairs", Origin::kExact, 0,
       false, false, [](M of, M) { return of.figures.node_link_tokens.mean; }},
      {"node_link_max", "node link max", "the same, largest", Origin::kExact, 0, false, false,
       [](M of, M) { return of.figures.node_link_tokens.max; }},
      {"node_link_of_first", "node link max ÷ first", "its largest ÷ the first system's", Origin::kExact, 3, false,
       false,
       [](M of, M first) {
         return of.figures.node_link_tokens.max / std::max(1.0, first.figures.node_link_tokens.max);
       }},
      {"sent", "sent, no locality", "tokens that the busiest rank sends or receives when replicas are filled by rank",
       Origin::kExact, 0, false, true, [](M of, M) { return of.pairs.sent_without_locality; }},
      {"sent_rank", "sent, rank first", "the same when a source fills its own replicas first", Origin::kExact, 0, false,
       true, [](M of, M) { return of.pairs.sent_with_rank_locality; }},
      {"sent_node", "sent, node next", "the same when then those of its node follow", Origin::kExact, 0, false, true,
       [](M of, M) { return of.pairs.sent_with_node_locality; }},
      {"between_nodes", "between nodes", "so routed, tokens that the busiest node sends or receives", Origin::kExact, 0,
       false, true, [](M of, M) { return of.pairs.between_nodes; }},
      {"hottest", "hottest expert", "tokens of a step's most popular expert ÷ mean", Origin::kExact, 2, false, false,
       [](M of, M) { return of.stability.hottest; }},
      {"step_change", "change of step, %", "share of tokens that go to other experts than in the step before",
       Origin::kExact, 1, false, false, [](M of, M) { return 100 * of.stability.step_change; }},
      {"micro_step_change", "change of micro-step, %", "the same from micro-step to micro-step", Origin::kExact, 1,
       false, false, [](M of, M) { return 100 * of.stability.micro_step_change; }},
      {"plan_us", "planning, µs", "CPU time per layer and micro-step, without what is done once per step",
       Origin::kMeasured, 0, false, false, [](M of, M) { return 1e6 * of.times.planning_cpu_seconds / pairs_of(of); }},
      {"plan_seconds", "planning, s", "of the whole step, wall clock", Origin::kMeasured, 3, false, false,
       [](M of, M) { return of.times.wall_seconds; }},
  };
}

std::vector<Column> columns_of_simulation() {
  const auto modelled = [](std::string_view name, std::string_view title, std::string_view meaning, int digits,
                           std::function<double(M, M)> value) {
    return Column{name, title, meaning, Origin::kModelled, digits, true, false, std::move(value)};
  };
  return {
      modelled("speedup", "speedup",
               "step time of the first system ÷ this one's; a step is recompute and policy update", 3,
               [](M of, M first) { return first.step->step_seconds / of.step->step_seconds; }),
      modelled("ideal_speedup", "ideal speedup",
               "were every rank at the mean load and mean traffic of this system, and nothing copied", 3,
               [](M of, M first) { return first.step->step_seconds / of.step->ideal_step_seconds; }),
      modelled("of_ideal", "of ideal, %", "ideal step time ÷ step time", 1,
               [](M of, M) { return 100 * of.step->ideal_step_seconds / of.step->step_seconds; }),
      modelled("of_perfect", "of perfect, %",
               "first system's step were all ranks at the mean ÷ step time; above 100 where less is sent", 1,
               [](M of, M first) { return 100 * first.step->ideal_step_seconds / of.step->step_seconds; }),
      modelled("free_speedup", "speedup, opt", "were planning and transfer free", 3,
               [](M of, M first) { return first.step->step_seconds / (of.step->step_seconds - overhead(*of.step)); }),
      modelled("of_free", "of opt, %", "step time with planning and transfer free ÷ step time", 1,
               [](M of, M) { return 100 * (1 - overhead(*of.step) / of.step->step_seconds); }),
      modelled("rl_speedup", "RL step speedup", "with the rollout, which takes as long whoever plans", 3,
               [](M of, M first) { return first.step->rl_step_seconds / of.step->rl_step_seconds; }),
      modelled("step_ms", "step, ms", "recompute and policy update", 1,
               [](M of, M) { return 1e3 * of.step->step_seconds; }),
      modelled("recompute_ms", "recompute, ms", "stage time", 1,
               [](M of, M) { return 1e3 * of.step->recompute.seconds; }),
      modelled("update_ms", "policy update, ms", "stage time", 1,
               [](M of, M) { return 1e3 * of.step->policy_update.seconds; }),
      modelled("exposed_ms", "exposed, ms", "of both stages, waited for copies and gradients", 2,
               [](M of, M) { return 1e3 * of.step->exposed_copy_seconds; }),
      modelled("forward_ms", "forward, ms", "of a layer and micro-step", 3, [](M of, M) { return forward_ms(of); }),
      modelled("backward_ms", "backward, ms", "of a layer and micro-step", 3,
               [](M of, M) { return ms_per_turn(of, turns(of.step->policy_update)) - forward_ms(of); }),
      modelled("dense_ms", "attention, ms", "attention, norms, router and shared experts of a layer's forward", 3,
               [](M of, M) { return ms_per_turn(of, of.step->recompute.parts.dense); }),
      modelled("planning_ms", "planning, ms", "on the critical path of a layer's forward, as published", 3,
               [](M of, M) { return ms_per_turn(of, of.step->recompute.parts.planning); }),
      modelled("dispatch_ms", "dispatch, ms", "of a layer's forward", 3,
               [](M of, M) { return ms_per_turn(of, of.step->recompute.parts.dispatch); }),
      modelled("experts_ms", "experts, ms", "of a layer's forward", 3,
               [](M of, M) { return ms_per_turn(of, of.step->recompute.parts.experts); }),
      modelled("combine_ms", "combine, ms", "of a layer's forward", 3,
               [](M of, M) { return ms_per_turn(of, of.step->recompute.parts.combine); }),
      modelled("transfer_ms", "transfer, ms",
               "of a layer: copies into the rank that receives most, over the host's link", 3,
               [](M of, M) { return 1e3 * of.pairs.busiest_receiver * of.fetch_seconds; }),
      modelled("guest_gib", "guests, GiB", "weights and gradients of the guests of the rank that holds most", 3,
               [](M of, M) {
                 const RankMemory& memory = of.step->policy_update.memory;
                 return gib(static_cast<double>(memory.guest_weights.value + memory.guest_gradients.value));
               }),
      modelled("link_gib", "busiest node link, GiB", "bytes from one node to another in a step, the most", 3,
               [](M of, M) {
                 return gib(busiest_node_link(of.step->recompute) + busiest_node_link(of.step->policy_update));
               }),
      modelled("utilisation", "computing, %", "of the ranks' time in the policy update", 1,
               [](M of, M) { return 100 * of.step->policy_update.utilisation; }),
  };
}

}  // namespace

std::string_view to_string(Origin origin) {
  switch (origin) {
    case Origin::kExact:
      return "exact";
    case Origin::kModelled:
      return "modelled";
    case Origin::kMeasured:
      break;
  }
  return "measured here";
}

const std::vector<Column>& all_columns() {
  static const std::vector<Column> columns = [] {
    std::vector<Column> all = columns_of_plans();
    for (Column& column : columns_of_simulation()) all.push_back(std::move(column));
    return all;
  }();
  return columns;
}

const Column* find_column(std::string_view name) {
  const auto at = std::ranges::find(all_columns(), name, &Column::name);
  return at == all_columns().end() ? nullptr : &*at;
}

std::string column_names() {
  std::string names;
  for (const Column& column : all_columns()) names += fmt::format("{}{}", names.empty() ? "" : ", ", column.name);
  return names;
}

}  // namespace foremoe
