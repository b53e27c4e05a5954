#include "foremoe/rollout/importers/text.h"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>

namespace foremoe {

namespace {

constexpr int kMaxDepth = 64;  // nesting of JSON
constexpr std::size_t kLongestMessage = 200;

}  // namespace

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const auto first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

Where with_field(Where where, std::string_view key) {
  where.field += fmt::format("{}{}", where.field.empty() ? "" : ": ", key);
  return where;
}

Where with_index(Where where, std::string_view index) {
  where.index += index;
  return where;
}

nlohmann::json parse_json(std::string_view text, const Where& where) {
  const auto bound_depth = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    if (depth > kMaxDepth) throw InputError(where, fmt::format("nests deeper than {}", kMaxDepth));
    return true;
  };
  try {
    return nlohmann::json::parse(text, bound_depth);
  } catch (const nlohmann::json::exception& e) {
    std::string_view what = e.what();  // "[json.exception.parse_error.101] parse error at …; last read: '…'"
    const auto begin = what.find("] ");
    if (begin != std::string_view::npos) what.remove_prefix(begin + 2);
    // The last token read may be megabytes of truncated base64.
    if (what.size() > kLongestMessage) what = what.substr(0, what.find("; last read: "));
    throw InputError(where, fmt::format("is not JSON: {}", what));
  }
}

std::int64_t integer_entry(const nlohmann::json& value, const Where& where) {
  if (!value.is_number_integer())
    throw InputError(where, fmt::format("should be an integer, not {}", value.type_name()));
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max()) {
    throw InputError(where, fmt::format("{} does not fit into 64 bits", value.get<std::uint64_t>()));
  }
  return value.get<std::int64_t>();
}

std::int64_t integer_member(const nlohmann::json& object, const char* key, std::int64_t low, std::int64_t high,
                            const Where& where) {
  const Where place = with_field(where, key);
  const auto found = object.find(key);
  if (found == object.end()) throw InputError(place, "is missing");
  const std::int64_t value = integer_entry(*found, place);
  if (value < low || value > high) {
    throw InputError(place, fmt::format("{} is not in [{}, {}]", value, low, high));
  }
  return value;
}

}  // namespace foremoe
