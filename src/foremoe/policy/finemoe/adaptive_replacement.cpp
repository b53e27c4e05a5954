#include "foremoe/policy/finemoe/adaptive_replacement.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numeric>

namespace foremoe::finemoe {

bool needs_replacement(ArrayView<const ExpertId, 2> placement, std::span<const std::int64_t> predicted_load,
                       double threshold) {
  const auto total =
      static_cast<double>(std::accumulate(predicted_load.begin(), predicted_load.end(), std::int64_t{0}));
  const double mean = total / static_cast<double>(placement.extent(0));
  return static_cast<double>(largest_density(placement, predicted_load)) > std::ceil(threshold * mean);
}

Array<ExpertId, 3> replace_adaptively(const ReplacementProblem& problem, const ReplacementOptions& options,
                                      Random& random) {
  assert(options.interval >= 1 && options.window >= 1);
  const std::size_t num_micro_steps = problem.load.extent(0);
  Array<ExpertId, 3> placements({num_micro_steps, static_cast<std::size_t>(problem.shape.num_ranks),
                                 static_cast<std::size_t>(problem.shape.slots_per_rank)});
  Array<ExpertId, 2> current({placements.extent(1), placements.extent(2)});
  std::ranges::copy(problem.initial.flat(), current.flat().begin());
  std::vector<std::int64_t> predicted(problem.predicted_load.begin(), problem.predicted_load.end());
  for (std::size_t m = 0; m < num_micro_steps; ++m) {
    if (m > 0 && m % static_cast<std::size_t>(options.interval) == 0) {
      std::ranges::fill(predicted, 0);  // sums in place of averages: the unit does not matter
      for (std::size_t seen = m - std::min(m, static_cast<std::size_t>(options.window)); seen < m; ++seen) {
        std::ranges::transform(predicted, problem.load.row(seen), predicted.begin(), std::plus<>{});
      }
    }
    const bool is_time = m % static_cast<std::size_t>(options.interval) == 0;
    const bool is_placed = m > 0 || problem.initial.size() > 0;
    if (is_time && !(is_placed && !needs_replacement(current, predicted, options.threshold))) {
      current = asymmetric_placement(predicted, problem.shape, random, options.num_samples);
    }
    std::ranges::copy(current.flat(), placements.view()[m].flat().begin());
  }
  return placements;
}

}  // namespace foremoe::finemoe
