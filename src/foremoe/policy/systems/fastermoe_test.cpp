// Tests FasterMoE's plans, and its shadows against hand-computed values and literal implementations of its rules.

#include "foremoe/policy/systems/fastermoe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "foremoe/core/error.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/testing/planner_steps.h"
#include "foremoe/testing/policy_runs.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Constants of both published codes: alpha 2, d_model 2048, 50 Gb/s, 11.5 Tflop/s, float32, two matrices.
constexpr FasterMoeOptions kOfTheCode{.hidden = 2048,
                                      .intermediate = 2 * 2048,
                                      .matrices = 2,
                                      .bytes_per_value = 4,
                                      .bytes_per_second = 50e9 / 8,
                                      .flops_per_second = 11.5e12};

// Returns options with 1 s per product of a token, 0.001 s per message, and `broadcast` seconds per broadcast.
FasterMoeOptions seconds_of(FasterMoeRule rule, double broadcast) {
  return {.rule = rule,
          .hidden = 1,
          .intermediate = 1000 * broadcast,
          .matrices = 1,
          .bytes_per_value = 1,
          .bytes_per_second = 1000,
          .flops_per_second = 2000 * broadcast};
}

// One layer of one micro-step, with contiguous homes.
class Layer {
 public:
  Layer(const LoadTable& table, int guest_slots, int micro_step = 0, int layer = 0)
      : home_(contiguous_homes(table.num_layers(), table.num_experts(), table.num_ranks())),
        of_expert_(table.num_experts()),
        load_{.micro_step = MicroStepId{micro_step},
              .layer = LayerId{layer},
              .by_source = table.load.view()[MicroStepId{micro_step}][LayerId{layer}],
              .of_expert = of_expert_,
              .home = std::as_const(home_).row(LayerId{layer}),
              .topology = table.topology(),
              .guest_slots = guest_slots} {
    table.expert_loads(load_.micro_step, load_.layer, of_expert_);
  }
  Layer(const Layer&) = delete;

  const LayerLoad& load() const { return load_; }

  std::vector<int> shadows(const FasterMoeOptions& options) const {
    std::vector<int> ids;
    for (const ExpertId e : fastermoe_shadows(load_, options)) ids.push_back(e.value);
    return ids;
  }

  // Tokens of the busiest rank, counted independently.
  std::int64_t busiest(const std::vector<int>& shadows) const {
    std::vector<std::int64_t> rank_load(load_.topology.num_ranks);
    for (int e = 0; e < std::ssize(of_expert_); ++e) {
      const bool everywhere = std::ranges::find(shadows, e) != shadows.end();
      for (int source = 0; source < load_.topology.num_ranks; ++source) {
        rank_load[everywhere ? source : load_.home[e].value] += load_.by_source(source, e).value;
      }
    }
    return std::ranges::max(rank_load);
  }

 private:
  Array<RankId, 2> home_;
  std::vector<std::int64_t> of_expert_;
  LayerLoad load_;
};

std::vector<int> shadows(int num_ranks, const std::vector<std::int64_t>& loads, int guest_slots,
                         const FasterMoeOptions& options) {
  const LoadTable table = test::load_of(num_ranks, {loads});
  return Layer(table, guest_slots).shadows(options);
}

// 2·2·2048·4096 flop ÷ 11.5e12 = 2.918 µs, 2048·4 bytes ÷ 6.25e9 = 1.311 µs, 2·2048·4096·4 bytes ÷ 6.25e9 = 10,737 µs.
TEST(FasterMoe, EstimatesTimesLikeThePublishedCode) {
  const FasterMoeSeconds seconds = fastermoe_seconds(kOfTheCode, {.num_ranks = 8, .ranks_per_node = 8});
  EXPECT_NEAR(seconds.compute * 1e6, 2.918, 0.001);
  EXPECT_NEAR(seconds.send * 1e6, 1.311, 0.001);
  EXPECT_NEAR(seconds.broadcast * 1e6, 10737, 1);
}

// An expert has 3·2048·768 values of 2 bytes: 9.44 MB at 450 GB/s or 50 GB/s.
TEST(FasterMoe, AssumesNvlinkIfTheGroupIsOneNode) {
  EXPECT_NEAR(fastermoe_seconds({}, {.num_ranks = 8, .ranks_per_node = 8}).broadcast * 1e6, 20.97, 0.01);
  EXPECT_NEAR(fastermoe_seconds({}, {.num_ranks = 16, .ranks_per_node = 8}).broadcast * 1e6, 188.7, 0.1);
}

