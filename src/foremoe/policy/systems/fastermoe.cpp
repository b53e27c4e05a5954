#include "foremoe/policy/systems/fastermoe.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

class FasterMoe final : public Policy {
 public:
  explicit FasterMoe(const FasterMoeOptions& options) : options_(options) {}

  std::string_view name() const override { return "fastermoe"; }
  std::string_view summary() const override {
    return "FasterMoE: the most loaded experts on every rank while its model of the time says so";
  }
  std::span<const std::string_view> uses() const override { return kUsesSlots; }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }
  // It asks the gate's counts of this very micro-step. How long the decision takes is not published.
  OnlineWork online() const override {
    return {.copies_after_router = true,
            .own_experts_first = true,
            .keeps_guests = true,
            .sources = send_in_ring,
            .gradients_go_to_sources = true};
  }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const auto shadow = [this](const LayerLoad& of, std::vector<Share>& shares) {
      for (const ExpertId e : fastermoe_shadows(of.of_expert, of.guest_slots, options_)) {
        for (int r = 0; r < of.topology.num_ranks; ++r) {
          const std::int64_t own = of.by_source(r, e).value;
          if (RankId{r} != of.home[e.index()] && own > 0) shares.push_back({e, RankId{r}, own});
        }
      }
    };
    return plan_fetched({.name = name(), .of_layer = [&](LayerId) { return shadow; }}, input, pool);
  }

 private:
  FasterMoeOptions options_;
};

}  // namespace

void send_in_ring(const CopiesOfExpert& copies, std::span<int> sent) {
  const int num_ranks = static_cast<int>(sent.size());
  const auto behind_home = [&](RankId rank) { return (rank.value - copies.home.value + num_ranks) % num_ranks; };
  std::vector<std::size_t> ring(copies.ranks.size());
  std::iota(ring.begin(), ring.end(), 0);
  std::ranges::sort(ring, {}, [&](std::size_t i) { return behind_home(copies.ranks[i]); });
  for (std::size_t i = 1; i < ring.size(); ++i) copies.sources[ring[i]] = copies.ranks[ring[i - 1]];
}

double fastermoe_seconds(const FasterMoeOptions& options, std::int64_t tokens, int num_shadows) {
  return (3 * options.compute_seconds() + 4 * options.send_seconds()) * static_cast<double>(tokens) +
         options.broadcast_seconds() * num_shadows;
}

std::vector<ExpertId> fastermoe_shadows(std::span<const std::int64_t> load, int limit,
                                        const FasterMoeOptions& options) {
  std::vector<ExpertId> by_load;
  for (std::size_t e = 0; e < load.size(); ++e) by_load.emplace_back(e);
  std::ranges::stable_sort(by_load, std::ranges::greater{}, [&](ExpertId e) { return load[e.index()]; });
  const auto seconds = [&](int num_shadows) {
    return fastermoe_seconds(options, load[by_load[num_shadows].index()], num_shadows);
  };
  int num_shadows = 0;
  while (num_shadows < limit && num_shadows + 1 < std::ssize(by_load) &&
         seconds(num_shadows + 1) < seconds(num_shadows)) {
    ++num_shadows;
  }
  by_load.resize(num_shadows);
  return by_load;
}

std::unique_ptr<Policy> make_fastermoe(const FasterMoeOptions& options) { return std::make_unique<FasterMoe>(options); }

}  // namespace foremoe
