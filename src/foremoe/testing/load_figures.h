#pragma once

// Figures of loads, for tests of synthesis.

#include <algorithm>
#include <vector>

#include "foremoe/rollout/synthesis/synthesis.h"

namespace foremoe::testing {

// Returns each expert's tokens from all sources: [expert].
inline std::vector<std::int64_t> expert_loads(const LoadTable& table, int m, int l) {
  std::vector<std::int64_t> loads(static_cast<std::size_t>(table.num_experts()));
  for (int r = 0; r < table.num_ranks(); ++r) {
    for (int e = 0; e < table.num_experts(); ++e) loads[static_cast<std::size_t>(e)] += table.load(m, l, r, e).value;
  }
  return loads;
}

// Returns each rank's tokens if homes serve every expert: [rank].
inline std::vector<std::int64_t> home_loads(const LoadTable& table, int m, int l) {
  std::vector<std::int64_t> loads(static_cast<std::size_t>(table.num_ranks()));
  const auto experts = expert_loads(table, m, l);
  const std::size_t homes = experts.size() / loads.size();
  for (std::size_t e = 0; e < experts.size(); ++e) loads[e / homes] += experts[e];
  return loads;
}

inline std::int64_t sum(const std::vector<std::int64_t>& values) {
  std::int64_t total = 0;
  for (const std::int64_t value : values) total += value;
  return total;
}

inline std::int64_t largest(const std::vector<std::int64_t>& values) {
  return *std::max_element(values.begin(), values.end());
}

// Returns maximum ÷ mean.
inline double ratio(const std::vector<std::int64_t>& loads) {
  return static_cast<double>(largest(loads)) * static_cast<double>(loads.size()) / static_cast<double>(sum(loads));
}

inline double mean_rho(const LoadTable& table) {
  double total = 0;
  for (int m = 0; m < table.num_micro_steps(); ++m) {
    for (int l = 0; l < table.num_layers(); ++l) total += ratio(home_loads(table, m, l));
  }
  return total / table.num_micro_steps() / table.num_layers();
}

// Returns each rank's tokens in the whole step if homes serve every expert: [rank].
inline std::vector<std::int64_t> step_home_loads(const LoadTable& table, int l) {
  std::vector<std::int64_t> loads(static_cast<std::size_t>(table.num_ranks()));
  for (int m = 0; m < table.num_micro_steps(); ++m) {
    const auto of_step = home_loads(table, m, l);
    for (std::size_t r = 0; r < loads.size(); ++r) loads[r] += of_step[r];
  }
  return loads;
}

// Counts the load of a trace in its recorded batching.
inline LoadTable counted(const RoutingTrace& trace, int micro_steps) {
  LoadTable table;
  table.load = Array<Tokens, 4>({static_cast<std::size_t>(micro_steps), static_cast<std::size_t>(trace.num_layers),
                                 static_cast<std::size_t>(trace.ranks), static_cast<std::size_t>(trace.num_experts)});
  std::vector<ExpertId> row(static_cast<std::size_t>(trace.top_k));
  for (int s = 0; s < trace.num_sequences(); ++s) {
    const auto at = static_cast<std::size_t>(s);
    for (std::int64_t t = trace.cu_seqlens[at]; t < trace.cu_seqlens[at + 1]; ++t) {
      for (int l = 0; l < trace.num_layers; ++l) {
        trace.route(t, LayerId{l}, row);
        for (const ExpertId e : row) table.load(trace.micro_step[at], l, trace.rank[at], e) += Tokens{1};
      }
    }
  }
  return table;
}

}  // namespace foremoe::testing
