#include "foremoe/core/error.h"

#include <gtest/gtest.h>

#include <string>

namespace foremoe {
namespace {

std::string as_option(std::string_view name) {
  std::string option = "--" + std::string(name);
  for (char& c : option) c = c == '_' ? '-' : c;
  return option;
}

TEST(InputError, StartsWithFileFieldAndIndex) {
  EXPECT_STREQ(InputError({}, "no file").what(), "no file");
  EXPECT_STREQ(InputError({.file = "a"}, "is empty").what(), "a: is empty");
  EXPECT_STREQ(InputError({.file = "a", .field = "load", .index = "[1, 2]"}, "is -1").what(), "a: load[1, 2]: is -1");
  EXPECT_STREQ(InputError({.file = "a", .field = "name", .index = "line 3"}, "is empty").what(),
               "a: name line 3: is empty");
  EXPECT_EQ(InputError({.file = "a", .field = "load"}, "is missing").problem(), "is missing");
}

// Python accepts only UTF-8, and a terminal obeys control characters.
TEST(InputError, EscapesWhatATerminalWouldObeyAndWhatIsNotUtf8) {
  const InputError error({.file = "a\x1b[2J", .field = "caf\u00e9", .index = "\x80"},
                         "is '\xed\xa0\x80 \xc0\xaf\xf0\x9f\x98\x80\xc2\x9b\xe2'");
  EXPECT_STREQ(error.what(), "a\\x1b[2J: café \\x80: is '\\xed\\xa0\\x80 \\xc0\\xaf\U0001F600\\x9b\\xe2'");
  EXPECT_EQ(InputError({}, error.what()).what(), std::string(error.what())) << "escaped twice";
}

TEST(InputError, SpellsArgumentsForTheReader) {
  EXPECT_EQ(message_of(InputError({.field = "guest_slots"}, "must be 1"), as_option), "--guest-slots: must be 1");
  EXPECT_EQ(message_of(InputError({.file = "a", .field = "top_k"}, "must be 1"), as_option), "a: top_k: must be 1");
  EXPECT_EQ(message_of(InputError({.file = "a"}, "give `layers` and `top_k`"), as_option),
            "a: give --layers and --top-k");
  EXPECT_EQ(message_of(InputError({.file = "a"}, "an odd ` stays"), as_option), "a: an odd ` stays");
}

TEST(InputError, ShortensLongTextsFromFiles) {
  std::string value = "§";
  while (value.size() < 100'000) value += "ß";
  const InputError error({.file = "plan", .field = value}, "'" + value + "' is no residency");
  const std::string text = error.what();
  EXPECT_LT(text.size(), 2020U);
  EXPECT_TRUE(text.starts_with("plan: §ß"));
  EXPECT_NE(text.find("ß: '§ß"), std::string::npos);
  EXPECT_NE(text.find("ß…ß"), std::string::npos) << "cut inside a character";
  EXPECT_TRUE(text.ends_with("ß' is no residency"));
  EXPECT_EQ(InputError({}, std::string(1000, 'x')).problem().size(), 1000U);
}

TEST(InputError, ARangeOfOneValueIsThatValue) {
  EXPECT_EQ(must_be_integer(16, 16), "must be 16");
  EXPECT_EQ(must_be_integer(0, 8), "must be an integer from 0 to 8");
}

}  // namespace
}  // namespace foremoe
