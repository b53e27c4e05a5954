#include "foremoe/evaluate/running_plan.h"

#include <algorithm>

namespace foremoe {

// Copies the quotas of one micro-step, and under `shared` its slots, which are otherwise already final.
static void copy_micro_step(const StepPlan& from, StepPlan& to, MicroStepId m) {
  for (int e = 0; e < from.num_events(); ++e) {
    if (from.event_micro_step[static_cast<std::size_t>(e)] != m) continue;
    std::ranges::copy(from.slot_tokens[e].flat(), to.slot_tokens[e].flat().begin());
    if (from.residency != Residency::kShared) continue;
    std::ranges::copy(from.slot_expert[e].flat(), to.slot_expert[e].flat().begin());
  }
  std::ranges::copy(from.max_load.row(m), to.max_load.row(m).begin());
  std::ranges::copy(from.lower_bound.row(m), to.lower_bound.row(m).begin());
}

RunningPlan::RunningPlan(StepPlan plan) : plan_(std::move(plan)), taken_(plan_.num_micro_steps()), delivered_(taken_) {
  done_ = true;
}

RunningPlan::RunningPlan(const Request& request, ThreadPool& pool) {
  planner_ = std::jthread([this, request, &pool] {
    const std::int64_t begin = Timeline::now_ns();
    PolicyInput input = request.input.for_policy(request.options);
    input.on_micro_step = [this, &request](const StepPlan& planned, MicroStepId m) { deliver(request, planned, m); };
    std::optional<PolicyResult> result;
    std::exception_ptr error;
    try {
      result = plan_with(request.policy, request.input, input, pool);
    } catch (...) {
      error = std::current_exception();
    }
    if (request.timeline != nullptr) {
      request.timeline->add(RankId{0}, Lane::kPlanner, "plan with " + std::string(request.policy.name()), begin,
                            Timeline::now_ns());
    }
    const std::lock_guard lock(mutex_);
    if (error) {
      error_ = error;
    } else if (const auto* skipped = std::get_if<Skipped>(&*result)) {
      skipped_ = skipped->reason;
    } else {
      staged_ = std::move(std::get<PlannedStep>(*result).plan);
      delivered_ = staged_.num_micro_steps();
    }
    done_ = true;
    changed_.notify_all();
  });
}

RunningPlan::~RunningPlan() = default;  // joins the planner

void RunningPlan::deliver(const Request& request, const StepPlan& planned, MicroStepId m) {
  const std::lock_guard lock(mutex_);
  if (m == MicroStepId{0}) {
    staged_ = planned;
    staged_.policy = request.policy.name();  // the policy sets the name only when the plan is complete
    record_input_options(request.input, staged_);
    staged_.homes_digest = recorded_digest(request.input.homes, request.input.load);
  }
  copy_micro_step(planned, staged_, m);
  delivered_ = m.value + 1;
  changed_.notify_all();
}

std::optional<std::string> RunningPlan::wait_to_begin() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_ || delivered_ > 0; });
  if (error_) std::rethrow_exception(error_);
  if (skipped_) return skipped_;
  if (taken_ == 0) {
    plan_ = staged_;
    taken_ = delivered_;
  }
  return std::nullopt;
}

void RunningPlan::wait_for(MicroStepId m) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ || delivered_ > m.value; });
  if (error_) std::rethrow_exception(error_);
  for (; taken_ <= m.value; ++taken_) copy_micro_step(staged_, plan_, MicroStepId{taken_});
}

void RunningPlan::finish() {
  if (planner_.joinable()) planner_.join();
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  if (skipped_ || staged_.num_events() == 0) return;
  plan_ = std::move(staged_);
  staged_ = {};
  taken_ = delivered_;
}

}  // namespace foremoe
