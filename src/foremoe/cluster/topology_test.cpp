#include "foremoe/cluster/topology.h"

#include <gtest/gtest.h>

namespace foremoe {
namespace {

TEST(Topology, RanksOfMatchesNodeOfEvenIfTheLastNodeHasFewerRanks) {
  for (const Topology topology : {Topology{.num_ranks = 8, .ranks_per_node = 4},
                                  {.num_ranks = 7, .ranks_per_node = 3},
                                  {.num_ranks = 5, .ranks_per_node = 8},
                                  {.num_ranks = 3, .ranks_per_node = 1}}) {
    int next = 0;
    for (int n = 0; n < topology.num_nodes(); ++n) {
      const RankRange ranks = topology.ranks_of(NodeId{n});
      EXPECT_EQ(ranks.first, next);
      EXPECT_GT(ranks.size(), 0);
      for (int r = ranks.first; r < ranks.last; ++r) EXPECT_EQ(topology.node_of(RankId{r}), NodeId{n});
      next = ranks.last;
    }
    EXPECT_EQ(next, topology.num_ranks);
  }
}

}  // namespace
}  // namespace foremoe
