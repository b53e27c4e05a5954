#pragma once

// JSON from strangers: parsed with a bound on nesting, looked up with errors that name the place.

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "foremoe/core/error.h"

namespace foremoe {

// One document. Throws InputError at `where` with the parser's own position.
nlohmann::json parse_json(std::string_view text, const Where& where);

// A member that must be there and be an integer in [low, high]. `where` names file and line; the key becomes its field.
std::int64_t integer_member(const nlohmann::json& object, const char* key, std::int64_t low, std::int64_t high,
                            const Where& where);

// An entry as id or count: any 64-bit integer. Throws InputError at `where` otherwise.
std::int64_t integer_entry(const nlohmann::json& value, const Where& where);

Where with_field(Where where, std::string_view key);    // "line 3: key"
Where with_index(Where where, std::string_view index);  // appended to the index

}  // namespace foremoe
