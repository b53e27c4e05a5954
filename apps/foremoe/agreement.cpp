#include "agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

namespace foremoe::cli {
namespace {

std::string text_of(const Facts& facts, const std::string& name) {
  const auto at = facts.find(name);
  return at == facts.end() || at->second.empty() ? "none" : at->second;
}

}  // namespace

std::optional<Difference> first_difference(const std::vector<Facts>& facts) {
  std::set<std::string> names;
  for (const Facts& of_rank : facts) {
    for (const auto& [name, text] : of_rank) names.insert(name);
  }
  for (const std::string& name : names) {
    std::map<std::string, std::vector<std::size_t>> ranks;  // by text
    for (std::size_t r = 0; r < facts.size(); ++r) ranks[text_of(facts[r], name)].push_back(r);
    if (ranks.size() <= 1) continue;
    std::vector<std::pair<std::string, std::vector<std::size_t>>> fewest_first(ranks.begin(), ranks.end());
    std::ranges::stable_sort(fewest_first, {}, [](const auto& entry) { return entry.second.size(); });
    std::vector<std::string> parts;
    for (const auto& [text, of_text] : fewest_first) {
      parts.push_back(fmt::format("{} on rank{} {}", text, of_text.size() == 1 ? "" : "s", fmt::join(of_text, ", ")));
    }
    return Difference{.name = name, .who = fmt::format("{}", fmt::join(parts, ", "))};
  }
  return {};
}

std::string to_bytes(const Facts& facts) {
  return nlohmann::json(facts).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Facts facts_from(const std::vector<std::byte>& bytes) {
  const auto* const text = reinterpret_cast<const char*>(bytes.data());
  return nlohmann::json::parse(text, text + bytes.size()).get<Facts>();
}

}  // namespace foremoe::cli