// Ranks {e0, e1} and {e2, e3} have 1000 and 200 tokens, half of each expert from either rank. A token takes 3 s, a
// shadow 2·25 s. The layer takes 3004 s; with shadow e0, 2150 s (700 and 500 tokens); with e0 and e1, 2200 s.
TEST(FasterMoe, ShadowsTheMostLoadedExpertOfTheMostLoadedRank) {
  EXPECT_THAT(shadows(2, {600, 400, 100, 100}, 4, seconds_of(FasterMoeRule::kWorker, 25)), ElementsAre(0));
  // With 350 tokens of e1: 950 tokens; with shadow e0, 650 and 500 (2050 s); with e0 and e1, 475 and 675 (2125 s).
  EXPECT_THAT(shadows(2, {600, 350, 100, 100}, 4, seconds_of(FasterMoeRule::kWorker, 25)), ElementsAre(0));
}

// Rank 0 has 800 tokens, 2403 s. With e0, rank 1 has 900 and takes 2750 s, which is worse than no shadow. With e2 too,
// rank 0 has 750, 2350 s, or 2410 s if a shadow costs 2·40 s instead of 2·25 s.
TEST(FasterMoe, ComparesWithNoShadowsOnlyAfterTheSearch) {
  EXPECT_THAT(shadows(2, {600, 200, 500, 100}, 4, seconds_of(FasterMoeRule::kWorker, 25)), ElementsAre(0, 2));
  EXPECT_THAT(shadows(2, {600, 200, 500, 100}, 4, seconds_of(FasterMoeRule::kWorker, 40)), IsEmpty());
}

// Ranks {e0, e1}, {e2, e3}, …: rank 0 has 900 tokens. If e0 is shadowed, each rank serves a third of it: 500, 500, 400.
// Next is e1 of rank 0, the lower of two equal ranks. Loads 300, 600, 500 are a rise.
TEST(FasterMoe, ContinuesWithTheBusiestRankAfterEachShadow) {
  EXPECT_THAT(shadows(3, {600, 300, 300, 0, 200, 0}, 4, seconds_of(FasterMoeRule::kWorker, 1)), ElementsAre(0));
  // Rank 1 has 420 tokens, and 620 with e0. Shadowing its e2 gives rank 1 340, but others 640 and 540, a rise.
  EXPECT_THAT(shadows(3, {600, 300, 420, 0, 200, 0}, 4, seconds_of(FasterMoeRule::kWorker, 1)), ElementsAre(0));
  // Rank 1 has 600 tokens, and 800 with e0. Shadowing its e2 leaves 600, 600, 300. Then e1 would leave 400, 700, 400.
  EXPECT_THAT(shadows(3, {600, 300, 300, 300, 0, 0}, 4, seconds_of(FasterMoeRule::kWorker, 1)), ElementsAre(0, 2));
}

TEST(FasterMoe, ShadowsNothingIfABroadcastTakesLonger) {
  EXPECT_THAT(shadows(2, {600, 400, 100, 100}, 4, seconds_of(FasterMoeRule::kWorker, 426)), ElementsAre(0));  // 2952 s
  EXPECT_THAT(shadows(2, {600, 400, 100, 100}, 4, seconds_of(FasterMoeRule::kWorker, 453)), IsEmpty());       // 3006 s
}

// Regression test: ρ is 1.875, and the hot rank's 16 experts have the same load. Rule `expert` shadows nothing.
TEST(FasterMoe, RelievesARankWhoseExpertsAreEquallyHot) {
  std::vector<std::int64_t> loads(128, 5600);
  std::fill_n(loads.begin(), 16, 12000);  // rank 0: 192,000 tokens, the others 89,600
  EXPECT_THAT(shadows(8, loads, 4, {.rule = FasterMoeRule::kExpert}), IsEmpty());
  EXPECT_THAT(shadows(8, loads, 4, {}), ElementsAre(0, 1, 2, 3));
  const LoadTable table = test::load_of(8, {loads});
  const auto rho = [&](int guest_slots, FasterMoeRule rule) {
    const auto policy = make_fastermoe({.rule = rule});
    return plan_figures(test::plan_of(*policy, {.load = table, .guest_slots = guest_slots}), table).rho.mean;
  };
  EXPECT_EQ(rho(4, FasterMoeRule::kExpert), 1.875);
  EXPECT_EQ(rho(4, FasterMoeRule::kWorker), (192000 - 4 * 10500) / 102400.0);
  EXPECT_EQ(rho(16, FasterMoeRule::kWorker), (89600 + 9 * 1500) / 102400.0);  // other ranks; rank 0 has 97,500
}

