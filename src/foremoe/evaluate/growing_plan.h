#pragma once

// A plan that is appended block by block, each of the next micro-steps, while readers execute the blocks before it.
// What was appended never changes. A block covers all micro-steps unless the residency is `shared`, under which each
// micro-step has guests of its own.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

#include "foremoe/evaluate/workload.h"

namespace foremoe {

class GrowingPlan {
 public:
  // The input must outlive this object.
  explicit GrowingPlan(const Workload& input) : input_(input) {}
  explicit GrowingPlan(Workload&&) = delete;

  // Throws InputError, field `block`, unless the block is a plan of the load's next micro-steps that continues the
  // blocks before it. One thread at a time.
  void append(const StepPlan& block);
  // Ends planning: waits for missing micro-steps throw std::runtime_error with this text.
  void fail(const std::string& why);

  // Waits until the micro-step is appended, or until the time has passed. Returns whether it is appended.
  bool wait_for(MicroStepId m, std::chrono::milliseconds most);
  int num_planned() const { return appended_; }
  int num_micro_steps() const { return input_.load.num_micro_steps(); }
  // Readers may use the micro-steps for which wait_for() returned true.
  const StepPlan& plan() const { return plan_; }

 private:
  void expect_next(const StepPlan& block) const;

  const Workload& input_;
  StepPlan plan_;
  std::string options_;  // of the blocks, without those of the input
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string failure_;  // guarded by mutex_
  std::atomic<int> appended_ = 0;
};

}  // namespace foremoe
