#include "foremoe/sim/reproduce/run_experiment.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/evaluate/own_options.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/trace_file.h"
#include "foremoe/sim/reproduce/columns.h"

namespace foremoe {

namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// An input made into what policies plan from, and on what it is simulated.
struct Step {
  StepInput input;
  std::optional<CostModel> cost;
};

LoadTable micro_steps(const LoadTable& load, int first, int count) {
  LoadTable part{.load = {}, .top_k = load.top_k, .ranks_per_node = load.ranks_per_node, .name = load.name};
  auto shape = load.load.shape();
  const std::size_t of_one = load.load.size() / shape[0];
  shape[0] = static_cast<std::size_t>(count);
  part.load = Array<Tokens, 4>(shape);
  const auto from = load.load.flat().subspan(static_cast<std::size_t>(first) * of_one, part.load.size());
  std::ranges::copy(from, part.load.flat().begin());
  return part;
}

StepInput read_file(const ExperimentInput& input, ThreadPool& pool) {
  StepInput step;
  step.trace = read_trace(input.file);
  step.batching = make_batching(*step.trace, {.num_ranks = input.file_ranks,
                                              .ranks_per_node = input.options.ranks_per_node,
                                              .tokens_per_rank = input.options.tokens_per_rank});
  step.load = collect(*step.trace, *step.batching, pool);
  step.load.name = input.label;
  return step;
}

StepInput draw(const ExperimentInput& input) {
  StepInput step;
  SynthesisOptions options = input.options;
  if (input.former_step) options.num_micro_steps *= 2;
  step.load = synthesize_load(options, input.routing);
  if (!input.former_step) return step;
  const int half = input.options.num_micro_steps;
  step.previous_load = micro_steps(step.load, 0, half);
  step.load = micro_steps(step.load, half, half);
  return step;
}

CostModel cost_of(const ModelledCluster& on, const LoadTable& load) {
  Cluster cluster = find_cluster(on.cluster);
  cluster.ranks_per_node = load.ranks_per_node;
  return {cluster, on.model, on.cost};
}

Step make_step(const ExperimentInput& input, bool simulated, ThreadPool& pool) {
  Step step{.input = input.file.empty() ? draw(input) : read_file(input, pool)};
  const LoadTable& load = step.input.load;
  step.input.homes = contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
  if (simulated) step.cost = cost_of(*input.on, load);
  return step;
}

Cell measure(const ExperimentSystem& system, const ExperimentInput& input, const Step& step, bool routed,
             ThreadPool& pool) {
  const auto policy = policy_with(system.policy, system.own);
  Evaluation e = evaluate(
      *policy, step.input,
      {.planner = system.options, .path = system.path, .rollout_seconds = input.on ? input.on->rollout_seconds : 0},
      {.pool = pool, .cost = step.cost ? &*step.cost : nullptr});
  if (!e.planned()) return {.measured = {}, .skipped = e.skipped, .of_columns = {}};
  if (!e.check.ok()) {
    throw InputError(
        {.file = {}, .field = {}, .index = {}},
        fmt::format("{} on {}: the plan is wrong: {}", system.label, input.label, e.check.violations.front().message));
  }
  Measured measured;
  measured.figures = std::move(e.figures);
  measured.times = e.times;
  measured.pairs = pair_figures(e.plan, step.input.load, routed);
  measured.stability = load_stability(step.input.load, input.file.empty() ? input.steps : 1);
  measured.step = std::move(e.step);
  if (step.cost) {
    measured.model_layers_per_layer = static_cast<double>(step.cost->model().moe_layers) / step.input.load.num_layers();
    const LinkSpeed& host = step.cost->cluster().host;
    measured.fetch_seconds =
        host.latency_seconds + static_cast<double>(step.cost->expert_weights().value) / host.bytes_per_second;
  }
  return {.measured = std::move(measured), .skipped = {}, .of_columns = {}};
}

void fill_columns(const std::vector<std::string>& columns, std::vector<Cell>& of_input) {
  for (Cell& cell : of_input) {
    for (const std::string& name : columns) {
      const bool there = cell.measured && of_input.front().measured;
      cell.of_columns.push_back(there ? find_column(name)->value(*cell.measured, *of_input.front().measured) : kNone);
    }
  }
}

// The synthesis speaks of options; the reader of a file knows its keys and its name.
Step step_of(const Experiment& experiment, const ExperimentInput& input, bool simulated, ThreadPool& pool) {
  try {
    return make_step(input, simulated, pool);
  } catch (const InputError& error) {
    if (!input.file.empty()) throw;
    const std::string file = experiment.file.empty() ? experiment.name : experiment.file;
    throw InputError({.file = file, .field = fmt::format("input '{}'", input.label), .index = {}}, error.what());
  }
}

std::vector<Cell> skipped_input(const Experiment& experiment, const std::string& reason) {
  return std::vector<Cell>(experiment.systems.size(), Cell{.measured = {}, .skipped = reason, .of_columns = {}});
}

}  // namespace

ExperimentResult run_experiment(const Experiment& experiment, ThreadPool& pool, const OnCell& on_cell) {
  ExperimentResult result{.experiment = experiment, .cells = {}};
  const auto any = [&](bool Column::*need) {
    return std::ranges::any_of(experiment.columns, [&](const std::string& name) { return find_column(name)->*need; });
  };
  for (const ExperimentInput& input : experiment.inputs) {
    std::vector<Cell>& cells = result.cells.emplace_back();
    if (!input.file.empty() && !std::filesystem::exists(input.file)) {
      cells = skipped_input(experiment, fmt::format("no file {} here", input.file));
    } else {
      const Step step = step_of(experiment, input, any(&Column::simulated), pool);
      for (const ExperimentSystem& system : experiment.systems) {
        if (on_cell) on_cell(input, system);
        cells.push_back(measure(system, input, step, any(&Column::routed), pool));
      }
    }
    fill_columns(experiment.columns, cells);
  }
  return result;
}

}  // namespace foremoe
