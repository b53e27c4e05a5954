#include "foremoe/sim/transfer_queues.h"

#include <gtest/gtest.h>

namespace foremoe {
namespace {

constexpr auto kFree = [](LinkId) { return 1.0; };

TEST(TransferQueuesTest, ServeTheEarliestDeadlineFirst) {
  TransferQueues queues(2);
  queues.add(LinkId{0}, /*deadline=*/7, 2.0);
  queues.add(LinkId{0}, /*deadline=*/3, 1.0);  // added later, due earlier
  EXPECT_EQ(queues.pending(LinkId{0}, 3), 1.0);
  EXPECT_EQ(queues.pending(LinkId{0}, 7), 3.0);
  queues.pass(0, 1.5, kFree);
  EXPECT_EQ(queues.pending(LinkId{0}, 3), 0);
  EXPECT_EQ(queues.pending(LinkId{0}, 7), 1.5);
  EXPECT_EQ(queues.most_pending(7), 1.5);
}

TEST(TransferQueuesTest, UseTheRemainingLinkCapacity) {
  TransferQueues queues(1);
  queues.keep_times();
  queues.add(LinkId{0}, 1, 1.0);
  queues.pass(10, 4.0, [](LinkId) { return 0.5; });  // a second of work at half the rate: done at 12
  EXPECT_EQ(queues.pending(LinkId{0}, 1), 0);
  EXPECT_DOUBLE_EQ(queues.done_at(LinkId{0}, 1), 12.0);
}

TEST(TransferQueuesTest, PauseWhileRowsUseTheWholeLink) {
  TransferQueues queues(1);
  queues.add(LinkId{0}, 1, 1.0);
  queues.pass(0, 5.0, [](LinkId) { return 0.0; });
  EXPECT_EQ(queues.pending(LinkId{0}, 1), 1.0);
}

}  // namespace
}  // namespace foremoe
