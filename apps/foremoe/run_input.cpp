#include "run_input.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "console.h"
#include "foremoe/core/error.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/fit_plan.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/plan/step_plan.h"
#include "planning_arguments.h"

namespace foremoe::cli {
namespace {

[[noreturn]] void refuse(const std::string& file, const std::string& what) { throw InputError({.file = file}, what); }

// Returns the homes before planning, as recorded in the plan.
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

// Reads the plan and its workload, and truncates both to the layers and micro-steps to execute.
void read_given_plan(const RunArguments& arguments, InputOptions options, ThreadPool& pool, RunInput& input) {
  const std::string& path = arguments.plan;
  const int layers = options.layers;
  const int micro_steps = options.micro_steps;
  options.layers = options.micro_steps = 0;  // they select the executed part of the plan, not its input
  StepPlan plan = read_plan(path);
  const int processes = options.wanted_ranks;
  options = input_as_planned(plan, options);
  if (processes != 0 && options.ep == 0) options.wanted_ranks = processes;
  Workload step = read_load_or_trace(options, pool);

  if (plan.num_ranks() != step.load.num_ranks()) {
    refuse(path, fmt::format("is a plan for {}, but {} has {}", counted(plan.num_ranks(), "rank"), step.load.name,
                             step.load.num_ranks()));
  }
  if (plan.ranks_per_node != step.load.ranks_per_node) {
    refuse(path, fmt::format("is a plan for {} per node, but {} has {}", counted(plan.ranks_per_node, "rank"),
                             step.load.name, step.load.ranks_per_node));
  }
  const int in_flight = arguments.evaluate.planner.in_flight;
  if (arguments.given("in_flight") && in_flight != plan.in_flight) {
    refuse(path, fmt::format("is a plan for {} in flight, but --in-flight is {}", counted(plan.in_flight, "micro-step"),
                             in_flight));
  }
  if (arguments.fit_plan) {
    try {
      FittedPlan fitted = fit_plan(std::move(plan), step.load);
      plan = std::move(fitted.plan);
      input.mismatched = fitted.mismatched;
      if (fitted.mismatched > 0) {
        note(fmt::format("{} does not cover {} of {}: their homes serve them", path, counted(fitted.mismatched, "row"),
                         step.load.name));
      }
    } catch (const InputError& error) {
      refuse(path, error.problem());
    }
  } else {
    expect_plan_for(step.load, plan, path);
  }
  step.homes = initial_homes(arguments.given("homes") ? arguments.input.homes : recorded_homes(plan), step.load);
  CheckOptions check = check_options(step);
  check.max_listed = 1;
  const CheckReport report = check_plan(plan, step.load, check);
  if (!report.ok()) {
    const Violation& v = report.violations.front();
    const std::string place = place_of(v);
    refuse(path, fmt::format("is not right for {}: {}{}{} (foremoe verify lists all violations)", step.load.name, place,
                             place.empty() ? "" : ", ", v.message));
  }

  const LoadTable part = take_first(step.load, number_to_use("micro_steps", micro_steps, plan.num_micro_steps(), path),
                                    number_to_use("layers", layers, plan.num_layers(), path));
  input.plan = take_first(plan, part);
  step.cut =
      step.cut || part.num_layers() < step.load.num_layers() || part.num_micro_steps() < step.load.num_micro_steps();
  step.homes = first_layers(step.homes, part.num_layers());
  step.load = part;
  input.step = std::move(step);
}

}  // namespace

Optimizer RunArguments::optimizer_options() const {
  const double initial = optimizer == Optimizer::Kind::kSgd ? 1e-2 : 1e-3;
  return {.kind = optimizer, .rate = static_cast<float>(rate > 0 ? rate : initial)};
}

std::string counted_processes(int n) { return fmt::format("{} process{}", n, n == 1 ? "" : "es"); }

std::unique_ptr<const RunInput> read_run_input(const RunArguments& arguments, int processes, ThreadPool& pool) {
  InputOptions options = arguments.input;
  if (processes != 0) {
    if (options.ranks != 0 && options.ranks != processes) {
      refuse("--ranks",
             fmt::format("{}, but mpirun has started {}: use mpirun -np {}", options.ranks, processes, options.ranks));
    }
    if (processes > 1) options.wanted_ranks = processes;
  }
  auto input = std::make_unique<RunInput>();
  if (arguments.plan.empty()) {
    input->step = read_workload(options, pool);
  } else {
    read_given_plan(arguments, options, pool, *input);
  }
  const Workload& step = input->step;
  note_all(step.remarks);
  if (processes == 1 && step.load.num_ranks() != 1) {
    refuse("--comm mpi",
           fmt::format("{} is a load of {}, and mpirun has started 1 process; start one for each rank, or "
                       "fold the load with --ranks 1 --fold",
                       step.load.name, counted(step.load.num_ranks(), "rank")));
  }
  if (processes != 0 && step.load.num_ranks() != processes) {
    refuse(step.load.name, fmt::format("is a load of {}, which {} cannot run", counted(step.load.num_ranks(), "rank"),
                                       counted_processes(processes)));
  }
  input->routes = step.tokens ? recorded_routes(step.tokens->trace, step.tokens->batching) : dealt_routes(step.load);
  input->without_route = rows_without_route(*input->routes, step.load);
  return input;
}

}  // namespace foremoe::cli
