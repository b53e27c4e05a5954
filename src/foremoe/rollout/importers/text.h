#pragma once

// Parsing of untrusted text: lines and JSON. Errors name the location.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "foremoe/core/error.h"

namespace foremoe {

std::string_view trimmed(std::string_view text);  // strips spaces, tabs and line ends on both sides

// Calls visit(line, "line 3") for each nonblank line. Lines count from 1, including blank lines.
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

// Parses one document, nested at most 64 deep. Throws InputError at `where` with the parser's position.
nlohmann::json parse_json(std::string_view text, const Where& where);

// Returns a required integer member in [low, high]. `where` names file and line; errors add the key as field.
std::int64_t integer_member(const nlohmann::json& object, const char* key, std::int64_t low, std::int64_t high,
                            const Where& where);

// Returns an id or count as a 64-bit integer. Throws InputError at `where` if the value is neither.
std::int64_t integer_entry(const nlohmann::json& value, const Where& where);

Where with_field(Where where, std::string_view key);    // "line 3: key"
Where with_index(Where where, std::string_view index);  // appended to the index

}  // namespace foremoe
