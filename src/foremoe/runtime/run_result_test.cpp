#include "foremoe/runtime/run_result.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>

namespace foremoe {
namespace {

template <class T>
Array<T, 2> table(std::initializer_list<std::initializer_list<T>> rows) {
  Array<T, 2> result({rows.size(), rows.begin()->size()});
  std::size_t r = 0;
  for (const auto& row : rows) std::ranges::copy(row, result.row(r++).begin());
  return result;
}

TEST(RunFigures, ImbalanceIsTheLargestRankOverTheMeanOverTurnsThatHaveRows) {
  const Spread rho = imbalance(table<std::int64_t>({{4, 4}, {6, 2}, {0, 0}, {8, 0}}));
  EXPECT_DOUBLE_EQ(rho.mean, (1.0 + 1.5 + 2.0) / 3);
  EXPECT_DOUBLE_EQ(rho.p99, 1.5 + 0.98 * 0.5);  // interpolates between the second and third of three
  EXPECT_DOUBLE_EQ(rho.max, 2);
}

TEST(RunFigures, ImbalanceIsOneWithoutRows) {
  const Spread rho = imbalance(table<std::int64_t>({{0, 0}}));
  EXPECT_EQ(rho.mean, 1);
  EXPECT_EQ(rho.max, 1);
}

TEST(RunFigures, UseTheLargestRankPerTurnAndTheLeastRepeat) {
  TurnTable turns{.compute_seconds = Array<double, 3>({2, 2, 2}), .rows = table<std::int64_t>({{5, 1}, {2, 7}})};
  std::ranges::copy(table<double>({{1, 2, 4, 9}, {3, 1, 5, 3}}).flat(), turns.compute_seconds.flat().begin());
  EXPECT_EQ(critical_path_rows(turns), 12);
  EXPECT_EQ(compute_seconds_total(turns), 1 + 1 + 4 + 3);
}

}  // namespace
}  // namespace foremoe
