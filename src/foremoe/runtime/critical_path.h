#pragma once

// Critical path of a run: Σ over turns of the slowest rank's time in its experts, since all others wait for that rank.
//
// Problem. Timings are noisy, and noise only adds time. If all ranks have the same work, the largest of R noisy timings
// is the most disturbed one. If one rank has the most work, its timing is always the largest. Maxima are thus biased
// upwards in balanced turns but not in unbalanced turns, so the ratio of both understates the gain of balancing.
//
// Method. For every (turn, rank), take the least time over all repeats. For each pass, fit
//   seconds = per_call·calls + per_row·rows
// over all turns and ranks by least absolute deviations (iteratively reweighted least squares), with both costs ≥ 0.
// The path is the sum over turns of the largest fitted time. The fit uses hundreds of timings; a maximum uses only one.
//
// Assumption. Calls and rows determine the time, so the fit averages out a rank that is consistently slower than
// others. The spread measures the disagreement between single repeats.

#include <cstdint>
#include <span>

#include "foremoe/runtime/run_result.h"

namespace foremoe {

struct ExpertTiming {
  double seconds = 0;
  std::int64_t calls = 0;  // experts that had rows
  std::int64_t rows = 0;
};

struct ExpertCost {  // seconds
  double per_call = 0;
  double per_row = 0;

  double of(std::int64_t calls, std::int64_t rows) const {
    return per_call * static_cast<double>(calls) + per_row * static_cast<double>(rows);
  }
};

// Returns zero costs if no timing has calls or rows.
ExpertCost fit_expert_cost(std::span<const ExpertTiming> timings);

struct CriticalPath {
  double seconds = 0;
  // Half the range of the paths fitted to single repeats, relative to `seconds`; 0 with one repeat.
  double spread = 0;
};
CriticalPath fitted_critical_path(const TurnTable& turns);

}  // namespace foremoe
