// Stress workloads w0 to w7, described in synthesis.h.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "foremoe/core/error.h"
#include "foremoe/rollout/synthesis/draw.h"
#include "foremoe/rollout/synthesis/token_router.h"

namespace foremoe {

namespace {

struct Entry {
  std::string_view name;
  std::string_view description;
};

constexpr std::array<Entry, kNumStressWorkloads> kEntries{{{"w0", "balanced"},
                                                           {"w1", "hot experts"},
                                                           {"w2", "hot rank"},
                                                           {"w3", "same heat spread out"},
                                                           {"w4", "ragged sources"},
                                                           {"w5", "zero-load ranks"},
                                                           {"w6", "rotating hot spot"},
                                                           {"w7", "bursts"}}};

constexpr double kExpertHeat = 1.5;  // relative to a rank's fair share
constexpr double kRankHeat = 3.0;    // relative to a rank's fair share
constexpr int kBurstPeriod = 4;
constexpr int kBurstPhase = 1;

class StressRouter : public TokenRouter {
 public:
  StressRouter(const SynthesisOptions& options, StressWorkload workload)
      : options_(options),
        workload_(workload),
        ranks_(options.num_ranks),
        homes_(options.num_experts / options.num_ranks) {}

  bool is_deterministic() const override { return true; }

  std::int64_t tokens_of(MicroStepId m, RankId rank, std::int64_t tokens_per_rank) const override {
    if (workload_ != StressWorkload::kRaggedSources) return tokens_per_rank;
    Random random = stream_of(options_.seed, Purpose::kRagged, m.index());
    const auto share = permutation(random, static_cast<std::size_t>(ranks_));
    return tokens_per_rank * 2 * (share[rank.index()] + 1) / (ranks_ + 1);
  }

  void weigh(const SyntheticSequence& sequence, LayerId layer, std::span<double> weight) const override {
    const int m = sequence.micro_step.value;
    switch (workload_) {
      case StressWorkload::kBalanced:
      case StressWorkload::kRaggedSources:
        return heat(weight, {}, 0);
      case StressWorkload::kHotExperts:
        return heat(weight, experts_apart(), kExpertHeat / ranks_);
      case StressWorkload::kHotRank:
        return heat(weight, experts_of(0), rank_heat() / homes_);
      case StressWorkload::kSpreadHeat:
        return heat(weight, experts_spread(), rank_heat() / homes_);
      case StressWorkload::kZeroLoadRanks:
        return zero_last_ranks(weight);
      case StressWorkload::kRotatingHotSpot:
        return heat(weight, experts_of(m % ranks_), rank_heat() / homes_);
      case StressWorkload::kBursts:
        if (m % kBurstPeriod != kBurstPhase) return heat(weight, {}, 0);
        return heat(weight, experts_drawn(m, layer), kExpertHeat / ranks_);
    }
  }

 private:
  // Gives each hot expert weight p and spreads max(kLeastRest, 1 − their sum) evenly over the other experts.
  static void heat(std::span<double> weight, const std::vector<int>& hot, double p) {
    constexpr double kLeastRest = 0.05;
    const double together = p * static_cast<double>(hot.size());
    const double rest =
        std::max(kLeastRest, 1 - together) / static_cast<double>(std::max(std::size_t{1}, weight.size() - hot.size()));
    std::fill(weight.begin(), weight.end(), rest);
    for (const int e : hot) weight[static_cast<std::size_t>(e)] = p;
  }

  // The hot rank's share of all tokens in w2. Below kRankHeat on few ranks, so that all ranks have work.
  double rank_heat() const { return std::min(kRankHeat, (ranks_ + 1) / 2.0) / ranks_; }

  int num_hot_experts() const { return std::max(1, ranks_ / 8); }

  std::vector<int> experts_apart() const {
    std::vector<int> experts;
    for (int i = 0; i < num_hot_experts(); ++i) experts.push_back(8 * i * homes_);
    return experts;
  }

  std::vector<int> experts_of(int rank) const {
    std::vector<int> experts;
    for (int i = 0; i < homes_; ++i) experts.push_back(rank * homes_ + i);
    return experts;
  }

  // Returns E/R experts. Every rank gets one before any rank gets two.
  std::vector<int> experts_spread() const {
    const int stride = std::max(1, ranks_ / homes_);
    std::vector<int> experts;
    for (int i = 0; i < homes_; ++i) experts.push_back(i * stride % ranks_ * homes_ + i / ranks_);
    return experts;
  }

  std::vector<int> experts_drawn(int m, LayerId layer) const {
    Random random = stream_of(options_.seed, Purpose::kBurst, static_cast<std::uint64_t>(m), layer.index());
    const auto order = permutation(random, static_cast<std::size_t>(options_.num_experts));
    return {order.begin(), order.begin() + num_hot_experts()};
  }

  void zero_last_ranks(std::span<double> weight) const {
    const auto warm = static_cast<std::ptrdiff_t>((ranks_ - std::max(1, ranks_ / 4)) * homes_);
    std::fill(weight.begin(), weight.begin() + warm, 1.0);
    std::fill(weight.begin() + warm, weight.end(), 0.0);
  }

  const SynthesisOptions& options_;
  StressWorkload workload_;
  int ranks_;
  int homes_;  // home experts per rank
};

}  // namespace

std::string_view name_of(StressWorkload workload) { return kEntries[static_cast<std::size_t>(workload)].name; }

std::string_view description_of(StressWorkload workload) {
  return kEntries[static_cast<std::size_t>(workload)].description;
}

std::optional<StressWorkload> stress_workload_named(std::string_view name) {
  for (std::size_t i = 0; i < kEntries.size(); ++i) {
    if (kEntries[i].name == name) return static_cast<StressWorkload>(i);
  }
  return std::nullopt;
}

std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, StressWorkload workload) {
  if (options.num_ranks < 2) throw InputError({.field = "ranks"}, "must be at least 2 for a stress workload");
  if (options.num_experts % options.num_ranks != 0) {
    throw InputError({.field = "experts"},
                     fmt::format("must be a multiple of the {} ranks for a stress workload (is {})", options.num_ranks,
                                 options.num_experts));
  }
  return std::make_unique<StressRouter>(options, workload);
}

}  // namespace foremoe
