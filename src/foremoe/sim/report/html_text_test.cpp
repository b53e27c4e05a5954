#include "foremoe/sim/report/html_text.h"

#include <gtest/gtest.h>

namespace foremoe::report {
namespace {

TEST(HtmlText, WhatMarkupIsMadeOfBecomesText) {
  EXPECT_EQ(escaped("<script>alert('x')</script>"), "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;");
  EXPECT_EQ(escaped("a\"b & c"), "a&quot;b &amp; c");
  EXPECT_EQ(escaped("&lt;"), "&amp;lt;");
}

TEST(HtmlText, TextOfAllLanguagesStaysAsItIs) {
  EXPECT_EQ(escaped("ρ × µs 混合 🙂"), "ρ × µs 混合 🙂");
  EXPECT_EQ(escaped(""), "");
}

TEST(HtmlText, BytesThatAreNoUtf8AreReplacedOneByOne) {
  EXPECT_EQ(escaped("a\xFF\xFE"), "a\uFFFD\uFFFD");
  EXPECT_EQ(escaped("\xC3"), "\uFFFD") << "cut off";
  EXPECT_EQ(escaped("\xC0\xBC"), "\uFFFD\uFFFD") << "an overlong <";
  EXPECT_EQ(escaped("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD") << "a surrogate";
  EXPECT_EQ(escaped("\xF4\x90\x80\x80"), "\uFFFD\uFFFD\uFFFD\uFFFD") << "above U+10FFFF";
}

TEST(HtmlText, ANameCannotTurnTheDirectionOfWritingNorControlAnything) {
  EXPECT_EQ(escaped("txt\u202Egpj.exe"), "txt\uFFFDgpj.exe");
  EXPECT_EQ(escaped("a\u2066b"), "a\uFFFDb");
  EXPECT_EQ(escaped(std::string_view("a\0b\x1B", 4)), "a\uFFFDb\uFFFD");
  EXPECT_EQ(escaped("two\nlines\t."), "two\nlines\t.");
}

TEST(HtmlText, ShortenedCountsCharactersNotBytes) {
  EXPECT_EQ(num_characters("ρ混🙂a"), 4U);
  EXPECT_EQ(shortened("ρ混🙂a", 4), "ρ混🙂a");
  EXPECT_EQ(shortened("ρ混🙂a", 3), "ρ混…");
  EXPECT_EQ(shortened("abc", 0), "a…");
}

TEST(HtmlText, FittedTextIsNoWiderThanItsPlace) {
  const std::string name = "a-policy-with-a-name-that-nobody-can-read-on-a-phone";
  const std::string shown = fitted(name, 12, 100);
  EXPECT_LE(text_width(shown, 12), 100);
  EXPECT_TRUE(shown.ends_with("…"));
  EXPECT_EQ(fitted("eplb", 12, 100), "eplb");
  EXPECT_GT(text_width("混合", 12), text_width("ab", 12));
}

}  // namespace
}  // namespace foremoe::report
