#pragma once

// The plan that a phase executes while the rest of it is still being planned: micro-steps are planned on a thread of
// their own, in order, and ranks wait for the one that they are about to begin.

#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "foremoe/core/timeline.h"
#include "foremoe/evaluate/workload.h"

namespace foremoe {

// Policies that place experts freely: why there is no policy update.
inline constexpr std::string_view kPlacesFreely =
    "places experts freely, so a replica has no home that its gradients and optimizer state belong to: forward only";

class RunningPlan {
 public:
  // Planned by somebody else, whole.
  explicit RunningPlan(StepPlan plan);
  // Starts planning. What is given must outlive this object; the pool is the planner's until finish().
  struct Request {
    const Policy& policy;
    const Workload& input;
    PlannerOptions options;
    Timeline* timeline = nullptr;
  };
  RunningPlan(const Request& request, ThreadPool& pool);
  ~RunningPlan();

  // Waits until execution may begin: from then on homes are final, and slots but under `shared`. The reason when there
  // is no plan. Throws what planning threw.
  std::optional<std::string> wait_to_begin();
  const StepPlan& plan() const { return plan_; }
  // Before a rank begins a micro-step's forward, or reads its slots. No rank may be binding a phase meanwhile (their
  // bind is collective).
  void wait_for(MicroStepId m);
  // Waits for the whole plan, which nobody may be executing. Throws what planning threw.
  void finish();

 private:
  void deliver(const Request& request, const StepPlan& planned, MicroStepId m);

  StepPlan plan_;  // what ranks execute; quotas of the first `taken_` micro-steps
  int taken_ = 0;  // guarded by mutex_, as is all below
  std::mutex mutex_;
  std::condition_variable changed_;
  StepPlan staged_;    // what has been planned
  int delivered_ = 0;  // micro-steps
  bool done_ = false;
  std::optional<std::string> skipped_;
  std::exception_ptr error_;
  std::jthread planner_;
};

}  // namespace foremoe
