#pragma once

// Implements `foremoe run`: prepares input and plans, executes every phase under every policy, and compares the results
// with the reference. All processes of the group run this code; only rank 0's process gets complete result rows.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/evaluate/running_plan.h"
#include "foremoe/runtime/layer_work.h"
#include "foremoe/runtime/moe_model.h"
#include "foremoe/runtime/replay_routes.h"
#include "run_group.h"
#include "run_report.h"

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

// The input of a run, read and checked before execution.
struct RunInput {
  Workload step;
  std::optional<StepPlan> plan;            // given by the user, for the same part of the input
  std::optional<std::int64_t> mismatched;  // rows of the whole input that are not in the plan; set if it was fitted
  std::unique_ptr<ReplayRoutes> routes;
  std::vector<std::uint8_t> without_route;  // see rows_without_route()
};

class Execution {
 public:
  // Throws InputError or ReportedElsewhere for all errors that can be detected before execution.
  Execution(const RunArguments& arguments, RankGroup& group);
  std::vector<RunRow> run();
  std::string describe() const;  // a heading for the table

 private:
  const LoadTable& load() const { return input_->step.load; }
  void expect_room() const;
  bool backward() const;  // whether any phase may have a backward
  std::vector<Phase> phases_of_given_plan() const;
  void run_policy(const Policy& policy);
  void run_given_plan();
  void execute(const std::string& policy, Phase phase, RunningPlan& running);
  void hold_against_reference(RunRow& row);
  void check(RunRow& row, const StepPlan& plan) const;
  void write_timeline();

  const RunArguments& arguments_;
  RankGroup& group_;
  ThreadPool pool_;
  std::vector<const Policy*> policies_;
  std::unique_ptr<const RunInput> input_;
  ModelSize model_;
  LayerWork work_;
  std::optional<Timeline> timeline_;
  std::optional<ReferenceRuns> reference_;
  std::vector<RunRow> rows_;
};

}  // namespace foremoe::cli
