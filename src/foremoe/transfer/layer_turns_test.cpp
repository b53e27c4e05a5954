#include "foremoe/transfer/layer_turns.h"

#include <gtest/gtest.h>

#include "foremoe/transfer/test_engines.h"

namespace foremoe {
namespace {

// Two micro-steps of two layers: F0 F1 B1 B0 F0 F1 B1 B0.
LayerTurns two_layers() { return LayerTurns(test::turn_order({.micro_steps = 2, .layers = 2, .backward = true})); }

TEST(LayerTurns, FindsALayersNextTurn) {
  const LayerTurns turns = two_layers();
  EXPECT_EQ(turns.next(LayerId{0}, TurnId{0}), TurnId{3});
  EXPECT_EQ(turns.next(LayerId{0}, TurnId{3}), TurnId{4});
  EXPECT_EQ(turns.next(LayerId{1}, TurnId{0}), TurnId{1});
  EXPECT_EQ(turns.next(LayerId{1}, TurnId{6}), std::nullopt);
}

TEST(LayerTurns, ALeaseNeedsTheSegmentsThatItsTurnsRead) {
  const LayerTurns turns = two_layers();
  const Segment forward{.name = "forward", .elements = 1, .in_backward = false};
  const Segment backward{.name = "backward", .elements = 1, .in_forward = false};
  const auto lease = [](int arrives, int closes) {
    return ScheduledCopy{.layer = LayerId{1}, .arrives = TurnId{arrives}, .closes = TurnId{closes}};
  };
  EXPECT_TRUE(turns.needs(lease(1, 1), forward));
  EXPECT_FALSE(turns.needs(lease(1, 1), backward));
  EXPECT_FALSE(turns.needs(lease(2, 2), forward));
  EXPECT_TRUE(turns.needs(lease(2, 2), backward));
  EXPECT_TRUE(turns.needs(lease(2, 5), forward));
  EXPECT_TRUE(turns.needs(lease(1, 5), backward));
  EXPECT_TRUE(turns.needs(lease(8, 8), forward)) << "homes that are copied back";
  EXPECT_TRUE(turns.needs(lease(8, 8), backward));
}

}  // namespace
}  // namespace foremoe
