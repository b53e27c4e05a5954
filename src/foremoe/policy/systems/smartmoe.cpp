#include "foremoe/policy/systems/smartmoe.h"

#include <algorithm>
#include <cassert>
#include <numeric>

#include "foremoe/core/timeline.h"
#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

using RankOf = std::vector<int>;  // [expert], rank

std::int64_t largest_rank_load(const RankOf& rank_of, std::span<const std::int64_t> load, int num_ranks) {
  std::vector<std::int64_t> rank_load(num_ranks);
  for (std::size_t e = 0; e < load.size(); ++e) rank_load[rank_of[e]] += load[e];
  return std::ranges::max(rank_load);
}

// Returns the first candidate with the smallest maximum rank load.
const RankOf& best_of(const std::vector<RankOf>& candidates, std::span<const std::int64_t> load, int num_ranks) {
  return *std::ranges::min_element(
      candidates, {}, [&](const RankOf& candidate) { return largest_rank_load(candidate, load, num_ranks); });
}

// Builds the pool from the long-term load, [micro_step][expert], tokens.
std::vector<RankOf> make_pool(ArrayView<const std::int64_t, 2> load, const RankOf& home, int num_ranks, int num_parts) {
  std::vector<RankOf> pool = {home, smartmoe_placement(sum_over_micro_steps(load), home, num_ranks)};
  const std::size_t parts = std::min(static_cast<std::size_t>(num_parts), load.extent(0));
  for (std::size_t i = 0; parts > 1 && i < parts; ++i) {
    const std::size_t first = load.extent(0) * i / parts;
    const std::size_t end = load.extent(0) * (i + 1) / parts;
    pool.push_back(smartmoe_placement(sum_over_micro_steps(load, first, end - first), home, num_ranks));
  }
  return pool;
}

class SmartMoe final : public Policy {
 public:
  explicit SmartMoe(const SmartMoeOptions& options) : options_(options) {
    assert(options.period >= 1 && options.window >= 1 && options.pool_parts >= 1);
  }

  std::string_view name() const override { return "smartmoe"; }
  std::string_view summary() const override {
    return "SmartMoE: experts permuted occasionally by recent loads, without replicas";
  }
  bool plans_ahead(const PolicyInput& input) const override { return input.previous_load == nullptr; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const LoadTable* const former = former_load(input);
    const int num_ranks = input.load.num_ranks();
    std::vector<double> once(input.load.load.extent(1));  // [layer]
    const auto place = [&](LayerId layer, ArrayView<const std::int64_t, 2> load) {
      const double begin = thread_cpu_seconds();
      RankOf home;
      for (const RankId r : input.home.row(layer)) home.push_back(r.value);
      const Array<std::int64_t, 2> history = former ? layer_load(*former, layer) : Array<std::int64_t, 2>();
      const ArrayView<const std::int64_t, 2> long_term = former ? history.view() : load;
      const std::vector<RankOf> candidates = make_pool(long_term, home, num_ranks, options_.pool_parts);
      RankOf first = best_of(candidates, sum_over_micro_steps(long_term), num_ranks);
      once[layer.index()] = thread_cpu_seconds() - begin;
      return slots_of(choose(load, candidates, std::move(first), num_ranks), input);
    };
    return plan_freely({.name = name(), .place = place, .once_cpu_seconds = once}, input, pool);
  }

 private:
  // Returns the placement of each micro-step.
  std::vector<RankOf> choose(ArrayView<const std::int64_t, 2> load, const std::vector<RankOf>& pool, RankOf first,
                             int num_ranks) const {
    std::vector<RankOf> chosen = {std::move(first)};
    const auto period = static_cast<std::size_t>(options_.period);
    for (std::size_t m = 1; m < load.extent(0); ++m) {
      RankOf current = chosen.back();
      if (m % period == 0) {
        const std::size_t window = std::min(static_cast<std::size_t>(options_.window), m);
        const std::vector<std::int64_t> recent = sum_over_micro_steps(load, m - window, window);
        std::vector<RankOf> candidates = {current};
        candidates.insert(candidates.end(), pool.begin(), pool.end());
        candidates.push_back(smartmoe_placement(recent, current, num_ranks));
        current = best_of(candidates, recent, num_ranks);
      }
      chosen.push_back(std::move(current));
    }
    return chosen;
  }

  // Returns [micro_step][rank][slot].
  static Array<ExpertId, 3> slots_of(const std::vector<RankOf>& chosen, const PolicyInput& input) {
    const auto num_ranks = static_cast<std::size_t>(input.load.num_ranks());
    Array<ExpertId, 3> slots({chosen.size(), num_ranks, chosen.front().size() / num_ranks});
    for (std::size_t m = 0; m < chosen.size(); ++m) {
      std::vector<std::size_t> next(num_ranks);  // [rank], slot
      for (std::size_t e = 0; e < chosen[m].size(); ++e) slots(m, chosen[m][e], next[chosen[m][e]]++) = ExpertId{e};
    }
    return slots;
  }

  SmartMoeOptions options_;
};

}  // namespace

std::vector<int> smartmoe_placement(std::span<const std::int64_t> load, std::span<const int> current, int num_ranks) {
  const std::size_t room = load.size() / static_cast<std::size_t>(num_ranks);
  std::vector<int> order(load.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int a, int b) { return load[a] > load[b]; });
  std::vector<std::int64_t> rank_load(num_ranks);
  std::vector<std::size_t> num_placed(num_ranks);
  RankOf rank_of(load.size());
  for (const int e : order) {
    int least = -1;
    for (int r = 0; r < num_ranks; ++r) {
      if (num_placed[r] < room && (least < 0 || rank_load[r] < rank_load[least])) least = r;
    }
    const int stays = current[e];
    if (num_placed[stays] < room && rank_load[stays] == rank_load[least]) least = stays;
    rank_of[e] = least;
    rank_load[least] += load[e];
    ++num_placed[least];
  }
  return rank_of;
}

std::unique_ptr<Policy> make_smartmoe(const SmartMoeOptions& options) { return std::make_unique<SmartMoe>(options); }

}  // namespace foremoe
