#include "foremoe/policy/systems/echo.h"

#include <algorithm>
#include <array>
#include <deque>
#include <numeric>

#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

struct Amount {
  int id = 0;  // of an expert or a rank
  std::int64_t tokens = 0;
};

// Returns the nonzero amounts, largest first.
std::vector<Amount> sorted(std::span<const std::int64_t> tokens) {
  std::vector<Amount> amounts;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] > 0) amounts.push_back({.id = static_cast<int>(i), .tokens = tokens[i]});
  }
  std::ranges::stable_sort(amounts, std::greater<>{}, &Amount::tokens);
  return amounts;
}

struct Imbalance {
  std::int64_t mean = 0;
  std::vector<Amount> spills;  // of experts, largest first
  std::vector<Amount> rooms;   // of ranks, largest first
};

Imbalance imbalance_of(const LayerLoad& load) {
  const auto num_ranks = static_cast<std::size_t>(load.topology.num_ranks);
  const std::int64_t total = std::accumulate(load.of_expert.begin(), load.of_expert.end(), std::int64_t{0});
  const std::int64_t mean = total / load.topology.num_ranks;
  std::vector<std::size_t> order(load.of_expert.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t e) { return load.of_expert[e]; });
  std::vector<std::int64_t> room(num_ranks, mean);
  std::vector<std::int64_t> spill(load.of_expert.size());
  for (const std::size_t e : order) {
    std::int64_t& left = room[load.home[e].index()];
    const std::int64_t kept = std::min(left, load.of_expert[e]);
    left -= kept;
    spill[e] = load.of_expert[e] - kept;
  }
  return {.mean = mean, .spills = sorted(spill), .rooms = sorted(room)};
}

void pack(const Imbalance& imbalance, std::vector<Share>& shares) {
  constexpr std::int64_t kBuckets = 8;
  const std::int64_t width = std::max<std::int64_t>(1, imbalance.mean / (kBuckets - 1));
  const auto bucket_of = [&](std::int64_t tokens) {
    return tokens >= imbalance.mean ? 0 : std::min((imbalance.mean - tokens) / width + 1, kBuckets - 1);
  };
  std::array<std::deque<Amount>, kBuckets> buckets;
  for (const Amount& spill : imbalance.spills) buckets[bucket_of(spill.tokens)].push_back(spill);
  for (const Amount& room : imbalance.rooms) {
    const auto bucket = std::ranges::find_if(buckets, [](const auto& waiting) { return !waiting.empty(); });
    if (bucket == buckets.end()) return;
    Amount spill = bucket->front();
    bucket->pop_front();
    const std::int64_t tokens = std::min(spill.tokens, room.tokens);
    shares.push_back({.expert = ExpertId{spill.id}, .rank = RankId{room.id}, .tokens = tokens});
    spill.tokens -= tokens;
    if (spill.tokens > 0) buckets[bucket_of(spill.tokens)].push_back(spill);
  }
}

class Echo final : public Policy {
 public:
  std::string_view name() const override { return "echo"; }
  std::string_view summary() const override {
    return "ECHO: load above the mean packed into one spare slot of every other rank";
  }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }
  OnlineWork online() const override { return {.copies_after_router = true, .gathers_loads = true}; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const auto choose = [](const LayerLoad& load, std::vector<Share>& shares) {
      if (load.guest_slots > 0) pack(imbalance_of(load), shares);
    };
    return plan_fetched({.name = name(), .of_layer = [&](LayerId) { return choose; }}, input, pool);
  }
};

}  // namespace

std::unique_ptr<Policy> make_echo() { return std::make_unique<Echo>(); }

}  // namespace foremoe
