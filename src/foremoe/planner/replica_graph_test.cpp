#include "foremoe/planner/replica_graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "foremoe/core/random.h"

namespace foremoe::planner {
namespace {

std::vector<int> holders(const ReplicaGraph& graph, int expert) {
  std::vector<int> slots;
  for (int s = graph.first_holder(expert); s >= 0; s = graph.next_holder(s)) slots.push_back(s);
  return slots;
}

TEST(ReplicaGraph, NumbersSlotsRankByRank) {
  const ReplicaGraph graph(3, 4, 5);
  EXPECT_EQ(graph.num_ranks(), 3);
  EXPECT_EQ(graph.num_slots(), 12);
  EXPECT_EQ(graph.num_experts(), 5);
  EXPECT_EQ(graph.first_slot(2), 8);
  EXPECT_EQ(graph.rank_of(7), 1);
  EXPECT_EQ(graph.rank_of(8), 2);
}

TEST(ReplicaGraph, StartsEmpty) {
  const ReplicaGraph graph(2, 2, 3);
  for (int s = 0; s < 4; ++s) EXPECT_EQ(graph.expert_in(s), -1);
  for (int e = 0; e < 3; ++e) {
    EXPECT_EQ(graph.num_holders(e), 0);
    EXPECT_EQ(graph.first_holder(e), -1);
    EXPECT_EQ(graph.find(e, 0), -1);
  }
}

TEST(ReplicaGraph, ListsTheHoldersOfAnExpertLatestFirst) {
  ReplicaGraph graph(3, 2, 2);
  for (const int slot : {2, 0, 5}) graph.put(slot, 1);
  EXPECT_EQ(holders(graph, 1), (std::vector<int>{5, 0, 2}));
  graph.drop(0);
  EXPECT_EQ(holders(graph, 1), (std::vector<int>{5, 2}));
  graph.put(1, 1);
  EXPECT_EQ(holders(graph, 1), (std::vector<int>{1, 5, 2}));
}

// Compares both directions of the index with a plain array of slots. With 70 ranks, some share a shadow bit.
TEST(ReplicaGraph, IndexesEverySequenceOfPutsAndDropsBothWays) {
  for (const int ranks : {1, 2, 9, 70}) {
    constexpr int kSlots = 3;
    constexpr int kExperts = 6;
    Random random(ranks);
    ReplicaGraph graph(ranks, kSlots, kExperts);
    std::vector<int> expert_of_slot(graph.num_slots(), -1);
    for (int step = 0; step < 400; ++step) {
      const int slot = static_cast<int>(random.below(graph.num_slots()));
      const int expert = static_cast<int>(random.below(kExperts));
      const int rank = slot / kSlots;
      if (expert_of_slot[slot] >= 0) {
        graph.drop(slot);
        expert_of_slot[slot] = -1;
      } else if (graph.find(expert, rank) < 0) {
        graph.put(slot, expert);
        expert_of_slot[slot] = expert;
      }
      for (int e = 0; e < kExperts; ++e) {
        std::vector<int> expected;
        std::uint64_t shadow = 0;
        for (int s = 0; s < graph.num_slots(); ++s) {
          if (expert_of_slot[s] != e) continue;
          expected.push_back(s);
          shadow |= std::uint64_t{1} << (s / kSlots % 64);
          ASSERT_EQ(graph.find(e, s / kSlots), s);
        }
        std::vector<int> listed = holders(graph, e);
        std::sort(listed.begin(), listed.end());
        ASSERT_EQ(listed, expected);
        ASSERT_EQ(graph.num_holders(e), std::ssize(expected));
        ASSERT_EQ(graph.shadow(e), shadow);
      }
      std::vector<int> shared;
      for (int s = 0; s < graph.num_slots(); ++s) {
        ASSERT_EQ(graph.expert_in(s), expert_of_slot[s]);
        if (expert_of_slot[s] >= 0 && std::ranges::count(expert_of_slot, expert_of_slot[s]) > 1) shared.push_back(s);
      }
      std::vector<int> listed;
      for (int r = 0; r < ranks; ++r) std::ranges::copy(graph.shared_slots(r), std::back_inserter(listed));
      ASSERT_EQ(listed, shared);
    }
  }
}

}  // namespace
}  // namespace foremoe::planner
