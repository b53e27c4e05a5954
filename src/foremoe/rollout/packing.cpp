#include "foremoe/rollout/packing.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/rollout/count_routes.h"
#include "foremoe/rollout/file_kind.h"

namespace foremoe {

namespace {

constexpr double kUnitsPerOne = 0x1p40;  // of the objective

// Returns part ÷ whole in units of the objective; 0 of nothing.
std::int64_t to_units(double part, double whole) { return whole > 0 ? std::llround(part / whole * kUnitsPerOne) : 0; }

// Tokens of each sequence per layer and expert: [sequence][layer * experts + expert].
Array<float, 2> count_sequences(const RoutingTrace& trace, ThreadPool& pool) {
  const RouteShape shape = shape_of(trace);
  const auto experts = static_cast<std::size_t>(trace.num_experts);
  Array<float, 2> tokens(
      {static_cast<std::size_t>(trace.num_sequences()), static_cast<std::size_t>(trace.num_layers) * experts});
  struct Scratch {
    RouteCounter counter;
    std::vector<std::int64_t> counts;  // [layer * experts + expert]
  };
  std::vector<std::unique_ptr<Scratch>> scratch(pool.num_threads());
  std::atomic<bool> malformed = false;
  pool.for_each_index(tokens.extent(0), [&](std::size_t s, std::size_t worker) {
    if (!scratch[worker]) scratch[worker] = std::make_unique<Scratch>(Scratch{.counter = RouteCounter(shape)});
    auto& [counter, counts] = *scratch[worker];
    counts.assign(tokens.extent(1), 0);
    const std::byte* const routes = trace.routes + static_cast<std::size_t>(trace.cu_seqlens[s]) * shape.token_bytes();
    if (!counter.count(routes, trace.sequence_length(static_cast<int>(s)), counts.data(), experts)) malformed = true;
    std::ranges::transform(counts, tokens.row(s).begin(), [](std::int64_t n) { return static_cast<float>(n); });
  });
  if (malformed) refuse_routes(trace);  // throws for the first malformed row in file order
  return tokens;
}

// Subtracts from each sequence's tokens what they would be with the step's profile.
void subtract_profile(Array<float, 2>& tokens, int num_layers, ThreadPool& pool) {
  const std::size_t experts = tokens.extent(1) / static_cast<std::size_t>(num_layers);
  pool.for_each_index(static_cast<std::size_t>(num_layers), [&](std::size_t l, std::size_t) {
    const auto of_sequence = [&](std::size_t s) { return tokens.row(s).subspan(l * experts, experts); };
    std::vector<double> step(experts, 0);
    for (std::size_t s = 0; s < tokens.extent(0); ++s) {
      std::ranges::transform(step, of_sequence(s), step.begin(), std::plus<>{});
    }
    const double total = std::accumulate(step.begin(), step.end(), 0.0);
    if (total == 0) return;
    for (std::size_t s = 0; s < tokens.extent(0); ++s) {
      const std::span<float> own = of_sequence(s);
      const double share = std::accumulate(own.begin(), own.end(), 0.0) / total;
      for (std::size_t e = 0; e < experts; ++e) own[e] -= static_cast<float>(share * step[e]);
    }
  });
}

// The order of additions is fixed, and allows vector instructions.
double inner_product(std::span<const float> a, std::span<const float> b) {
  std::array<float, 16> sums{};
  const std::size_t whole = a.size() / sums.size() * sums.size();
  for (std::size_t i = 0; i < whole; i += sums.size()) {
    for (std::size_t lane = 0; lane < sums.size(); ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (std::size_t i = whole; i < a.size(); ++i) sums[i - whole] += a[i] * b[i];
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// One mini-batch. Costs are in units of the objective.
struct MiniBatch {
  std::vector<std::int64_t> lengths;  // [sequence], tokens
  std::vector<std::int64_t> dense;    // [sequence], dense_work()
  Array<std::int64_t, 2> product;     // [sequence][sequence], of deviations
};

class LocalSearch {
 public:
  LocalSearch(const MiniBatch& given, std::int64_t tokens_per_rank, Batching start)
      : given_(given),
        num_sequences_(given.lengths.size()),
        tokens_per_rank_(tokens_per_rank),
        batching_(std::move(start)),
        cells_({static_cast<std::size_t>(batching_.num_micro_steps), static_cast<std::size_t>(batching_.num_ranks)}),
        pull_({cells_.extent(0), num_sequences_}),
        busiest_(cells_.extent(0)) {
    for (std::size_t s = 0; s < num_sequences_; ++s) place(s, batching_.micro_step[s], batching_.rank[s]);
    for (std::size_t m = 0; m < cells_.extent(0); ++m) find_busiest(MicroStepId{m});
    objective_ = full_objective();
  }

  // Returns whether a change improved the packing.
  bool sweep() {
    bool improved = false;
    for (std::size_t s = 0; s < num_sequences_; ++s) {
      const Change best = best_change(s);
      if (best.gain == 0) continue;
      apply(s, best);
      improved = true;
    }
    return improved;
  }

  const Batching& batching() const { return batching_; }
  std::int64_t objective() const { return objective_; }

 private:
  struct Cell {
    std::int64_t tokens = 0;
    std::int64_t dense = 0;
    int num_sequences = 0;
  };
  struct BusyRank {
    std::int64_t dense = 0;
    RankId rank{-1};
  };
  // A sequence goes to (micro_step, rank), and the partner, if any, comes from there.
  struct Change {
    std::int64_t gain = 0;  // decrease of the objective
    MicroStepId micro_step;
    RankId rank;
    std::optional<std::size_t> partner;
  };

  Change best_change(std::size_t s) const {
    Change best;
    const MicroStepId from = batching_.micro_step[s];
    const RankId rank = batching_.rank[s];
    for (std::size_t t = 0; t < num_sequences_; ++t) {
      const MicroStepId to = batching_.micro_step[t];
      const RankId to_rank = batching_.rank[t];
      if (from == to && rank == to_rank) continue;
      const std::int64_t more = given_.lengths[t] - given_.lengths[s];
      if (cells_(from, rank).tokens + more > tokens_per_rank_) continue;
      if (cells_(to, to_rank).tokens - more > tokens_per_rank_) continue;
      const std::int64_t gain = profile_gain(s, to) + profile_gain(t, from) +
                                (from == to ? 0 : 4 * given_.product(s, t)) +
                                dense_gain(s, to, to_rank, given_.dense[s] - given_.dense[t]);
      if (gain > best.gain) best = {.gain = gain, .micro_step = to, .rank = to_rank, .partner = t};
    }
    if (cells_(from, rank).num_sequences == 1) return best;
    for (std::size_t m = 0; m < cells_.extent(0); ++m) {
      const MicroStepId to{m};
      const std::int64_t gain_of_profile = profile_gain(s, to);
      for (std::size_t r = 0; r < cells_.extent(1); ++r) {
        const RankId to_rank{r};
        if (from == to && rank == to_rank) continue;
        if (cells_(to, to_rank).tokens + given_.lengths[s] > tokens_per_rank_) continue;
        const std::int64_t gain = gain_of_profile + dense_gain(s, to, to_rank, given_.dense[s]);
        if (gain > best.gain) best = {.gain = gain, .micro_step = to, .rank = to_rank, .partner = {}};
      }
    }
    return best;
  }

  // |d_from|² + |d_to|² before minus after moving a sequence to another micro-step.
  std::int64_t profile_gain(std::size_t s, MicroStepId to) const {
    const MicroStepId from = batching_.micro_step[s];
    return from == to ? 0 : 2 * (pull_(from, s) - pull_(to, s) - given_.product(s, s));
  }

  // Decrease of the dense term if `moved` goes from the cell of s to (to, to_rank).
  std::int64_t dense_gain(std::size_t s, MicroStepId to, RankId to_rank, std::int64_t moved) const {
    const MicroStepId from = batching_.micro_step[s];
    const RankId rank = batching_.rank[s];
    const std::int64_t left = cells_(from, rank).dense - moved;
    const std::int64_t there = cells_(to, to_rank).dense + moved;
    if (from == to) return largest(from) - std::max({left, there, largest_except(from, rank, to_rank)});
    return largest(from) - std::max(left, largest_except(from, rank, rank)) + largest(to) -
           std::max(there, largest_except(to, to_rank, to_rank));
  }

  std::int64_t largest(MicroStepId m) const { return busiest_[m.index()][0].dense; }
  std::int64_t largest_except(MicroStepId m, RankId a, RankId b) const {
    for (const BusyRank& busy : busiest_[m.index()]) {
      if (busy.rank != a && busy.rank != b) return busy.dense;
    }
    return 0;  // there is no other rank
  }

  void apply(std::size_t s, const Change& change) {
    const MicroStepId from = batching_.micro_step[s];
    const RankId rank = batching_.rank[s];
    remove(s);
    if (change.partner) {
      remove(*change.partner);
      place(*change.partner, from, rank);
    }
    place(s, change.micro_step, change.rank);
    find_busiest(from);
    find_busiest(change.micro_step);
    objective_ -= change.gain;
    assert(objective_ == full_objective());
  }

  void place(std::size_t s, MicroStepId m, RankId r) {
    batching_.micro_step[s] = m;
    batching_.rank[s] = r;
    add(s, 1);
  }
  void remove(std::size_t s) { add(s, -1); }
  void add(std::size_t s, int sign) {
    const MicroStepId m = batching_.micro_step[s];
    Cell& cell = cells_(m, batching_.rank[s]);
    cell.tokens += sign * given_.lengths[s];
    cell.dense += sign * given_.dense[s];
    cell.num_sequences += sign;
    const std::span<std::int64_t> pull = pull_.row(m);
    const std::span<const std::int64_t> product = given_.product.row(s);
    for (std::size_t t = 0; t < num_sequences_; ++t) pull[t] += sign * product[t];
  }

  void find_busiest(MicroStepId m) {
    std::array<BusyRank, 3> busiest;
    for (std::size_t r = 0; r < cells_.extent(1); ++r) {
      BusyRank next{.dense = cells_(m, r).dense, .rank = RankId{r}};
      for (BusyRank& busy : busiest) {
        if (busy.rank == RankId{-1} || busy.dense < next.dense) std::swap(busy, next);
      }
    }
    busiest_[m.index()] = busiest;
  }

  std::int64_t full_objective() const {
    std::int64_t sum = 0;
    for (std::size_t s = 0; s < num_sequences_; ++s) sum += pull_(batching_.micro_step[s], s);
    for (std::size_t m = 0; m < cells_.extent(0); ++m) sum += largest(MicroStepId{m});
    return sum;
  }

  const MiniBatch& given_;
  std::size_t num_sequences_;
  std::int64_t tokens_per_rank_;
  Batching batching_;
  Array<Cell, 2> cells_;                          // [micro_step][rank]
  Array<std::int64_t, 2> pull_;                   // [micro_step][sequence], inner product of the deviations of both
  std::vector<std::array<BusyRank, 3>> busiest_;  // [micro_step], descending; an exchange excludes up to two ranks
  std::int64_t objective_ = 0;
};

void check(const RoutingTrace& trace, const PackingOptions& options) {
  if (options.num_ranks > 0 && trace.num_experts % options.num_ranks != 0) {
    throw InputError({.file = trace.name}, fmt::format("{} experts cannot be divided evenly among {} ranks (`ranks`)",
                                                       trace.num_experts, options.num_ranks));
  }
  if (options.num_mini_batches < 1 || options.num_mini_batches > trace.num_sequences()) {
    throw InputError({.field = "mini_batches"}, fmt::format("{}; must be from 1 to the number of sequences, {}",
                                                            options.num_mini_batches, trace.num_sequences()));
  }
}

// Returns the sequences of each mini-batch, ascending.
std::vector<std::vector<std::size_t>> mini_batches_of(const RoutingTrace& trace, int num_mini_batches) {
  const auto k = static_cast<std::size_t>(num_mini_batches);
  const auto n = static_cast<std::size_t>(trace.num_sequences());
  std::size_t micro_steps = 0;
  if (trace.has_batching()) {
    micro_steps = static_cast<std::size_t>(std::ranges::max(trace.micro_step)) + 1;
    if (micro_steps % k != 0) {
      throw InputError({.field = "mini_batches"},
                       fmt::format("{} does not divide the {} micro-steps recorded in {}", k, micro_steps, trace.name));
    }
  }
  std::vector<std::vector<std::size_t>> result(k);
  for (std::size_t s = 0; s < n; ++s) {
    result[trace.has_batching() ? static_cast<std::size_t>(trace.micro_step[s]) / (micro_steps / k) : s * k / n]
        .push_back(s);
  }
  for (const auto& sequences : result) {
    if (sequences.size() > kMaxSequencesPerMiniBatch) {
      throw InputError({.field = "mini_batches"}, fmt::format("a mini-batch has {} sequences; at most {} are possible",
                                                              sequences.size(), kMaxSequencesPerMiniBatch));
    }
  }
  return result;
}

}  // namespace

std::vector<Option> options_of(PackingOptions& o) {
  return {integer_option({.name = "ranks",
                          .value = "R",
                          .help = "Ranks of the expert-parallel group; must divide the experts",
                          .main = true,
                          .required = true},
                         o.num_ranks, {1, kMaxRanks}),
          integer_option({.name = "tokens_per_rank",
                          .value = "N",
                          .help = "Maximum tokens per rank and micro-step. A token counts once",
                          .main = true,
                          .required = true},
                         o.tokens_per_rank, {1, kMaxTokensPerLayer}),
          integer_option({.name = "mini_batches",
                          .value = "K",
                          .help = "Number of mini-batches: equal runs of recorded micro-steps, or of sequences if none "
                                  "are recorded. No sequence leaves its mini-batch",
                          .main = true},
                         o.num_mini_batches, {1, kUnlimited}),
          integer_option({.name = "effort",
                          .value = "N",
                          .help = "Maximum number of sweeps that try to move and exchange every sequence",
                          .initial = "0: until no change improves",
                          .main = true},
                         o.effort, {0, kUnlimited})};
}

Packing pack(const RoutingTrace& trace, const PackingOptions& options, ThreadPool& pool) {
  expect_valid(trace);
  const auto num_sequences = static_cast<std::size_t>(trace.num_sequences());
  std::vector<std::int64_t> lengths;  // [sequence], tokens
  for (std::size_t s = 0; s < num_sequences; ++s) lengths.push_back(trace.sequence_length(static_cast<int>(s)));
  check(trace, options);
  const BatchingOptions limits{.num_ranks = options.num_ranks,
                               .ranks_per_node = trace.ranks == options.num_ranks ? trace.ranks_per_node : 0,
                               .tokens_per_rank = options.tokens_per_rank};
  expect_fit(lengths, limits, trace.name);
  const std::vector<std::vector<std::size_t>> mini_batches = mini_batches_of(trace, options.num_mini_batches);

  Array<float, 2> deviation = count_sequences(trace, pool);
  subtract_profile(deviation, trace.num_layers, pool);
  double deviations = 0;  // Σ |d_s|²
  double dense = 0;       // Σ over micro-steps of the mean over ranks of Σ dense_work()
  for (std::size_t s = 0; s < num_sequences; ++s) {
    deviations += inner_product(deviation.row(s), deviation.row(s));
    dense += dense_work(lengths[s]) / options.num_ranks;
  }

  Packing result;
  Batching& batching = result.batching;
  batching.micro_step.resize(num_sequences);
  batching.rank.resize(num_sequences);
  std::int64_t objective = 0;
  for (const std::vector<std::size_t>& sequences : mini_batches) {
    const std::size_t n = sequences.size();
    MiniBatch mini_batch{.product = Array<std::int64_t, 2>({n, n})};
    for (const std::size_t s : sequences) {
      mini_batch.lengths.push_back(lengths[s]);
      mini_batch.dense.push_back(to_units(dense_work(lengths[s]), dense));
    }
    pool.for_each_index(n, [&](std::size_t i, std::size_t) {
      for (std::size_t j = 0; j <= i; ++j) {  // writes (j, i) for the task of j, which does not
        const double product = inner_product(deviation.row(sequences[i]), deviation.row(sequences[j]));
        mini_batch.product(i, j) = mini_batch.product(j, i) = to_units(product, deviations);
      }
    });
    LocalSearch search(mini_batch, options.tokens_per_rank, balanced_batching(mini_batch.lengths, limits, trace.name));
    for (int sweep = 0; options.effort == 0 || sweep < options.effort; ++sweep) {
      if (!search.sweep()) break;
    }
    const Batching& packed = search.batching();
    for (std::size_t i = 0; i < n; ++i) {
      batching.micro_step[sequences[i]] = MicroStepId{batching.num_micro_steps + packed.micro_step[i].value};
      batching.rank[sequences[i]] = packed.rank[i];
    }
    batching.num_micro_steps += packed.num_micro_steps;
    batching.num_ranks = packed.num_ranks;
    batching.ranks_per_node = packed.ranks_per_node;
    result.micro_steps.push_back(packed.num_micro_steps);
    objective += search.objective();
  }
  result.objective = static_cast<double>(objective) / kUnitsPerOne;
  return result;
}

}  // namespace foremoe
