#pragma once

// Experiment files for tests: what stands ahead of columns, inputs and systems in each, and a text with one place
// changed.

#include <string>
#include <string_view>

namespace foremoe::test {

inline constexpr std::string_view kExperimentHead = R"(
title = "A hot rank"
source = "nowhere"
about = "About."
reading = "Reading."
finding = "Finding."
)";

inline std::string with(std::string text, std::string_view from, std::string_view to) {
  return text.replace(text.find(from), from.size(), to);
}

}  // namespace foremoe::test
