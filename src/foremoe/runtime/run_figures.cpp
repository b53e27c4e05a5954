#include "foremoe/runtime/run_figures.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace foremoe {

Spread imbalance(ArrayView<const std::int64_t, 2> rows) {
  std::vector<double> samples;
  for (std::size_t t = 0; t < rows.extent(0); ++t) {
    const std::span<const std::int64_t> of_turn = rows.row(t);
    const auto total = std::accumulate(of_turn.begin(), of_turn.end(), std::int64_t{0});
    if (total == 0) continue;
    samples.push_back(static_cast<double>(std::ranges::max(of_turn)) * static_cast<double>(of_turn.size()) /
                      static_cast<double>(total));
  }
  if (samples.empty()) return {.mean = 1, .p99 = 1, .max = 1};
  std::ranges::sort(samples);
  const auto n = samples.size();
  const double at = 0.99 * static_cast<double>(n - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = std::min(below + 1, n - 1);
  return {.mean = std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(n),
          .p99 = samples[below] + (at - static_cast<double>(below)) * (samples[above] - samples[below]),
          .max = samples.back()};
}

Array<std::int64_t, 2> planned_rows(const StepPlan& plan, const TurnOrder& order) {
  Array<std::int64_t, 2> rows({order.turns.size(), static_cast<std::size_t>(plan.num_ranks())});
  for (std::size_t t = 0; t < order.turns.size(); ++t) {
    const Turn& turn = order.turns[t];
    for (int r = 0; r < plan.num_ranks(); ++r) {
      for (const Tokens quota : plan.slot_tokens.row(turn.event, turn.layer, r)) rows(t, r) += quota.value;
    }
  }
  return rows;
}

double critical_path_seconds(const TurnTable& turns) {
  double seconds = 0;
  for (std::size_t t = 0; t < turns.compute_seconds.extent(0); ++t) {
    seconds += std::ranges::max(turns.compute_seconds.row(t));
  }
  return seconds;
}

std::int64_t critical_path_rows(const TurnTable& turns) {
  std::int64_t rows = 0;
  for (std::size_t t = 0; t < turns.rows.extent(0); ++t) rows += std::ranges::max(turns.rows.row(t));
  return rows;
}

double compute_seconds_total(const TurnTable& turns) {
  const auto all = turns.compute_seconds.flat();
  return std::accumulate(all.begin(), all.end(), 0.0);
}

}  // namespace foremoe
