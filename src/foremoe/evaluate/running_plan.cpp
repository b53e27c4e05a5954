#include "foremoe/evaluate/running_plan.h"

#include <algorithm>

namespace foremoe {

RunningPlan::RunningPlan(StepPlan plan) : plan_(std::move(plan)), taken_(plan_.num_micro_steps()), delivered_(taken_) {
  done_ = true;
}

RunningPlan::RunningPlan(const Request& request, ThreadPool& pool) {
  planner_ = std::jthread([this, request, &pool] {
    const std::int64_t begin = Timeline::now_ns();
    PolicyInput input = request.input.for_policy(request.options);
    // Under `shared` what is copied depends on quotas: all must be known before the first turn.
    if (request.options.residency != Residency::kShared) {
      input.on_micro_step = [this](const StepPlan& planned, MicroStepId m) { deliver(planned, m); };
    }
    std::optional<PolicyResult> result;
    std::exception_ptr error;
    try {
      result = request.policy.plan(input, pool);
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

RunningPlan::~RunningPlan() = default;  // waits for the planner

void RunningPlan::deliver(const StepPlan& planned, MicroStepId m) {
  const std::lock_guard lock(mutex_);
  if (m == MicroStepId{0}) staged_ = planned;
  for (int e = 0; e < planned.num_events(); ++e) {
    if (planned.event_micro_step[static_cast<std::size_t>(e)] != m) continue;
    std::ranges::copy(planned.slot_tokens[e].flat(), staged_.slot_tokens[e].flat().begin());
  }
  delivered_ = m.value + 1;
  changed_.notify_all();
}

void RunningPlan::take(MicroStepId m) {
  for (int e = 0; e < plan_.num_events(); ++e) {
    if (plan_.event_micro_step[static_cast<std::size_t>(e)] != m) continue;
    std::ranges::copy(staged_.slot_tokens[e].flat(), plan_.slot_tokens[e].flat().begin());
  }
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
  for (; taken_ <= m.value; ++taken_) take(MicroStepId{taken_});
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
