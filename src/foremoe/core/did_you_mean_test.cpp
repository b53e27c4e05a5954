#include "foremoe/core/did_you_mean.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace foremoe {
namespace {

const std::vector<std::string> kNames{"plan", "pack", "compare", "--guest-slots", "--guest", "--policy-option"};

TEST(DidYouMean, SuggestsTheNameThatIsOneEditAway) {
  EXPECT_EQ(did_you_mean("--guest-slot", kNames), "; did you mean --guest-slots?");
  EXPECT_EQ(did_you_mean("plann", kNames), "; did you mean plan?");
  EXPECT_EQ(did_you_mean("pln", kNames), "; did you mean plan?");
  EXPECT_EQ(did_you_mean("pack", kNames), "; did you mean pack?");
}

TEST(DidYouMean, CountsAnExchangeOfNeighboursAsOneEdit) {
  EXPECT_EQ(did_you_mean("plna", kNames), "; did you mean plan?");
  EXPECT_EQ(did_you_mean("lpan", kNames), "; did you mean plan?");
  EXPECT_EQ(did_you_mean("naplp", kNames), "");
}

TEST(DidYouMean, PermitsAnErrorInEveryThreeCharacters) {
  EXPECT_EQ(did_you_mean("--gest-solts", kNames), "; did you mean --guest-slots?");
  EXPECT_EQ(did_you_mean("--policies", std::vector<std::string>{"--policy", "--plot"}), "; did you mean --policy?");
  EXPECT_EQ(did_you_mean("cxmpxxe", kNames), "");
}

TEST(DidYouMean, CompletesAWordThatStartsAName) {
  EXPECT_EQ(did_you_mean("comp", kNames), "; did you mean compare?");
  EXPECT_EQ(did_you_mean("--poli", kNames), "; did you mean --policy-option?");
  EXPECT_EQ(did_you_mean("--pol", kNames), "");
  EXPECT_EQ(did_you_mean("com", kNames), "");
}

TEST(DidYouMean, IgnoresCase) {
  EXPECT_EQ(did_you_mean("PLAN", kNames), "; did you mean plan?");
  EXPECT_EQ(did_you_mean("qwen3-30b", std::vector<std::string>{"Qwen3-30B-A3B"}), "; did you mean Qwen3-30B-A3B?");
}

TEST(DidYouMean, SaysNothingWithoutASimilarName) {
  EXPECT_EQ(did_you_mean("frobnicate", kNames), "");
  EXPECT_EQ(did_you_mean("", kNames), "");
  EXPECT_EQ(did_you_mean("plan", {}), "");
}

}  // namespace
}  // namespace foremoe
