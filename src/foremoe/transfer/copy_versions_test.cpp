// No turn reads weights of another version than its own, by either path.

#include <gtest/gtest.h>

#include "foremoe/transfer/test_scripted_links.h"

namespace foremoe::test {
namespace {

using namespace std::chrono_literals;

TEST(TransferEngineThread, NeverUsesAStaleVersion) {
  for (const Path path : {Path::kHost, Path::kPeer}) {
    Cluster cluster = pair_with({one_copy(path)});
    cluster.write_homes(2);  // the owners' optimizer step is done; nobody has published it
    agree(cluster);
    ClusterRank rank(cluster, RankId{0}, {.version = 2, .attempts = 2, .timeout = 3ms});
    rank.engine().submit(TurnId{0});
    EXPECT_FALSE(rank.engine().wait(TurnId{0}));
    EXPECT_EQ(rank.engine().figures().copies, 0);
  }
}

TEST(TransferEngineThread, WaitsForTheOwnerToPublish) {
  for (const Path path : {Path::kHost, Path::kPeer}) {
    Cluster cluster = pair_with({one_copy(path)});
    cluster.write_homes(2);
    agree(cluster);
    ClusterRank rank(cluster, RankId{0}, {.version = 2});
    rank.engine().submit(TurnId{0});
    std::this_thread::sleep_for(2ms);
    cluster.publish_arena(0, 2);
    cluster.publish(RankId{1}, 2);
    EXPECT_TRUE(rank.engine().wait(TurnId{0}));
    EXPECT_TRUE(cluster.holds_all(RankId{0}, TurnId{0}));
    EXPECT_EQ(rank.engine().figures().failed_attempts, 0);
  }
}

TEST(TransferEngineThread, RefusesWhatItsOwnerHasSincePublishedAnew) {
  for (const Path path : {Path::kHost, Path::kPeer}) {
    Cluster cluster = pair_with({one_copy(path)});
    cluster.write_homes(2);
    cluster.publish_arena(0, 2);
    cluster.publish(RankId{1}, 2);
    agree(cluster);
    ClusterRank rank(cluster, RankId{0}, {.version = 1});
    rank.engine().submit(TurnId{0});
    EXPECT_FALSE(rank.engine().wait(TurnId{0}));
    EXPECT_EQ(rank.engine().figures().copies, 0);
  }
}

}  // namespace
}  // namespace foremoe::test
