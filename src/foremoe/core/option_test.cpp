#include "foremoe/core/option.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Returns the field and problem of the error for this text; empty if the option accepts the text.
std::string refusal(const Option& option, const std::string& text) {
  try {
    option.set(text);
  } catch (const InputError& error) {
    EXPECT_EQ(error.where().field, option.name);
    EXPECT_EQ(error.where().file, "");
    return error.problem();
  }
  return {};
}

TEST(IntegerOption, AcceptsWholeNumbersInRangeAndNamesTheRangeOtherwise) {
  int variable = 3;
  const Option option = integer_option({.name = "slots"}, variable, {0, 16});
  EXPECT_EQ(option.initial, "3");
  EXPECT_EQ(option.range, "0 … 16");
  for (const char* const text : {"0", "16", "+7"}) EXPECT_EQ(refusal(option, text), "") << text;
  EXPECT_EQ(variable, 7);
  EXPECT_EQ(refusal(option, "17"), "17 is not in 0 … 16");
  EXPECT_EQ(refusal(option, "-1"), "-1 is not in 0 … 16");
  EXPECT_EQ(refusal(option, "99999999999999999999"), "99999999999999999999 is not in 0 … 16");
  for (const char* const text : {"", "x", "1.5", "1 ", "0x1", "--1"}) {
    EXPECT_THAT(refusal(option, text), HasSubstr("is not a whole number")) << text;
  }
  EXPECT_EQ(variable, 7) << "what is refused changes nothing";
}

TEST(IntegerOption, NamesTheOnlyValidValue) {
  int variable = 16;
  EXPECT_EQ(refusal(integer_option({.name = "ranks"}, variable, {16, 16}), "8"), "8 is not 16");
}

TEST(SeedOption, AcceptsEvery64BitNumberAndNothingElse) {
  std::uint64_t seed = 0;
  const Option option = seed_option({.name = "seed"}, seed);
  EXPECT_EQ(refusal(option, "18446744073709551615"), "");
  EXPECT_EQ(seed, std::numeric_limits<std::uint64_t>::max());
  EXPECT_THAT(refusal(option, "18446744073709551616"), HasSubstr("is not in 0 … 18446744073709551615"));
  EXPECT_THAT(refusal(option, "-1"), HasSubstr("is not in 0 …"));
}

TEST(NumberOption, AcceptsFiniteNumbersInRange) {
  double variable = 0.5;
  const Option from_zero = number_option({.name = "x"}, variable, {.least = 0, .most = 2});
  EXPECT_EQ(from_zero.initial, "0.5");
  for (const char* const text : {"0", "2", "1e-3", "+1.5"}) EXPECT_EQ(refusal(from_zero, text), "") << text;
  EXPECT_EQ(variable, 1.5);
  EXPECT_EQ(refusal(from_zero, "-0.1"), "-0.1 is not in 0 … 2");
  EXPECT_EQ(refusal(from_zero, "inf"), "inf is not in 0 … 2");
  EXPECT_EQ(refusal(from_zero, "1e999"), "1e999 is not in 0 … 2");
  EXPECT_EQ(refusal(from_zero, "nan"), "'nan' is not a number");
  EXPECT_EQ(refusal(from_zero, "1x"), "'1x' is not a number");
  const Option above = number_option({.name = "x"}, variable, {.least = 0, .most = 2, .above = true});
  EXPECT_EQ(refusal(above, "0"), "0 is not above 0, at most 2");
}

TEST(WordOption, AcceptsItsWordsAndListsThemOtherwise) {
  char variable = 'b';
  const Option option = word_option<char>({.name = "w"}, variable, {{"one", 'a'}, {"two", 'b'}, {"three", 'c'}});
  EXPECT_EQ(option.initial, "two");
  EXPECT_EQ(refusal(option, "three"), "");
  EXPECT_EQ(variable, 'c');
  EXPECT_EQ(refusal(option, "four"), "'four', expected one, two or three");
}

TEST(IntegerOrWordOption, AcceptsACountOrAWord) {
  std::string seen;
  const Option option = integer_or_word_option(
      {.name = "limit"}, {0, 9}, {"none"},
      [&](std::optional<std::int64_t> n, const std::string& word) { seen = n ? std::to_string(*n) : word; });
  EXPECT_EQ(refusal(option, "4"), "");
  EXPECT_EQ(seen, "4");
  EXPECT_EQ(refusal(option, "none"), "");
  EXPECT_EQ(seen, "none");
  EXPECT_EQ(refusal(option, "some"), "'some' is not a whole number in 0 … 9, nor none");
  EXPECT_EQ(refusal(option, "10"), "10 is not in 0 … 9");
}

TEST(ListsOfOptions, AreSetByName) {
  bool flag = false;
  std::string text = "before";
  std::vector<std::string> list{"x"};
  std::vector<Option> options{flag_option({.name = "flag"}, flag), text_option({.name = "text"}, text),
                              list_option({.name = "list"}, list)};
  option_named(options, "flag").set("");
  option_named(options, "text").set("after");
  option_named(options, "list").set("a,b,,c");
  EXPECT_TRUE(flag);
  EXPECT_EQ(text, "after");
  EXPECT_THAT(list, ElementsAre("a", "b", "", "c"));
  EXPECT_EQ(options[2].initial, "x");
  EXPECT_THROW(option_named(options, "nobody").set(""), InputError);
}

TEST(CommandLineNames, HaveDashes) { EXPECT_EQ(command_line_name("min_tokens_per_guest"), "--min-tokens-per-guest"); }

}  // namespace
}  // namespace foremoe
