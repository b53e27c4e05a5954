#pragma once

// The whole of `foremoe run`: input and plans made ready, every phase executed under every policy, results held against
// the reference. Every process of the group does the same; rows are complete where rank 0 is.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "run_input.h"
#include "run_plan.h"
#include "run_report.h"

namespace foremoe::cli {

class Execution {
 public:
  // Throws InputError, or ToldElsewhere, for whatever can be refused before anything starts.
  Execution(const RunArguments& arguments, RankGroup& group);
  std::vector<RunRow> run();
  std::string describe() const;  // what ran, for people

 private:
  const LoadTable& load() const { return input_->planning.step.load; }
  void expect_room() const;
  bool backward() const;  // may any phase have one?
  std::vector<Phase> phases_of_given_plan() const;
  void run_policy(const Policy& policy);
  void run_given_plan();
  void execute(const std::string& policy, Phase phase, RunningPlan& running);
  void expect_same_quotas(const StepPlan& plan);
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
