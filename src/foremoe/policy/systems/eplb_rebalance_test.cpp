#include "foremoe/policy/systems/eplb.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

namespace foremoe {
namespace {

using Table = std::vector<std::vector<std::int64_t>>;

Array<std::int64_t, 2> array_of(const Table& rows) {
  Array<std::int64_t, 2> array({rows.size(), rows.front().size()});
  for (std::size_t r = 0; r < rows.size(); ++r) std::ranges::copy(rows[r], array.row(r).begin());
  return array;
}

// Returns [layer][replica], rank by rank, as the reference does.
Table map_of(const EplbPlacement& placement) {
  Table map(placement.slot_expert.extent(0));
  for (std::size_t l = 0; l < map.size(); ++l) {
    for (const ExpertId e : placement.slot_expert.view()[l].flat()) map[l].push_back(e.value);
  }
  return map;
}

Table counts_of(const EplbPlacement& placement) {
  Table counts(placement.num_replicas.extent(0));
  for (std::size_t l = 0; l < counts.size(); ++l) {
    const auto row = placement.num_replicas.row(l);
    counts[l].assign(row.begin(), row.end());
  }
  return counts;
}

TEST(EplbRebalance, MatchesTheExampleOfThePublicReference) {
  const Array<std::int64_t, 2> weight = array_of(
      {{90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86}, {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27}});
  const EplbPlacement placement =
      eplb_rebalance(weight, {.num_experts = 12, .num_replicas = 16, .num_ranks = 8, .num_nodes = 2, .num_groups = 4});
  EXPECT_EQ(map_of(placement), (Table{{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1},
                                      {7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}}));
}

TEST(EplbRebalance, MatchesTheRecordedCasesOfThePublicReference) {
  std::ifstream file("data/eplb-golden.json");
  ASSERT_TRUE(file.is_open());
  const nlohmann::json golden = nlohmann::json::parse(file);
  ASSERT_FALSE(golden["cases"].empty());
  for (const nlohmann::json& expected : golden["cases"]) {
    SCOPED_TRACE(expected["name"].get<std::string>());
    const Array<std::int64_t, 2> weight = array_of(expected["weight"].get<Table>());
    const EplbPlacement placement = eplb_rebalance(weight, {.num_experts = static_cast<int>(weight.extent(1)),
                                                            .num_replicas = expected["num_replicas"],
                                                            .num_ranks = expected["num_gpus"],
                                                            .num_nodes = expected["num_nodes"],
                                                            .num_groups = expected["num_groups"]});
    EXPECT_EQ(map_of(placement), expected["physical_to_logical_map"].get<Table>());
    EXPECT_EQ(counts_of(placement), expected["expert_count"].get<Table>());
  }
}

TEST(EplbRebalance, PlacesGloballyIfGroupsCannotBeDividedAmongNodes) {
  const Array<std::int64_t, 2> weight = array_of({{7, 1, 9, 3, 8, 2}});
  const EplbShape global{.num_experts = 6, .num_replicas = 12, .num_ranks = 6, .num_nodes = 1, .num_groups = 1};
  EplbShape undivided = global;
  undivided.num_nodes = 2;
  undivided.num_groups = 3;
  EXPECT_EQ(map_of(eplb_rebalance(weight, undivided)), map_of(eplb_rebalance(weight, global)));
}

TEST(EplbRebalance, GivesTiedReplicasToTheLowestExpert) {
  const Array<std::int64_t, 2> weight = array_of({{5, 5, 5, 5}});
  const EplbPlacement placement = eplb_rebalance(weight, {.num_experts = 4, .num_replicas = 6, .num_ranks = 2});
  EXPECT_EQ(counts_of(placement), (Table{{2, 2, 1, 1}}));
}

TEST(EplbRebalance, PacksTheLaterOfTwoEqualItemsFirst) {
  const Array<std::int64_t, 2> weight = array_of({{5, 5, 5, 5}});
  const EplbPlacement placement = eplb_rebalance(weight, {.num_experts = 4, .num_replicas = 4, .num_ranks = 2});
  EXPECT_EQ(map_of(placement), (Table{{3, 1, 2, 0}}));
}

TEST(EplbRebalance, GivesAllFurtherReplicasToTheOnlyLoadedExpert) {
  const Array<std::int64_t, 2> weight = array_of({{0, 100, 0, 0}});
  const EplbPlacement placement = eplb_rebalance(weight, {.num_experts = 4, .num_replicas = 12, .num_ranks = 4});
  EXPECT_EQ(counts_of(placement), (Table{{1, 9, 1, 1}}));
}

TEST(EplbRebalance, FillsEverySlotIfAllWeightsAreZero) {
  const Array<std::int64_t, 2> weight = array_of({{0, 0, 0, 0}});
  const EplbPlacement placement = eplb_rebalance(weight, {.num_experts = 4, .num_replicas = 6, .num_ranks = 2});
  EXPECT_THAT(map_of(placement).front(), testing::UnorderedElementsAre(0, 0, 0, 1, 2, 3));
}

TEST(EplbRebalance, ReportsWhyAShapeCannotBePlaced) {
  using testing::HasSubstr;
  using testing::Optional;
  const EplbShape good{.num_experts = 12, .num_replicas = 16, .num_ranks = 8, .num_nodes = 2, .num_groups = 4};
  EXPECT_EQ(eplb_shape_error(good), std::nullopt);
  const auto with = [&](auto change) {
    EplbShape shape = good;
    change(shape);
    return eplb_shape_error(shape);
  };
  EXPECT_THAT(with([](EplbShape& s) { s.num_replicas = 8; }), Optional(HasSubstr("12 experts do not fit into 8")));
  EXPECT_THAT(with([](EplbShape& s) { s.num_replicas = 17; }), Optional(HasSubstr("over 8 ranks")));
  EXPECT_THAT(with([](EplbShape& s) { s.num_groups = 8; }), Optional(HasSubstr("over 8 groups")));
  EXPECT_THAT(with([](EplbShape& s) { s.num_groups = s.num_nodes = 3; }), Optional(HasSubstr("over 3 nodes")));
  EXPECT_THAT(with([](EplbShape& s) { s.num_nodes = 0; }), Optional(HasSubstr("at least 1")));
}

}  // namespace
}  // namespace foremoe
