#pragma once

// Text from strangers: lines and JSON, looked up with errors that name the place.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "foremoe/core/error.h"

namespace foremoe {

std::string_view trimmed(std::string_view text);  // without blanks, tabs and ends of lines around it

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

// One document, nested at most 64 deep. Throws InputError at `where` with the parser's own position.
nlohmann::json parse_json(std::string_view text, const Where& where);

// A member that must be there and be an integer in [low, high]. `where` names file and line; the key becomes its field.
std::int64_t integer_member(const nlohmann::json& object, const char* key, std::int64_t low, std::int64_t high,
                            const Where& where);

// An entry as id or count: any 64-bit integer. Throws InputError at `where` otherwise.
std::int64_t integer_entry(const nlohmann::json& value, const Where& where);

Where with_field(Where where, std::string_view key);    // "line 3: key"
Where with_index(Where where, std::string_view index);  // appended to the index

}  // namespace foremoe
