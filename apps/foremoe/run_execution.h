#pragma once

// Executes every phase of `foremoe run` under every policy, and compares the results with the reference. All processes
// of the group run this code; only rank 0's process gets complete result rows.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/evaluate/evaluate.h"
#include "foremoe/evaluate/running_plan.h"
#include "foremoe/runtime/layer_work.h"
#include "foremoe/runtime/rank_run.h"
#include "foremoe/transfer/transfer_schedule.h"
#include "run_group.h"
#include "run_input.h"
#include "run_report.h"

namespace foremoe::cli {

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
  // Returns why the plan cannot be executed in the phase; else sets the schedule of its copies.
  std::string schedule(const StepPlan& plan, Phase phase, std::shared_ptr<const TransferSchedule>& schedule) const;
  PhaseRun run_of(const StepPlan& plan, std::shared_ptr<const TransferSchedule> schedule);
  PhaseOutcome run_planned(const PhaseRun& run, RunningPlan& running, PartCount& turns);
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
