#pragma once

// What `foremoe run` executes, read and held against each other before anything starts: a step and, with --plan, the
// plan for it.

#include <memory>
#include <optional>
#include <vector>

#include "foremoe/runtime/replay_routes.h"
#include "run_options.h"

namespace foremoe::cli {

struct RunInput {
  PlanningInput planning;
  std::optional<StepPlan> plan;  // given by the user; of the same part of the input
  std::unique_ptr<ReplayRoutes> routes;
  std::vector<std::uint8_t> without_route;  // see rows_without_route()
};

// `processes`: one for each rank; 0 where ranks are threads. Throws InputError for a plan that does not match the load,
// the rank count or the order.
std::unique_ptr<const RunInput> read_run_input(const RunArguments& arguments, int processes, ThreadPool& pool);

// "1 process", "8 processes".
std::string counted_processes(int n);

}  // namespace foremoe::cli
