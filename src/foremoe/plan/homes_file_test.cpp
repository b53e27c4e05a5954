#include "foremoe/plan/homes_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "foremoe/core/error.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/testing/random_plans.h"

namespace foremoe {
namespace {

using testing::HasSubstr;

Array<RankId, 2> home_of(const std::vector<int>& ranks, std::size_t layers) {
  Array<RankId, 2> home({layers, ranks.size() / layers});
  for (std::size_t i = 0; i < ranks.size(); ++i) home.flat()[i] = RankId{ranks[i]};
  return home;
}

TEST(HomesFile, SurvivesTheRoundTrip) {
  const std::string path = testing::TempDir() + "homes_file_round_trip.safetensors";
  const Homes homes{.home = home_of({1, 0, 2, 0, 2, 1, 0, 1, 2, 2, 1, 0}, 2),
                    .num_ranks = 3,
                    .ranks_per_node = 2,
                    .origin = "chosen from größer"};
  write_homes(homes, path);
  EXPECT_EQ(read_homes(path), homes);
  std::filesystem::remove(path);
}

TEST(HomesFile, RefusesDamagedFilesWithFieldAndIndex) {
  const auto where = [](std::vector<std::int32_t> ranks, std::vector<std::size_t> shape, Metadata metadata) {
    metadata.try_emplace("format", "foremoe.homes/1");
    metadata.try_emplace("ranks", "2");
    metadata.try_emplace("ranks_per_node", "2");
    const auto bytes = to_safetensors({tensor_data<std::int32_t>("home", ranks, shape)}, metadata);
    try {
      read_homes(Safetensors::parse(bytes, "f"));
    } catch (const InputError& error) {
      return error.where().field + error.where().index;
    }
    return std::string("accepted");
  };
  EXPECT_EQ(where({0, 1, 1, 0}, {2, 2}, {}), "accepted");
  EXPECT_EQ(where({0, 1, 1, 2}, {2, 2}, {}), "home[1, 1]");
  EXPECT_EQ(where({0, 1, -1, 0}, {2, 2}, {}), "home[1, 0]");
  EXPECT_EQ(where({0, 1, 1, 1}, {2, 2}, {}), "home[1, 1]");
  EXPECT_EQ(where({0, 1, 1}, {1, 3}, {}), "home");
  EXPECT_EQ(where({0, 1}, {2}, {}), "home");
  EXPECT_EQ(where({}, {0, 2}, {}), "home");
  EXPECT_EQ(where({}, {2, 0}, {}), "home");
  EXPECT_EQ(where({0, 1}, {1, 2}, {{"ranks", "0"}}), "__metadata__.ranks");
  EXPECT_EQ(where({0, 1}, {1, 2}, {{"ranks", "two"}}), "__metadata__.ranks");
  EXPECT_EQ(where({0, 1}, {1, 2}, {{"ranks_per_node", "3"}}), "__metadata__.ranks_per_node");
  EXPECT_EQ(where({0, 1}, {1, 2}, {{"format", "foremoe.homes/2"}}), "__metadata__.format");
  EXPECT_EQ(where({0, 1}, {1, 2}, {{"format", "foremoe.plan/1"}}), "") << "another kind of file";
}

TEST(HomesDigest, OfAPlanIsCheckedAgainstTheHomesBeforeIt) {
  const LoadTable load = test::random_load({}, 1);
  StepPlan plan = test::random_plan(load, {}, 1);
  plan.homes_digest = homes_digest(plan.home);
  EXPECT_TRUE(check_plan(plan, load, {}).ok()) << "the digest proves that no home moved";
  EXPECT_TRUE(check_plan(plan, load, {.initial_home = plan.home}).ok());
  Array<RankId, 2> other = plan.home;
  std::swap(other(0, 0), other(0, 7));
  const auto kinds = [&](const CheckOptions& options) {
    std::vector<ViolationKind> found;
    for (const Violation& v : check_plan(plan, load, options).violations) found.push_back(v.kind);
    return found;
  };
  EXPECT_THAT(kinds({.initial_home = other}), testing::Contains(ViolationKind::kDigest));
  plan.homes_digest = homes_digest(other);
  EXPECT_THAT(kinds({}), testing::ElementsAre(ViolationKind::kHomeMoves));

  const std::string path = testing::TempDir() + "homes_digest.safetensors";
  write_plan(plan, path);
  EXPECT_EQ(read_plan(path).homes_digest, plan.homes_digest);
  plan.homes_digest = "abc";
  write_plan(plan, path);
  try {
    read_plan(path);
    ADD_FAILURE() << "accepted";
  } catch (const InputError& error) {
    EXPECT_EQ(error.where().field, "homes_digest");
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace foremoe
