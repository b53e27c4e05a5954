#include "foremoe/evaluate/memory_budget.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <tuple>

namespace foremoe {

Tokens largest_micro_batch(const SimulatedStep& step, Bytes budget, Tokens mean_tokens_per_rank) {
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (const SimulatedPhase* phase : {&step.recompute, &step.policy_update}) {
    const RankMemory& memory = phase->memory;
    const std::int64_t left = budget.value - (memory.sum() - memory.activations).value;
    if (left <= 0) return Tokens{0};
    if (memory.activations.value == 0) continue;
    const double times = static_cast<double>(left) / static_cast<double>(memory.activations.value);
    most = std::min(most, static_cast<std::int64_t>(times * static_cast<double>(mean_tokens_per_rank.value)));
  }
  return Tokens{most};
}

ResidencyChoice choose_residency(std::span<const ResidencyTrial> trials, std::optional<Bytes> budget) {
  assert(!trials.empty());
  const auto fits = [&](const ResidencyTrial& trial) { return !budget || trial.memory <= *budget; };
  const bool any = std::ranges::any_of(trials, fits);
  const auto before = [&](const ResidencyTrial& a, const ResidencyTrial& b) {
    if (any && fits(a) != fits(b)) return fits(a);
    return any ? std::tuple(a.step_seconds, a.memory) < std::tuple(b.step_seconds, b.memory) : a.memory < b.memory;
  };
  const auto best = std::ranges::min_element(trials, before);
  return {.trial = static_cast<std::size_t>(best - trials.begin()), .fits = any};
}

}  // namespace foremoe
