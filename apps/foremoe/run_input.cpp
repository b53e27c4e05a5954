#include "run_input.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/runtime/rank_run.h"
#include "wording.h"

namespace foremoe::cli {
namespace {

[[noreturn]] void refuse(const std::string& file, const std::string& what) {
  throw InputError({.file = file, .field = {}, .index = {}}, what);
}

// Homes before a plan was made, as it records them.
std::string recorded_homes(const StepPlan& plan) {
  const auto options = nlohmann::json::parse(plan.options);
  const auto at = options.find("homes");
  return at != options.end() && at->is_string() ? at->get<std::string>() : std::string(kContiguous);
}

Array<RankId, 2> first_layers(const Array<RankId, 2>& homes, int layers) {
  Array<RankId, 2> first({static_cast<std::size_t>(layers), homes.extent(1)});
  std::ranges::copy(homes.flat().first(first.size()), first.flat().begin());
  return first;
}

int least(int asked, int there) { return asked == 0 ? there : std::min(asked, there); }

// The plan and its step, both as far as they are executed.
void read_given_plan(const RunArguments& arguments, InputOptions options, ThreadPool& pool, RunInput& input) {
  const std::string& path = arguments.plan;
  const int layers = options.layers;
  const int micro_steps = options.micro_steps;
  options.layers = options.micro_steps = 0;  // of the plan, not before it: what is executed is its first part
  const StepPlan plan = read_plan(path);
  const int processes = options.wanted_ranks;
  options = input_as_planned(plan, options);
  if (processes != 0) options.wanted_ranks = processes;
  StepInput step = read_step(options, pool);

  if (plan.num_ranks() != step.load.num_ranks()) {
    refuse(path, fmt::format("is a plan for {}, {} has {}", counted(plan.num_ranks(), "rank"), step.load.name,
                             step.load.num_ranks()));
  }
  if (plan.ranks_per_node != step.load.ranks_per_node) {
    refuse(path, fmt::format("is a plan for {} per node, {} has {}", counted(plan.ranks_per_node, "rank"),
                             step.load.name, step.load.ranks_per_node));
  }
  const int in_flight = arguments.planner.options.in_flight;
  if (arguments.in_flight_given && in_flight != plan.in_flight) {
    refuse(path, fmt::format("is a plan for {} in flight, --in-flight asks for {}",
                             counted(plan.in_flight, "micro-step"), in_flight));
  }
  read_plan_for(step.load, path);  // holds the digest
  const Array<RankId, 2> homes =
      initial_homes(arguments.homes_given ? arguments.planner.homes : recorded_homes(plan), step.load);
  const CheckReport report = check_plan(
      plan, step.load,
      {.initial_home = homes, .trace = step.trace_or_null(), .batching = step.batching_or_null(), .max_listed = 1});
  if (!report.ok()) {
    const Violation& v = report.violations.front();
    std::string where;
    const auto at = [&](const char* word, const auto& id) {
      if (id) where += fmt::format("{} {}, ", word, id->value);
    };
    at("event", v.event);
    at("layer", v.layer);
    at("rank", v.rank);
    at("slot", v.slot);
    at("expert", v.expert);
    refuse(path, fmt::format("is not right for {}: {}{} (foremoe verify tells all)", step.load.name, where, v.message));
  }

  const LoadTable part =
      take_first(step.load, least(micro_steps, step.load.num_micro_steps()), least(layers, step.load.num_layers()));
  input.plan = take_first(plan, part);
  step.cut =
      step.cut || part.num_layers() < step.load.num_layers() || part.num_micro_steps() < step.load.num_micro_steps();
  step.load = part;
  input.planning = {.step = std::move(step), .homes = first_layers(homes, part.num_layers()), .former = {}};
}

}  // namespace

std::string counted_processes(int n) { return fmt::format("{} process{}", n, n == 1 ? "" : "es"); }

std::unique_ptr<const RunInput> read_run_input(const RunArguments& arguments, int processes, ThreadPool& pool) {
  InputOptions options = arguments.input;
  if (processes != 0) {
    if (options.ranks != 0 && options.ranks != processes) {
      refuse("--ranks", fmt::format("{}, but mpirun has started {}: its option is -np {}", options.ranks, processes,
                                    options.ranks));
    }
    options.wanted_ranks = processes;
  }
  auto input = std::make_unique<RunInput>();
  if (arguments.plan.empty()) {
    input->planning = read_planning_input(options, arguments.planner, pool);
  } else {
    read_given_plan(arguments, options, pool, *input);
  }
  const StepInput& step = input->planning.step;
  if (processes != 0 && step.load.num_ranks() != processes) {
    refuse(step.load.name, fmt::format("is a load of {}, which {} cannot run", counted(step.load.num_ranks(), "rank"),
                                       counted_processes(processes)));
  }
  input->routes = step.trace ? recorded_routes(*step.trace, *step.batching) : dealt_routes(step.load);
  input->without_route = rows_without_route(*input->routes, step.load);
  return input;
}

}  // namespace foremoe::cli