// A shadow lowers the estimate if the next expert has at least 10,737 / 13.996 = 767.2 fewer tokens.
TEST(FasterMoe, RuleExpertShadowsWhileTheEstimateFalls) {
  FasterMoeOptions options = kOfTheCode;
  options.rule = FasterMoeRule::kExpert;
  EXPECT_THAT(shadows(2, {2000, 4000, 100, 3000}, 8, options), ElementsAre(1, 3, 0));
  EXPECT_THAT(shadows(2, {2300, 4000, 100, 3000}, 8, options), ElementsAre(1));  // 3000 − 2300 is only 700
  EXPECT_THAT(shadows(2, {1768, 1000}, 8, options), ElementsAre(0));
  EXPECT_THAT(shadows(2, {1767, 1000}, 8, options), IsEmpty());
  EXPECT_THAT(shadows(2, {2000, 4000, 100, 3000}, 2, options), ElementsAre(1, 3));
  EXPECT_THAT(shadows(1, {100'000}, 8, options), IsEmpty());  // the last expert is never shadowed
}

// Implements the artifact's formulas: shadows whole ranks in a fixed order. `tokens` is [owner][source].
std::vector<int> ranks_by_the_artifact(const std::vector<std::vector<std::int64_t>>& tokens, double broadcasts,
                                       const FasterMoeSeconds& of) {
  const auto num_ranks = static_cast<int>(tokens.size());
  const auto total = [&](int owner) { return std::accumulate(tokens[owner].begin(), tokens[owner].end(), 0LL); };
  std::vector<int> order(num_ranks);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int a, int b) { return total(a) > total(b); });
  const auto with = [&](int num_shadows) {
    std::int64_t busiest = 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
      std::int64_t served = 0;
      for (int i = 0; i < num_ranks; ++i) {
        served += i < num_shadows ? tokens[order[i]][rank] : order[i] == rank ? total(rank) : 0;
      }
      busiest = std::max(busiest, served);
    }
    return static_cast<double>(busiest) * 3 * of.compute + 2 * num_shadows * broadcasts;
  };
  int num_shadows = 1;
  while (num_shadows + 1 < num_ranks && with(num_shadows + 1) <= with(num_shadows)) ++num_shadows;
  double least = with(1);
  for (int n = 1; n <= num_shadows; ++n) least = std::min(least, with(n));
  const auto largest = static_cast<double>(total(order.front()));
  if (num_ranks < 2 || least >= largest * (3 * of.compute + 4 * of.send)) return {};
  order.resize(num_shadows);
  return order;
}

TEST(FasterMoe, RuleWholeMatchesTheArtifact) {
  int num_shadowed = 0;
  int num_none = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const int experts_per_rank = seed % 2 == 0 ? 1 : 3;
    const LoadTable table = test::random_load({.ranks = 5, .experts = 5 * experts_per_rank}, seed, 400);
    const FasterMoeOptions options = seconds_of(FasterMoeRule::kWhole, seed % 3 == 0 ? 400.0 : 40.0);
    const Layer layer(table, 5 * experts_per_rank);
    std::vector<std::vector<std::int64_t>> tokens(5, std::vector<std::int64_t>(5));
    for (int e = 0; e < table.num_experts(); ++e) {
      std::vector<std::int64_t>& of_owner = tokens[e / experts_per_rank];
      for (int source = 0; source < 5; ++source) of_owner[source] += table.load(0, 0, source, e).value;
    }
    const FasterMoeSeconds seconds = fastermoe_seconds(options, table.topology());
    std::vector<int> ranks;
    for (const int e : layer.shadows(options)) {
      if (ranks.empty() || ranks.back() != e / experts_per_rank) ranks.push_back(e / experts_per_rank);
    }
    EXPECT_EQ(std::ssize(layer.shadows(options)), std::ssize(ranks) * experts_per_rank);
    EXPECT_EQ(ranks, ranks_by_the_artifact(tokens, experts_per_rank * seconds.broadcast, seconds)) << seed;
    (ranks.empty() ? num_none : num_shadowed) += 1;
  }
  EXPECT_GT(num_shadowed, 20);
  EXPECT_GT(num_none, 20);
}

// Three experts per rank. With four slots, one is left for the second rank's most loaded expert.
TEST(FasterMoe, RuleWholeFillsFreeSlotsWithTheMostLoadedExperts) {
  const std::vector<std::int64_t> loads = {400, 400, 400, 200, 300, 250, 0, 0, 0};
  EXPECT_THAT(shadows(3, loads, 4, seconds_of(FasterMoeRule::kWhole, 0.1)), ElementsAre(0, 1, 2, 4));
  EXPECT_THAT(shadows(3, loads, 2, seconds_of(FasterMoeRule::kWhole, 0.1)), ElementsAre(0, 1));
  EXPECT_THAT(shadows(3, loads, 0, seconds_of(FasterMoeRule::kWhole, 0.1)), IsEmpty());
}

