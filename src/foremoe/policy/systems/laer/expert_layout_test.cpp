#include "foremoe/policy/systems/laer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "foremoe/core/random.h"

namespace foremoe::laer {
namespace {

using testing::ElementsAre;

// Returns [source][expert]: each of four sources sends a quarter of `load`, [expert] tokens.
Array<std::int64_t, 2> from_four_sources(const std::vector<std::int64_t>& load) {
  Array<std::int64_t, 2> by_source({4, load.size()});
  for (int r = 0; r < 4; ++r) {
    for (std::size_t e = 0; e < load.size(); ++e) by_source(r, e) = load[e] / 4;
  }
  return by_source;
}

std::vector<int> on_rank(const Array<ExpertId, 2>& layout, int rank) {
  std::vector<int> ids;
  for (const ExpertId e : layout.row(rank)) ids.push_back(e.value);
  return ids;
}

// One node of 4 ranks with 2 slots; 160, 80, 48, 32 tokens. The heap adds replicas of e0 (160), e0 (80, tied with e1,
// lower id), e1 (80), e0 (160/3 > 48): 4, 2, 1, 1 replicas with 40, 40, 48, 32 tokens. In order of load, e2 goes to
// rank 0; e0 to ranks 1, 2, 3, and 1 again (40 < 48); e1 to ranks 2 and 3; e3 to rank 0. All ranks have 80 tokens.
TEST(LaerLayout, ReplicatesByTheHeapAndPlacesAsWorkedByHand) {
  const Shape shape{.topology = {.num_ranks = 4, .ranks_per_node = 4}, .slots_per_rank = 2};
  const std::vector<std::int64_t> load = {160, 80, 48, 32};
  const std::vector<int> replicas = heap_replicas(load, shape);
  EXPECT_THAT(replicas, ElementsAre(4, 2, 1, 1));
  const Array<ExpertId, 2> layout = place_replicas(load, replicas, shape);
  EXPECT_THAT(on_rank(layout, 0), ElementsAre(2, 3));
  EXPECT_THAT(on_rank(layout, 1), ElementsAre(0, 0));
  EXPECT_THAT(on_rank(layout, 2), ElementsAre(0, 1));
  EXPECT_THAT(on_rank(layout, 3), ElementsAre(0, 1));

  // Each source has 80 tokens and sends 40 of them to e0, in parts of 20, 10 and 10. It serves 20 of its tokens itself
  // (rank 0: 12 + 8; rank 1: 20; ranks 2 and 3: 10 + 10), so 4 · 60 tokens go to another rank.
  const InsideFirstRoutes routed = route_inside_first(from_four_sources(load), layout, shape.topology);
  EXPECT_THAT(routed.served.row(1), ElementsAre(80, 0, 0, 0));
  EXPECT_THAT(routed.served.row(2), ElementsAre(40, 40, 0, 0));
  EXPECT_EQ(routed.inside_nodes, 240);
  EXPECT_EQ(routed.between_nodes, 0);
  const Prices prices{.seconds_per_token = 1, .bytes_per_token = 2, .bytes_per_second_inside_nodes = 8};
  EXPECT_DOUBLE_EQ(seconds_of(routed, prices), 4 * 240 * 2 / 8.0 + (3 + 1) * 80);
  EXPECT_EQ(best_layout(from_four_sources(load), shape, {.prices = prices}),
            layout);  // the even layout has a rank with 96
}

// Two nodes of 2 ranks with 2 slots. One replica per node fills all slots.
TEST(LaerLayout, PlacesReplicasOfAnExpertOnDifferentNodes) {
  const Shape shape{.topology = {.num_ranks = 4, .ranks_per_node = 2}, .slots_per_rank = 2};
  const std::vector<std::int64_t> load = {160, 80, 48, 32};
  const std::vector<int> replicas = heap_replicas(load, shape);
  EXPECT_THAT(replicas, ElementsAre(2, 2, 2, 2));
  const Array<ExpertId, 2> layout = place_replicas(load, replicas, shape);
  for (const int first_of_node : {0, 2}) {
    EXPECT_THAT(on_rank(layout, first_of_node), ElementsAre(0, 3));      // 80 + 16
    EXPECT_THAT(on_rank(layout, first_of_node + 1), ElementsAre(1, 2));  // 40 + 24
  }
  EXPECT_EQ(route_inside_first(from_four_sources(load), layout, shape.topology).between_nodes, 0);
}

TEST(LaerLayout, AddsAReplicaPerNodeOnceAnExpertIsOnAllNodes) {
  const Shape shape{.topology = {.num_ranks = 4, .ranks_per_node = 2}, .slots_per_rank = 2};
  EXPECT_THAT(heap_replicas(std::vector<std::int64_t>{90, 10}, shape), ElementsAre(6, 2));
  EXPECT_THAT(heap_replicas(std::vector<std::int64_t>{90, 20, 10}, shape), ElementsAre(4, 2, 2));
  // One replica per node would need ten slots, so each expert starts with one. e0 (90) gains one, then e0 (45) two.
  EXPECT_THAT(heap_replicas(std::vector<std::int64_t>{90, 20, 10, 5, 5}, shape), ElementsAre(4, 1, 1, 1, 1));
  // e0 (90) and e1 (80) gain one. e0 (45) or e1 (40) would need two slots; one is left, so e2 (10) gains it.
  EXPECT_THAT(heap_replicas(std::vector<std::int64_t>{90, 80, 10, 5, 5}, shape), ElementsAre(2, 2, 2, 1, 1));
  const Shape uneven{.topology = {.num_ranks = 3, .ranks_per_node = 2}, .slots_per_rank = 3};
  EXPECT_THAT(heap_replicas(std::vector<std::int64_t>{9, 1, 1, 1}, uneven), ElementsAre(2, 2, 2, 2));  // of 9 slots
}

TEST(LaerLayout, SplitsOverAllReplicasIfTheNodeHasNone) {
  Array<ExpertId, 2> layout({4, 1}, kNoExpert);
  layout(2, 0) = layout(3, 0) = ExpertId{0};
  Array<std::int64_t, 2> by_source({4, 1});
  by_source(0, 0) = 7;  // 4 to rank 2, 3 to rank 3
  by_source(3, 0) = 5;  // 3 to rank 2, 2 stay
  const InsideFirstRoutes routed = route_inside_first(by_source, layout, {.num_ranks = 4, .ranks_per_node = 2});
  EXPECT_EQ(routed.served(2, 0), 4 + 3);
  EXPECT_EQ(routed.served(3, 0), 3 + 2);
  EXPECT_EQ(routed.between_nodes, 7);
  EXPECT_EQ(routed.inside_nodes, 3);
}

TEST(LaerLayout, ConsidersEvenReplicasOnlyIfTheyFillTheSlots) {
  const Shape shape{.topology = {.num_ranks = 2, .ranks_per_node = 1}, .slots_per_rank = 2};
  EXPECT_THAT(even_replicas(2, shape), ElementsAre(2, 2));
  EXPECT_TRUE(even_replicas(3, shape).empty());
}

TEST(LaerLayout, IsTheCheaperCandidateForAnyPrices) {
  const Shape shape{.topology = {.num_ranks = 4, .ranks_per_node = 2}, .slots_per_rank = 6};
  Random random(3);
  int even_won = 0;
  int heap_won = 0;
  for (int i = 0; i < 200; ++i) {
    Array<std::int64_t, 2> by_source({4, 6});
    for (auto& tokens : by_source.flat()) tokens = random.below(1 + random.below(100));
    std::vector<std::int64_t> load(6);
    for (int r = 0; r < 4; ++r) {
      for (int e = 0; e < 6; ++e) load[e] += by_source(r, e);
    }
    for (const Prices& prices : {Prices{}, Prices{.seconds_per_token = 0}, Prices{.bytes_per_token = 0}}) {
      const auto seconds = [&](const Array<ExpertId, 2>& layout) {
        return seconds_of(route_inside_first(by_source, layout, shape.topology), prices);
      };
      const double even = seconds(place_replicas(load, even_replicas(6, shape), shape));
      const double heap = seconds(place_replicas(load, heap_replicas(load, shape), shape));
      EXPECT_EQ(seconds(best_layout(by_source, shape, {.prices = prices})), std::min(even, heap));
      even_won += even < heap ? 1 : 0;
      heap_won += heap < even ? 1 : 0;
    }
  }
  EXPECT_GT(even_won, 20);
  EXPECT_GT(heap_won, 20);
}

TEST(LaerLayout, PlacesAllReplicasThatTheHeapCounts) {
  Random random(1);
  for (int i = 0; i < 300; ++i) {
    const int num_ranks = 1 + static_cast<int>(random.below(12));
    const Shape shape{
        .topology = {.num_ranks = num_ranks, .ranks_per_node = 1 + static_cast<int>(random.below(num_ranks))},
        .slots_per_rank = 1 + static_cast<int>(random.below(5))};
    const int num_slots = num_ranks * shape.slots_per_rank;
    std::vector<std::int64_t> load(1 + random.below(num_slots));
    for (auto& tokens : load) tokens = random.below(1000);
    const std::vector<int> replicas = heap_replicas(load, shape);
    const Array<ExpertId, 2> layout = place_replicas(load, replicas, shape);
    std::vector<int> found(load.size());
    for (const ExpertId e : layout.flat()) {
      if (e != kNoExpert) ++found[e.index()];
    }
    EXPECT_EQ(found, replicas);
    EXPECT_GE(std::ranges::min(replicas), 1);
    EXPECT_GT(std::accumulate(replicas.begin(), replicas.end(), 0), num_slots - shape.topology.num_nodes());
  }
}

// Two nodes. Counts 4 and 2 are multiples of 2, so two replicas move between them. Other moves are of one replica.
TEST(LaerLayout, PerturbationsKeepTheSumAndOneReplicaPerExpert) {
  const Shape shape{.topology = {.num_ranks = 4, .ranks_per_node = 2}, .slots_per_rank = 3};
  const std::vector<int> replicas = {4, 2, 3, 1};
  const auto perturbed = perturbed_replicas(replicas, 64, shape);
  EXPECT_EQ(perturbed, perturbed_replicas(replicas, 64, shape));
  EXPECT_TRUE(perturbed_replicas(replicas, 0, shape).empty());
  std::set<std::vector<int>> different(perturbed.begin(), perturbed.end());
  EXPECT_EQ(different.size(), perturbed.size());
  // e0 can give two to e1, but not vice versa. e0 and e1 can give one to e2 or e3, e2 one to any other, and e3 none.
  EXPECT_EQ(different, (std::set<std::vector<int>>{{2, 4, 3, 1},
                                                   {3, 2, 4, 1},
                                                   {3, 2, 3, 2},
                                                   {4, 1, 4, 1},
                                                   {4, 1, 3, 2},
                                                   {5, 2, 2, 1},
                                                   {4, 3, 2, 1},
                                                   {4, 2, 2, 2}}));
}

TEST(LaerLayout, PerturbationsNeverRaiseThePrice) {
  const Shape shape{.topology = {.num_ranks = 4, .ranks_per_node = 2}, .slots_per_rank = 5};
  Random random(5);
  int cheaper = 0;
  for (int i = 0; i < 40; ++i) {
    Array<std::int64_t, 2> by_source({4, 8});
    for (std::int64_t& tokens : by_source.flat()) tokens = static_cast<std::int64_t>(random.below(100));
    const auto seconds = [&](int perturbations) {
      const Search search{.perturbations = perturbations};
      const Array<ExpertId, 2> layout = best_layout(by_source, shape, search);
      return seconds_of(route_inside_first(by_source, layout, shape.topology), search.prices);
    };
    EXPECT_LE(seconds(8), seconds(0));
    if (seconds(8) < seconds(0)) ++cheaper;
  }
  EXPECT_GT(cheaper, 0);
}

}  // namespace
}  // namespace foremoe::laer
