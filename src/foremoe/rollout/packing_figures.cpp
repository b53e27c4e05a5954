#include <algorithm>
#include <numeric>
#include <span>

#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/rollout/packing.h"

namespace foremoe {

PackingFigures packing_figures(const BatchedTrace& batched, ArrayView<const RankId, 2> home, ThreadPool& pool) {
  const auto& [trace, batching] = batched;
  const LoadTable load = collect(trace, batching, pool);
  const Array<double, 2> rho = imbalance_ratios(load, home);
  PackingFigures figures;
  double sum = 0;
  double pairs = 0;
  for (std::size_t m = 0; m < rho.extent(0); ++m) {
    for (std::size_t l = 0; l < rho.extent(1); ++l) {
      if (std::ranges::all_of(load.load[m][l].flat(), [](Tokens t) { return t == Tokens{0}; })) continue;
      sum += rho(m, l);
      ++pairs;
      figures.rho_max = std::max(figures.rho_max, rho(m, l));
    }
  }
  if (pairs > 0) figures.rho_mean = sum / pairs;

  const auto spread_of = [](const Array<double, 2>& work) {
    PackingFigures::Spread spread;
    for (std::size_t m = 0; m < work.extent(0); ++m) {
      const std::span<const double> ranks = work.row(m);
      spread.mean += std::accumulate(ranks.begin(), ranks.end(), 0.0) / static_cast<double>(ranks.size());
      spread.max += std::ranges::max(ranks);
    }
    return spread;
  };
  Array<double, 2> work = squared_lengths(batched);
  figures.attention = spread_of(work);
  for (std::size_t s = 0; s < batching.rank.size(); ++s) {
    const std::int64_t length = trace.sequence_length(static_cast<int>(s));
    work(batching.micro_step[s], batching.rank[s]) += static_cast<double>(kLinearLength * length);
  }
  figures.dense = spread_of(work);
  return figures;
}

}  // namespace foremoe
