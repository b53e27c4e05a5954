#pragma once

// The critical path of a run: Σ over turns of the time that the slowest rank's experts take, since all others wait.
//
// Problem. Timings are noisy, and noise only adds. Where all ranks have the same work, the largest of R noisy times is
// the one that was disturbed most; where one rank has most work, it is always that rank. So the largest time is too
// long in a balanced turn and not in an unbalanced one, and a ratio of the two shows too little gain.
//
// Method. Of every (turn, rank) take the least time of all repeats. For each pass fit
//   seconds = per_call·calls + per_row·rows
// over all turns and ranks, by least absolute deviations (iteratively reweighted least squares), with both ≥ 0. The
// path is the sum over turns of the largest fitted time. The fit sees hundreds of timings where a maximum sees one.
//
// What it assumes: that calls and rows determine the time. A rank that is slower than others throughout is averaged
// away. The spread tells how far single repeats disagree.

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

// Zero when no timing has calls or rows.
ExpertCost fit_expert_cost(std::span<const ExpertTiming> timings);

struct CriticalPath {
  double seconds = 0;
  // (Longest − shortest) ÷ 2 of the paths fitted to one repeat each, ÷ seconds; 0 with one repeat.
  double spread = 0;
};
CriticalPath fitted_critical_path(const TurnTable& turns);

}  // namespace foremoe
