#include "foremoe/calibration/machine_speed.h"

#include <gtest/gtest.h>

namespace foremoe {
namespace {

MachineSpeed measure(int num_ranks) {
  return measure_machine({.num_ranks = num_ranks,
                          .shape = {.hidden = 16, .intermediate = 8},
                          .rows = 4,
                          .buffer = Bytes{1 << 16},
                          .seconds = 1e-4});
}

}  // namespace

TEST(MachineSpeed, RanksAsThreadsMeasureAllSpeedsTogether) {
  const MachineSpeed speed = measure(3);
  EXPECT_GT(speed.expert_flops_per_second, 0);
  EXPECT_GE(speed.best_flops_per_second, speed.expert_flops_per_second);
  EXPECT_GT(speed.moved_bytes_per_second, 0);
  EXPECT_GT(speed.operation_seconds, 0);
  EXPECT_GT(speed.exchange_bytes_per_second, 0);
  EXPECT_GT(speed.exchange_seconds, 0);
  EXPECT_GT(speed.copied_bytes_per_second, 0);
  EXPECT_GT(speed.copy_seconds, 0);
}

TEST(MachineSpeed, OneRankAsAThreadMeasuresNoExchange) {
  const MachineSpeed speed = measure(1);
  EXPECT_EQ(speed.exchange_bytes_per_second, 0);
  EXPECT_EQ(speed.exchange_seconds, 0);
  EXPECT_GT(speed.copied_bytes_per_second, 0);
}

}  // namespace foremoe
