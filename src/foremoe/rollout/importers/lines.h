#pragma once

// The lines of a text in memory, without their ends, blank ones left out.

#include <cstddef>
#include <string>
#include <string_view>

namespace foremoe {

inline std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const auto first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

// visit(line, "line 3") for each line that is not blank; numbers count from 1, blank lines included.
template <class Visit>
void for_each_line(std::string_view text, Visit&& visit) {
  for (std::size_t number = 1; !text.empty(); ++number) {
    const auto end = text.find('\n');
    if (const std::string_view line = trimmed(text.substr(0, end)); !line.empty())
      visit(line, "line " + std::to_string(number));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
}

}  // namespace foremoe
