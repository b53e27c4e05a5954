#include "foremoe/sim/copy_sources.h"

#include <gtest/gtest.h>

#include <vector>

#include "foremoe/policy/systems/fastermoe.h"
#include "foremoe/policy/systems/ultraep.h"
#include "foremoe/sim/simulation.h"
#include "foremoe/testing/simulated_plans.h"

namespace foremoe {
namespace {

using sim_test::homes_plan;
using sim_test::one_layer;
using sim_test::round_cluster;
using sim_test::round_model;
using sim_test::round_options;

// `ranks` ranks on one node with an expert each. All tokens, 50 per rank, choose expert 0, whose home is rank 0. Every
// rank serves its own tokens; all but rank 0 use a guest.
struct OneForAll {
  LoadTable load;
  StepPlan plan;
  CostModel cost;

  explicit OneForAll(int ranks, const CostOptions& options = round_options())
      : load(load_of(ranks)),
        plan(homes_plan(load, 1, Residency::kShared)),
        cost(round_cluster(ranks), round_model(1, ranks), options) {
    for (int t = 0; t < plan.num_events(); ++t) {
      plan.slot_tokens(t, 0, 0, 0) = Tokens{50};
      for (int r = 1; r < ranks; ++r) {
        plan.slot_expert(t, 0, r, 1) = ExpertId{0};
        plan.slot_tokens(t, 0, r, 1) = Tokens{50};
      }
    }
  }

  static LoadTable load_of(int ranks) {
    std::vector<int> tokens(static_cast<std::size_t>(ranks), 0);
    tokens[0] = 50;
    return one_layer({std::vector(static_cast<std::size_t>(ranks), tokens)}, ranks);
  }