// Expects that every rank serves exactly its own tokens of a shadow, and that there are no other guests.
void expect_own_tokens(const StepPlan& plan, const LoadTable& load, const FasterMoeOptions& options) {
  for (int t = 0; t < plan.num_events(); ++t) {
    const MicroStepId m = plan.event_micro_step[t];
    for (int l = 0; l < plan.num_layers(); ++l) {
      const std::vector<int> shadowed = Layer(load, plan.guest_slots, m.value, l).shadows(options);
      const Array<SlotId, 2> slot = test::slots_of(plan, t, l);
      for (int e = 0; e < plan.num_experts(); ++e) {
        const bool is_shadow = std::ranges::find(shadowed, e) != shadowed.end();
        for (int r = 0; r < plan.num_ranks(); ++r) {
          const Tokens own = load.load(m, l, r, e);
          if (is_shadow && slot(r, e).value >= 0) {
            EXPECT_EQ(plan.slot_tokens(t, l, r, slot(r, e)), own);
          }
          if (plan.home(l, e) != RankId{r}) {
            EXPECT_EQ(slot(r, e).value >= 0, is_shadow && own > Tokens{0});
          }
        }
      }
    }
  }
}

constexpr FasterMoeOptions kSmallExperts{.hidden = 64, .intermediate = 8, .bytes_per_second = 1e14};

TEST(FasterMoe, ServesShadowedTokensOnTheirSourceRank) {
  const LoadTable load = test::random_load({.micro_steps = 4, .layers = 2, .ranks = 4, .experts = 12}, 1);
  for (const FasterMoeRule rule : {FasterMoeRule::kWorker, FasterMoeRule::kWhole, FasterMoeRule::kExpert}) {
    FasterMoeOptions options = kSmallExperts;
    options.rule = rule;
    for (const int guest_slots : {0, 1, 3}) {
      const StepPlan plan = test::plan_of(*make_fastermoe(options), {.load = load, .guest_slots = guest_slots});
      EXPECT_EQ(plan.residency, Residency::kShared);
      expect_own_tokens(plan, load, options);
    }
    const StepPlan plan = test::plan_of(*make_fastermoe(options), {.load = load, .guest_slots = 3});
    EXPECT_GT(plan_figures(plan, load).guests_per_layer, 0);
  }
}

TEST(FasterMoe, PlansWithSeveralMicroStepsInFlight) {
  const LoadTable load = test::random_load({.micro_steps = 4}, 1);
  const auto policy = make_fastermoe(kSmallExperts);
  expect_own_tokens(test::plan_of(*policy, {.load = load, .guest_slots = 2, .in_flight = 3}), load, kSmallExperts);
}

// Expects that no shadow raises the model's estimate, and that fewer slots yield a prefix of the list of shadows.
TEST(FasterMoe, StopsBeforeItsEstimateRisesOnATable) {
  const LoadTable load = take_first(read_load("data/load-q30-ep8.safetensors"), 6, 2);
  const FasterMoeSeconds seconds = fastermoe_seconds({}, load.topology());
  for (int m = 0; m < load.num_micro_steps(); ++m) {
    const Layer layer(load, load.num_experts(), m);
    const auto estimate = [&](const std::vector<int>& some) {
      return static_cast<double>(layer.busiest(some)) * 3 * seconds.compute +
             2 * static_cast<double>(some.size()) * seconds.broadcast;
    };
    const std::vector<int> all = layer.shadows({});
    ASSERT_FALSE(all.empty());
    double before = static_cast<double>(layer.busiest({})) * (3 * seconds.compute + 4 * seconds.send);
    for (std::size_t k = 0; k < all.size(); ++k) {
      const double after = estimate({all.begin(), all.begin() + static_cast<std::ptrdiff_t>(k) + 1});
      EXPECT_LE(after, before);
      before = after;
    }
    const Layer one_less(load, static_cast<int>(all.size()) - 1, m);
    EXPECT_THAT(one_less.shadows({}), testing::ElementsAreArray(all.begin(), all.end() - 1)) << "slots only cut it off";
  }
  expect_own_tokens(test::plan_of(*make_fastermoe(), {.load = load, .guest_slots = 2}), load, {});
}

TEST(FasterMoe, SetsItsOptionsByName) {
  const std::unique_ptr<Policy> policy = make_fastermoe();
  std::vector<Option> options = policy->options();
  option_named(options, "rule").set("expert");
  option_named(options, "bytes_per_second").set("1e9");
  std::vector<std::int64_t> loads(128, 5600);
  std::fill_n(loads.begin(), 16, 12000);
  const LoadTable table = test::load_of(8, {loads});
  EXPECT_EQ(plan_figures(test::plan_of(*policy, {.load = table, .guest_slots = 4}), table).guests_per_layer, 0);
  EXPECT_THROW(option_named(options, "rule").set("largest"), InputError);
  EXPECT_THROW(option_named(options, "intermediate").set("0"), InputError);
}

TEST(FasterMoe, CopiesAfterTheRouter) { EXPECT_TRUE(make_fastermoe()->online().copies_after_router); }

}  // namespace
}  // namespace foremoe
