#include "foremoe/planner/token_assignment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace foremoe::planner {
namespace {

using testing::ElementsAre;

// Three ranks with two slots. Expert 0 is in slots 0, 2, 4; expert 1 in 5 and 1 (most recent first); expert 2 nowhere.
ReplicaGraph example() {
  ReplicaGraph graph(3, 2, 3);
  for (const int slot : {1, 5}) graph.put(slot, 1);
  for (const int slot : {4, 0, 2}) graph.put(slot, 0);
  return graph;
}

TEST(EqualSplit, GivesTheRemainderToTheLowestRanks) {
  Assignment assignment;
  split_equally(
      example(), std::vector<std::int64_t>{11, 5, 0}, [](int) { return 1; }, assignment);
  EXPECT_THAT(assignment.quota, ElementsAre(4, 3, 4, 0, 3, 2));
  EXPECT_THAT(assignment.rank_load, ElementsAre(7, 4, 5));
}

// Expert 0 has 0 + 3 + 1 parts of 11 ÷ 4 = 2 tokens. The three parts in slot 2 get the whole remainder of 3.
TEST(EqualSplit, WeighsReplicasByPartsAndSkipsReplicasWithoutParts) {
  Assignment assignment;
  const auto parts = [](int slot) { return slot == 0 ? 0 : slot == 2 ? 3 : 1; };
  split_equally(example(), std::vector<std::int64_t>{11, 0, 0}, parts, assignment);
  EXPECT_THAT(assignment.quota, ElementsAre(0, 0, 9, 0, 2, 0));
}

}  // namespace
}  // namespace foremoe::planner
