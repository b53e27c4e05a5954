#include "foremoe/rollout/load_statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "foremoe/core/error.h"

namespace foremoe {

namespace {

std::int64_t sum(std::span<const std::int64_t> values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

double mean(std::span<const std::int64_t> values) {
  return static_cast<double>(sum(values)) / static_cast<double>(values.size());
}

// Rank loads with all experts at home: [rank].
std::vector<std::int64_t> rank_loads(std::span<const std::int64_t> expert_loads, std::span<const RankId> home,
                                     int num_ranks) {
  std::vector<std::int64_t> loads(static_cast<std::size_t>(num_ranks), 0);
  for (std::size_t e = 0; e < expert_loads.size(); ++e) loads[home[e].index()] += expert_loads[e];
  return loads;
}

// Expert loads of every micro-step of a layer: [micro_step][expert].
Array<std::int64_t, 2> expert_loads_of(const LoadTable& table, LayerId layer) {
  Array<std::int64_t, 2> loads({table.load.extent(0), table.load.extent(3)});
  for (std::size_t m = 0; m < loads.extent(0); ++m) table.expert_loads(MicroStepId{m}, layer, loads.row(m));
  return loads;
}

double fluctuation(const Array<std::int64_t, 2>& loads) {
  const std::size_t experts = loads.extent(1);
  std::vector<double> first(experts, 0);   // sums of shares
  std::vector<double> second(experts, 0);  // sums of squared shares
  double micro_steps = 0;
  for (std::size_t m = 0; m < loads.extent(0); ++m) {
    const auto total = static_cast<double>(sum(loads.row(m)));
    if (total == 0) continue;
    ++micro_steps;
    for (std::size_t e = 0; e < experts; ++e) {
      const double share = static_cast<double>(loads(m, e)) / total;
      first[e] += share;
      second[e] += share * share;
    }
  }
  double result = 0;
  double chosen = 0;  // number of chosen experts
  for (std::size_t e = 0; e < experts; ++e) {
    if (first[e] == 0) continue;
    ++chosen;
    const double average = first[e] / micro_steps;
    const double variance = second[e] / micro_steps - average * average;
    result += std::sqrt(std::max(0.0, variance)) / average;
  }
  return chosen == 0 ? 0 : result / chosen;
}

LayerStatistics statistics(const LoadTable& table, LayerId layer, std::span<const RankId> home) {
  const Array<std::int64_t, 2> loads = expert_loads_of(table, layer);
  const auto experts = static_cast<std::size_t>(table.experts_in(layer));
  std::vector<std::int64_t> step(loads.extent(1), 0);
  LayerStatistics result;
  double loaded = 0;  // number of micro-steps with load
  double ratio_sum = 0;
  for (std::size_t m = 0; m < loads.extent(0); ++m) {
    const std::span<const std::int64_t> row = loads.row(m);
    if (sum(row) == 0) continue;
    for (std::size_t e = 0; e < row.size(); ++e) step[e] += row[e];
    ++loaded;
    const LoadViolation v = load_violation(row.first(experts));
    result.mean_micro_step.max_vio += v.max_vio;
    result.mean_micro_step.min_vio += v.min_vio;
    result.mean_micro_step.avg_vio += v.avg_vio;
    result.worst_micro_step.max_vio = std::max(result.worst_micro_step.max_vio, v.max_vio);
    result.worst_micro_step.min_vio = std::min(result.worst_micro_step.min_vio, v.min_vio);
    result.worst_micro_step.avg_vio = std::max(result.worst_micro_step.avg_vio, v.avg_vio);
    const double ratio = imbalance_ratio(rank_loads(row, home, table.num_ranks()));
    ratio_sum += ratio;
    result.max_ratio = std::max(result.max_ratio, ratio);
  }
  if (loaded == 0) return result;
  result.mean_micro_step.max_vio /= loaded;
  result.mean_micro_step.min_vio /= loaded;
  result.mean_micro_step.avg_vio /= loaded;
  result.mean_ratio = ratio_sum / loaded;
  result.step = load_violation(std::span(step).first(experts));
  result.step_ratio = imbalance_ratio(rank_loads(step, home, table.num_ranks()));
  result.fluctuation = fluctuation(loads);
  return result;
}

}  // namespace

std::int64_t num_assignments(const LoadTable& table) {
  std::int64_t sum = 0;
  for (const Tokens tokens : table.load.flat()) sum += tokens.value;
  return sum;
}

Tokens mean_tokens_per_rank(const LoadTable& table) {
  const std::int64_t batches = std::int64_t{1} * table.num_micro_steps() * table.num_ranks();
  if (batches == 0 || table.num_layers() == 0) return Tokens{};
  if (table.tokens.size() > 0) {
    std::int64_t tokens = 0;
    for (const Tokens of_rank : table.tokens.flat()) tokens += of_rank.value;
    return Tokens{tokens / batches};
  }
  std::int64_t top_k = 0;  // of all layers
  for (int l = 0; l < table.num_layers(); ++l) top_k += table.top_k_in(LayerId{l});
  return Tokens{num_assignments(table) / (batches * top_k)};
}

LoadViolation load_violation(std::span<const std::int64_t> expert_loads) {
  if (expert_loads.empty() || sum(expert_loads) == 0) return {};
  const double average = mean(expert_loads);
  const auto [least, most] = std::ranges::minmax(expert_loads);
  double distance = 0;
  for (const std::int64_t load : expert_loads) distance += std::abs(static_cast<double>(load) / average - 1);
  return {.max_vio = static_cast<double>(most) / average - 1,
          .min_vio = static_cast<double>(least) / average - 1,
          .avg_vio = distance / static_cast<double>(expert_loads.size())};
}

double imbalance_ratio(std::span<const std::int64_t> rank_loads) {
  if (rank_loads.empty() || sum(rank_loads) == 0) return 1;
  return static_cast<double>(std::ranges::max(rank_loads)) / mean(rank_loads);
}

static void expect_homes_of(const LoadTable& table, ArrayView<const RankId, 2> home) {
  const std::array shape{table.load.extent(1), table.load.extent(3)};
  const auto is_rank = [&](RankId r) { return r.index() < table.load.extent(2); };
  if (home.shape() == shape && std::ranges::all_of(home.flat(), is_rank)) return;
  throw InputError({.field = "homes"}, "are not ranks of the load, [layers, experts]");
}

std::vector<LayerStatistics> layer_statistics(const LoadTable& table, ArrayView<const RankId, 2> home) {
  expect_homes_of(table, home);
  std::vector<LayerStatistics> result;
  for (int l = 0; l < table.num_layers(); ++l) result.push_back(statistics(table, LayerId{l}, home.row(l)));
  return result;
}

ExpertHeat expert_heat(const LoadTable& table) {
  const std::size_t experts = table.load.extent(3);
  ExpertHeat heat{.step = Array<double, 2>({table.load.extent(1), experts}),
                  .steady = Array<double, 2>({table.load.extent(1), experts})};
  for (int l = 0; l < table.num_layers(); ++l) {
    const Array<std::int64_t, 2> loads = expert_loads_of(table, LayerId{l});
    std::vector<std::int64_t> step(experts, 0);
    std::vector<std::vector<double>> ratios(experts);  // [expert][micro-step with load]
    for (std::size_t m = 0; m < loads.extent(0); ++m) {
      if (sum(loads.row(m)) == 0) continue;
      const double average = mean(loads.row(m));
      for (std::size_t e = 0; e < experts; ++e) {
        step[e] += loads(m, e);
        ratios[e].push_back(static_cast<double>(loads(m, e)) / average);
      }
    }
    for (std::size_t e = 0; e < experts && !ratios[e].empty(); ++e) {
      const auto quartile = ratios[e].begin() + std::ssize(ratios[e]) / 4;
      std::ranges::nth_element(ratios[e], quartile);
      heat.step(l, e) = static_cast<double>(step[e]) / mean(step);
      heat.steady(l, e) = *quartile;
    }
  }
  return heat;
}

Array<double, 2> imbalance_ratios(const LoadTable& table, ArrayView<const RankId, 2> home) {
  expect_homes_of(table, home);
  Array<double, 2> ratios({table.load.extent(0), table.load.extent(1)}, 1);
  std::vector<std::int64_t> loads(table.load.extent(3));
  for (int m = 0; m < table.num_micro_steps(); ++m) {
    for (int l = 0; l < table.num_layers(); ++l) {
      table.expert_loads(MicroStepId{m}, LayerId{l}, loads);
      ratios(m, l) = imbalance_ratio(rank_loads(loads, home.row(l), table.num_ranks()));
    }
  }
  return ratios;
}

}  // namespace foremoe
