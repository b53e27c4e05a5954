#include "foremoe/evaluate/growing_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <tuple>

#include "foremoe/core/error.h"
#include "foremoe/core/sha256.h"

namespace foremoe {
namespace {

[[noreturn]] void refuse(const std::string& problem) { throw InputError({.field = "block"}, problem); }

// Returns the event of this pass, or the micro-step's last event if it has none of this pass.
int event_of(const StepPlan& plan, MicroStepId m, Pass pass) {
  int found = 0;
  for (int e = 0; e < plan.num_events(); ++e) {
    const auto at = static_cast<std::size_t>(e);
    if (plan.event_micro_step[at] == m) found = e;
    if (plan.event_micro_step[at] == m && plan.event_pass[at] == pass) break;
  }
  return found;
}

auto header_of(const StepPlan& p) {
  return std::tuple(p.policy, p.residency, p.guest_slots, p.in_flight, p.homes_digest, p.num_slots());
}

}  // namespace

void GrowingPlan::expect_next(const StepPlan& block) const {
  const int first = appended_;
  const int micro_steps = block.num_micro_steps();
  if (block.residency != Residency::kShared && micro_steps != num_micro_steps()) {
    refuse("covers only some micro-steps, whose guests depend on the others");
  }
  if (first + micro_steps > num_micro_steps()) refuse(fmt::format("ends after micro-step {}", num_micro_steps() - 1));
  const Array<Tokens, 4>& load = input_.load.load;
  const std::size_t cells = load.size() / load.extent(0);  // of a micro-step
  const auto counts =
      load.flat().subspan(static_cast<std::size_t>(first) * cells, static_cast<std::size_t>(micro_steps) * cells);
  const std::array shape{block.slot_expert.extent(1), block.slot_expert.extent(2), block.home.extent(1)};
  if (block.load_digest != sha256_hex(std::as_bytes(counts)) || block.ranks_per_node != input_.load.ranks_per_node ||
      shape != std::array{load.extent(1), load.extent(2), load.extent(3)}) {
    refuse(fmt::format("is not a plan of the load from micro-step {} on", first));
  }
  const std::array pairs{static_cast<std::size_t>(micro_steps), load.extent(1)};
  if (block.max_load.shape() != pairs || block.lower_bound.shape() != pairs ||
      (first > 0 && (header_of(block) != header_of(plan_) || block.options != options_ || block.home != plan_.home))) {
    refuse(
        "does not continue the blocks before it: it has other homes, slots or options, or does not record max_load and "
        "lower_bound");
  }
}

void GrowingPlan::append(const StepPlan& block) {
  const std::lock_guard lock(mutex_);
  expect_next(block);
  const int first = appended_;
  if (first == 0) {
    options_ = block.options;
    plan_ = empty_plan({.policy = block.policy,
                        .residency = block.residency,
                        .guest_slots = block.guest_slots,
                        .in_flight = block.in_flight,
                        .options = block.options,
                        .homes_digest = block.homes_digest},
                       input_.load);
    plan_.home = block.home;
    record_input_options(input_, plan_);
  }
  for (int e = 0; e < plan_.num_events(); ++e) {
    const auto at = static_cast<std::size_t>(e);
    const int m = plan_.event_micro_step[at].value - first;
    if (m < 0 || m >= block.num_micro_steps()) continue;
    const int from = event_of(block, MicroStepId{m}, plan_.event_pass[at]);
    std::ranges::copy(block.slot_expert[from].flat(), plan_.slot_expert[e].flat().begin());
    std::ranges::copy(block.slot_tokens[from].flat(), plan_.slot_tokens[e].flat().begin());
  }
  for (int m = 0; m < block.num_micro_steps(); ++m) {
    std::ranges::copy(block.max_load.row(m), plan_.max_load.row(first + m).begin());
    std::ranges::copy(block.lower_bound.row(m), plan_.lower_bound.row(first + m).begin());
  }
  appended_ = first + block.num_micro_steps();
  changed_.notify_all();
}

void GrowingPlan::fail(const std::string& why) {
  const std::lock_guard lock(mutex_);
  failure_ = why;
  changed_.notify_all();
}

bool GrowingPlan::wait_for(MicroStepId m, std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  const auto is_decided = [&] { return appended_ > m.value || !failure_.empty(); };
  if (!changed_.wait_for(lock, most, is_decided)) return false;
  if (appended_ <= m.value) throw std::runtime_error(failure_);
  return true;
}

}  // namespace foremoe
