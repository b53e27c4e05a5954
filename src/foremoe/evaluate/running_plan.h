#pragma once

// A plan that ranks execute while a background thread still plans later micro-steps, in order. Ranks wait for the
// micro-step that they are about to begin.

#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "foremoe/core/timeline.h"
#include "foremoe/evaluate/workload.h"

namespace foremoe {

// Why policies that place experts freely have no policy update.
inline constexpr std::string_view kPlacesFreely =
    "places experts freely, so gradients and optimizer state of a replica have no home: forward only";

class RunningPlan {
 public:
  // Wraps a finished plan.
  explicit RunningPlan(StepPlan plan);
  // Starts planning. The request's objects must outlive this object. The planner uses the pool until finish().
  struct Request {
    const Policy& policy;
    const Workload& input;
    PlannerOptions options = {};
    Timeline* timeline = nullptr;
  };
  RunningPlan(const Request& request, ThreadPool& pool);
  ~RunningPlan();

  // Waits until execution may begin. From then on homes are final, and so are slots except under `shared`. Returns the
  // reason if there is no plan. Rethrows exceptions of the planner.
  std::optional<std::string> wait_to_begin();
  const StepPlan& plan() const { return plan_; }
  // Call before a rank begins a micro-step's forward or reads its slots. No rank may bind a phase at the same time
  // (binding is collective).
  void wait_for(MicroStepId m);
  // Waits for the whole plan. No rank may be executing the plan. Rethrows exceptions of the planner.
  void finish();

 private:
  void deliver(const Request& request, const StepPlan& planned, MicroStepId m);

  StepPlan plan_;  // read by the ranks; has the quotas of the first `taken_` micro-steps
  int taken_ = 0;  // guarded by mutex_, like all members below
  std::mutex mutex_;
  std::condition_variable changed_;
  StepPlan staged_;    // written by the planner
  int delivered_ = 0;  // micro-steps
  bool done_ = false;
  std::optional<std::string> skipped_;
  std::exception_ptr error_;
  std::jthread planner_;
};

}  // namespace foremoe
