#include "foremoe/sim/choose_residency.h"

#include <algorithm>
#include <cassert>
#include <tuple>

namespace foremoe {

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
