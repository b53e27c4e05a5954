#pragma once

// Arguments of `foremoe run`, and its input: read, compared with the processes, and checked before execution.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/runtime/layer_work.h"
#include "foremoe/runtime/moe_model.h"
#include "foremoe/runtime/replay_routes.h"
#include "run_group.h"

namespace foremoe::cli {

struct RunArguments {
  InputOptions input;
  EvaluateOptions evaluate;  // only planner, path and depth are used
  std::vector<std::string> policies{"vanilla", "foremoe"};
  std::string plan;  // a plan file, executed alone; empty: policies plan
  Given given;
  bool fit_plan = false;       // fit a plan made for another load: unplanned rows go to homes
  std::optional<Phase> phase;  // none: both
  int threads = 0;             // of the planner; 0: one per processor

  double timeout_seconds = 60;
  double link_throttle = 0;  // bytes per second; 0: no throttle
  WorkOptions work;

  double rate = 0;  // 0: the optimizer's default
  ExpertShape shape{.hidden = 64, .intermediate = 32};
  int repeats = 5;
  int steps = 1;
  Comm comm = Comm::kThreads;
  Optimizer::Kind optimizer = Optimizer::Kind::kSgd;
  bool bitwise = false;
  bool no_reference = false;
  bool json = false;
  std::string timeline;

  Optimizer optimizer_options() const;
  bool runs(Phase p) const { return !phase || *phase == p; }
};

struct RunInput {
  Workload step;
  std::optional<StepPlan> plan;            // given by the user, for the same part of the input
  std::optional<std::int64_t> mismatched;  // rows of the whole input that are not in the plan; set if it was fitted
  std::unique_ptr<ReplayRoutes> routes;
  std::vector<std::uint8_t> without_route;  // see rows_without_route()
};

std::string counted_processes(int n);  // "1 process"

// processes: started by mpirun; 0: ranks are threads. Throws InputError for an input that they cannot run.
std::unique_ptr<const RunInput> read_run_input(const RunArguments& arguments, int processes, ThreadPool& pool);

}  // namespace foremoe::cli
