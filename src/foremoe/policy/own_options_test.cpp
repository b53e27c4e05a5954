// Tests that options of single systems are set on copies, in any order, and either all or none.

#include "foremoe/policy/own_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

TEST(OwnOptions, AreSetOnACopyAndNeverOnTheRegisteredPolicy) {
  PolicyWithOptions feplb = policy_with_options(policy_named("feplb"));
  option_named(feplb.options, "try_smaller").set("1");
  EXPECT_EQ(feplb.policy->name(), "feplb-smaller") << "the variant is the system with that option";
  EXPECT_EQ(policy_named("feplb").name(), "feplb");
  PolicyWithOptions another = policy_with_options(policy_named("feplb"));
  EXPECT_EQ(option_named(another.options, "try_smaller").initial, "0");
}

TEST(OwnOptions, AcceptTheirDefaultsAndRejectInvalidValues) {
  int num_options = 0;
  for (const Policy* const registered : all_policies()) {
    PolicyWithOptions copy = policy_with_options(*registered);
    for (const Option& option : copy.options) {
      ++num_options;
      EXPECT_FALSE(option.help.empty()) << registered->name() << ", " << option.name;
      if (!option.initial.empty()) option.set(option.initial);
      EXPECT_THROW(option.set("no value"), InputError) << registered->name() << ", " << option.name;
    }
    EXPECT_EQ(copy.policy->name(), registered->name());
  }
  EXPECT_GT(num_options, 30);
}

TEST(OwnOptions, AreTheSameForAVariantAndItsSystem) {
  const auto names = [](const char* policy) {
    std::vector<std::string> all;
    for (const Option& option : policy_with_options(policy_named(policy)).options) all.push_back(option.name);
    return all;
  };
  EXPECT_EQ(names("feplb"), names("feplb-smaller"));
}

TEST(OwnOptions, AreRejectedInEitherOrderIfTheyExcludeEachOther) {
  for (const auto& [first, second] : {std::pair("solver=exact", "alpha_ranks=1"), {"alpha_nodes=1", "solver=exact"}}) {
    try {
      (void)policies_with_options({&policy_named("finemoe")}, {first, second});
      FAIL() << first << ", " << second;
    } catch (const InputError& error) {
      EXPECT_EQ(error.where().field, "policy_option");
      EXPECT_THAT(error.problem(), AllOf(StartsWith("solver: "), HasSubstr("alpha_")));
    }
  }
}

TEST(OwnOptions, LeaveAnUnsetWeightAtZeroIfTheOtherIsSet) {
  const auto seconds = [](const std::vector<std::string>& options) {
    return policies_with_options({&policy_named("finemoe")}, options)
        .front()
        .policy->online()
        .planning_seconds_per_slot;
  };
  EXPECT_GT(seconds({"alpha_ranks=1"}), seconds({})) << "either weight makes it LP 4, which takes longer";
  EXPECT_EQ(seconds({"alpha_nodes=0"}), seconds({"alpha_ranks=1", "alpha_nodes=1"}));
}

}  // namespace
}  // namespace foremoe
