#include "foremoe/rollout/load_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

using testing::ElementsAre;

// load = 7 · (flat index).
LoadTable ramp(std::array<std::size_t, 4> shape) {
  LoadTable table{.load = Array<Tokens, 4>(shape), .top_k = 2, .ranks_per_node = 2, .name = "ramp"};
  std::int64_t next = 0;
  for (Tokens& t : table.load.flat()) t = Tokens{7 * next++};
  return table;
}

TEST(LoadTable, SumsOverSourceRanks) {
  const LoadTable table = ramp({2, 1, 3, 4});
  std::vector<std::int64_t> loads(4, -1);
  table.expert_loads(MicroStepId{1}, LayerId{0}, loads);
  EXPECT_THAT(loads, ElementsAre(7 * (12 + 16 + 20), 7 * (13 + 17 + 21), 7 * (14 + 18 + 22), 7 * (15 + 19 + 23)));
}

TEST(LoadTable, FoldsConsecutiveSourcesTogether) {
  const LoadTable table = ramp({2, 3, 6, 4});
  for (const int ranks : {1, 2, 3, 6}) {
    const LoadTable folded = fold_ranks(table, ranks);
    EXPECT_EQ(folded.num_ranks(), ranks);
    EXPECT_EQ(folded.ranks_per_node, std::min(2, ranks));
    for (std::size_t m = 0; m < 2; ++m) {
      for (std::size_t l = 0; l < 3; ++l) {
        Array<Tokens, 2> expected({static_cast<std::size_t>(ranks), 4});
        for (int r = 0; r < 6; ++r) {
          for (std::size_t e = 0; e < 4; ++e) expected(r / (6 / ranks), e) += table.load(m, l, r, e);
        }
        EXPECT_TRUE(std::ranges::equal(folded.load[m][l].flat(), expected.flat()));
      }
    }
  }
  EXPECT_THROW(fold_ranks(table, 4), InputError);
  EXPECT_THROW(fold_ranks(table, 0), InputError);
  EXPECT_THROW(fold_ranks(table, 12), InputError);
}

TEST(LoadTable, TakesTheFirstMicroStepsAndLayers) {
  const LoadTable table = ramp({3, 4, 2, 5});
  const LoadTable first = take_first(table, 2, 3);
  EXPECT_EQ(first.load.shape(), (std::array<std::size_t, 4>{2, 3, 2, 5}));
  for (std::size_t m = 0; m < 2; ++m) {
    for (std::size_t l = 0; l < 3; ++l) {
      EXPECT_TRUE(std::ranges::equal(first.load[m][l].flat(), table.load[m][l].flat()));
    }
  }
  EXPECT_EQ(take_first(table, 100, 100).load, table.load);
}

TEST(LoadTable, TakesNeighbouringRanksWithAllThatIsKnownOfThem) {
  LoadTable table = ramp({2, 3, 6, 4});
  table.experts_of_layer = {4, 3, 4};
  table.top_k_of_layer = {2, 1, 2};
  table.missing_rows = 50;
  table.tokens = Array<Tokens, 2>({2, 6});
  for (std::size_t i = 0; i < 12; ++i) table.tokens.flat()[i] = Tokens{10000 + static_cast<std::int64_t>(i)};
  const LoadTable part = take_ranks(table, 3, 2);
  ASSERT_EQ(part.load.shape(), (std::array<std::size_t, 4>{2, 3, 2, 4}));
  for (std::size_t m = 0; m < 2; ++m) {
    for (std::size_t l = 0; l < 3; ++l) {
      for (std::size_t r = 0; r < 2; ++r) {
        for (std::size_t e = 0; e < 4; ++e) EXPECT_EQ(part.load(m, l, r, e), table.load(m, l, r + 3, e));
      }
    }
  }
  EXPECT_THAT(part.tokens.flat(), ElementsAre(Tokens{10003}, Tokens{10004}, Tokens{10009}, Tokens{10010}));
  EXPECT_EQ(part.top_k, 2);
  EXPECT_EQ(part.name, "ramp");
  EXPECT_EQ(part.ranks_per_node, 2);
  EXPECT_EQ(take_ranks(table, 3, 1).ranks_per_node, 1);
  EXPECT_EQ(part.experts_of_layer, table.experts_of_layer);
  EXPECT_EQ(part.top_k_of_layer, table.top_k_of_layer);
  EXPECT_EQ(part.missing_rows, 17) << "50 · 40026 ÷ 120066 tokens";
  EXPECT_EQ(take_ranks(table, 0, 6).load, table.load);
}

TEST(LoadTable, TakesLayersFromTheMiddle) {
  LoadTable table = ramp({2, 3, 2, 2});
  table.top_k_of_layer = {1, 1, 1};
  table.experts_of_layer = {2, 1, 2};
  const LoadTable part = take_layers(table, 1, 2);
  EXPECT_EQ(part.load.shape(), (std::array<std::size_t, 4>{2, 2, 2, 2}));
  EXPECT_EQ(part.experts_of_layer, (std::vector{1, 2}));
  for (int m = 0; m < 2; ++m) {
    for (int l = 0; l < 2; ++l) EXPECT_TRUE(std::ranges::equal(part.load[m][l].flat(), table.load[m][l + 1].flat()));
  }
}

TEST(LoadTable, DividesRanksIntoConsecutiveMicroSteps) {
  LoadTable table = ramp({2, 2, 4, 3});
  table.ranks_per_node = 4;
  table.tokens = Array<Tokens, 2>({2, 4});
  for (std::size_t i = 0; i < 8; ++i) table.tokens.flat()[i] = Tokens{static_cast<std::int64_t>(i)};
  const LoadTable longer = in_more_micro_steps(table, 2);
  EXPECT_EQ(longer.load.shape(), (std::array<std::size_t, 4>{4, 2, 2, 3}));
  EXPECT_EQ(longer.ranks_per_node, 2);
  for (int m = 0; m < 4; ++m) {
    for (int r = 0; r < 2; ++r) {
      const int former = r + m % 2 * 2;
      EXPECT_EQ(longer.tokens(m, r), table.tokens(m / 2, former));
      for (int l = 0; l < 2; ++l) {
        EXPECT_TRUE(std::ranges::equal(longer.load.row(m, l, r), table.load.row(m / 2, l, former)));
      }
    }
  }
}

TEST(LoadTable, HasTheDigestOfItsLittleEndianBytes) {
  // hashlib.sha256((7 * numpy.arange(24, dtype="<i8")).tobytes()).hexdigest()
  EXPECT_EQ(load_digest(ramp({2, 1, 3, 4})), "8a48f90a7cb6dc54e7bfd8f67141ff501b8d81075673e4f880c75546c099cec1");
}

}  // namespace
}  // namespace foremoe