  SimulatedPhase phase(Phase phase, const OnlineWork& online) const {
    return simulate_phase({.load = load, .plan = plan, .cost = cost},
                          {.phase = phase, .path = PathChoice::kPeer, .online = online});
  }
};

constexpr int kRanks = 10;
constexpr std::int64_t kWeights = 600;         // bytes
constexpr std::int64_t kGradient = 1200;       // bytes
constexpr double kLinkSeconds = 600.0 / 8000;  // to send the weights
constexpr double kNear = 1e-9;

constexpr OnlineWork kFromHome{.copies_after_router = true};
constexpr OnlineWork kRing{.copies_after_router = true, .sources = send_in_ring, .gradients_go_to_sources = true};
constexpr OnlineWork kRelays{.copies_after_router = true, .sources = send_by_relays_of_group};

std::int64_t sent_by_busiest(const SimulatedPhase& phase) {
  EXPECT_EQ(phase.traffic[0].link, "peers");
  return phase.traffic[0].busiest.value;
}

// Nine guests. Without relays, the home sends nine copies. In a ring, every rank but the last sends one. With ⌊√9⌋
// relays, the home sends three, and each relay sends to two of the six others.
TEST(CopySourcesTest, CopiesCrossEachLinkAsOftenAsTheSystemSendsThem) {
  const OneForAll step(kRanks);
  for (const auto& [online, most] : {std::pair(kFromHome, 9), std::pair(kRing, 1), std::pair(kRelays, 3)}) {
    const SimulatedPhase phase = step.phase(Phase::kRecompute, online);
    EXPECT_EQ(phase.copies, 9);
    EXPECT_EQ(phase.traffic[0].copies, Bytes{kWeights * 9}) << "each of nine ranks receives it once";
    EXPECT_EQ(phase.traffic[0].rows, Bytes{0}) << "every rank serves its own";
    EXPECT_EQ(sent_by_busiest(phase), most * kWeights);
    EXPECT_NEAR(phase.parts.exposed_copies, most * kLinkSeconds, kNear);
  }
}

// Seven guests on eight ranks have no relays. On nine ranks, the home sends two, and the relays three each.
TEST(CopySourcesTest, RelaysNeedMoreThanEightRanks) {
  const OneForAll eight(8);
  const OneForAll nine(9);
  EXPECT_NEAR(eight.phase(Phase::kRecompute, kRelays).parts.exposed_copies, 7 * kLinkSeconds, kNear);
  EXPECT_NEAR(nine.phase(Phase::kRecompute, kRelays).parts.exposed_copies, 3 * kLinkSeconds, kNear);
}

// Returns how many copies of rank 0's expert the busiest of `group` ranks sends, if `num_copies` ranks receive one.
int sent_by_busiest(ChooseSources choose, int num_copies, int group, int ranks_per_node) {
  std::vector<ScheduledCopy> copies;
  for (int r = 1; r <= num_copies; ++r) {
    copies.push_back({.rank = RankId{r}, .expert = ExpertId{0}, .path = Path::kPeer, .source = RankId{0}});
  }
  choose_sources(choose, {.num_ranks = group, .ranks_per_node = ranks_per_node}, copies);
  std::vector<int> sent(group);
  for (const ScheduledCopy& copy : copies) ++sent[copy.source.index()];
  return std::ranges::max(sent);
}

// Three copies have no relays. From four on, relays take at least two copies off the busiest sender.
TEST(CopySourcesTest, RelaysNeedFourCopies) {
  EXPECT_EQ(sent_by_busiest(send_by_relays, 3, 64, 64), 3);
  for (int copies = 4; copies < 64; ++copies) EXPECT_LE(sent_by_busiest(send_by_relays, copies, 64, 64), copies - 2);
}

TEST(CopySourcesTest, TheDomainOfRelaysIsTheNodeOrTheGroup) {
  EXPECT_EQ(sent_by_busiest(send_by_relays, 7, 64, 8), 7);
  EXPECT_EQ(sent_by_busiest(send_by_relays, 7, 64, 16), 3);
  EXPECT_EQ(sent_by_busiest(send_by_relays_of_group, 7, 64, 8), 3);
}

// One backward turn returns nine gradients. Without relays all nine cross the home's link; in a ring each link carries
// one. Relays are used for weights only.
TEST(CopySourcesTest, OnlyARingAccumulatesGradientsOnTheWay) {
  const OneForAll step(kRanks);
  for (const auto& [online, most] : {std::pair(kFromHome, 9), std::pair(kRing, 1), std::pair(kRelays, 9)}) {
    const SimulatedPhase phase = step.phase(Phase::kPolicyUpdate, online);
    EXPECT_EQ(phase.copies, 18) << "for the forward and for the backward";
    EXPECT_EQ(phase.traffic[0].gradients, Bytes{kGradient * 9});
    const Tokens own{50};
    const double hidden = step.cost.dense(own, Pass::kBackward) + step.cost.other_layers(own, Pass::kBackward);
    EXPECT_NEAR(phase.parts.exposed_gradients, std::max(0.0, most * 2 * kLinkSeconds - hidden), kNear);
  }
}

TEST(CopySourcesTest, RelaysAreTheRanksThatSendTheLeast) {
  // Rank 0 sends expert 0 to six of nine ranks through two relays. Rank 1 is one of these relays, so expert 1 uses
  // others.
  std::vector<ScheduledCopy> copies;
  for (const int expert : {0, 1}) {
    for (int r = 0; r < 7; ++r) {
      if (r == expert) continue;
      copies.push_back({.rank = RankId{r}, .expert = ExpertId{expert}, .path = Path::kPeer, .source = RankId{expert}});
    }
  }
  choose_sources(send_by_relays, {.num_ranks = 9, .ranks_per_node = 9}, copies);
  const auto sources_of = [&](int expert) {
    std::vector<int> sources;
    for (const ScheduledCopy& copy : copies) {
      if (copy.expert == ExpertId{expert}) sources.push_back(copy.source.value);
    }
    return sources;
  };
  // To ranks 1 … 6: relays are 1 and 2, which serve the others in turn. Ranks 0, 1 and 2 send two copies each.
  EXPECT_EQ(sources_of(0), (std::vector{0, 0, 1, 2, 1, 2}));
  // To ranks 0, 2 … 6: relays are 3 and 4.
  EXPECT_EQ(sources_of(1), (std::vector{3, 4, 1, 1, 3, 4}));
}

TEST(CopySourcesTest, ARingStartsAfterTheHome) {
  std::vector<ScheduledCopy> copies;
  for (const int r : {0, 1, 3}) {
    copies.push_back({.rank = RankId{r}, .expert = ExpertId{9}, .path = Path::kPeer, .source = RankId{2}});
  }
  copies[1].path = Path::kHost;  // its weights come from the arena
  choose_sources(send_in_ring, {.num_ranks = 4, .ranks_per_node = 4}, copies);
  EXPECT_EQ(copies[2].source, RankId{2});
  EXPECT_EQ(copies[0].source, RankId{3});
  EXPECT_EQ(copies[1].source, RankId{2});
}

// FasterMoE as in its code: dispatch by the plan, then own experts during the broadcast, then shadows. Shadows stay for
// the backward unless the forward is recomputed.
TEST(CopySourcesTest, FasterMoeKeepsShadowsIfItKeepsActivations) {
  CostOptions keeping = round_options();
  keeping.recompute_activations = false;
  const OnlineWork fastermoe = make_fastermoe()->online();
  for (const auto& [options, copies] : {std::pair(keeping, 9), std::pair(round_options(), 18)}) {
    const OneForAll step(kRanks, options);
    const SimulatedPhase phase = step.phase(Phase::kPolicyUpdate, fastermoe);
    EXPECT_EQ(phase.copies, copies);
    EXPECT_EQ(phase.traffic[0].copies, Bytes{kWeights * copies});
    EXPECT_EQ(phase.traffic[0].gradients, Bytes{kGradient * 9});
    EXPECT_EQ(phase.memory.guest_weights, Bytes{kWeights});
    // Only rank 0 has own experts to compute; the others wait for the broadcast.
    EXPECT_GE(phase.parts.exposed_copies, kLinkSeconds - kNear);
  }
  // The shadows of all layers stay; a system that fetches them again needs one set of buffers.
  const OneForAll step(kRanks, keeping);
  const CostModel three_layers(step.cost.cluster(), round_model(3, kRanks), keeping);
  const SimulationInput input{.load = step.load, .plan = step.plan, .cost = three_layers};
  const auto weights = [&](const OnlineWork& online) {
    return simulate_phase(input, {.phase = Phase::kPolicyUpdate, .path = PathChoice::kPeer, .online = online})
        .memory.guest_weights;
  };
  EXPECT_EQ(weights(fastermoe), Bytes{kWeights * 3});
  EXPECT_EQ(weights(make_ultraep()->online()), Bytes{2 * kWeights});  // one set more: it copies ahead in the backward
}

TEST(CopySourcesTest, PlansMadeBeforeDispatchDetermineTheRows) {
  const OneForAll step(kRanks);
  EXPECT_EQ(step.phase(Phase::kRecompute, make_fastermoe()->online()).parts.dispatch, 0);
}

}  // namespace
}  // namespace foremoe
