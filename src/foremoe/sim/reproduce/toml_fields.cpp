#include "foremoe/sim/reproduce/toml_fields.h"

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/core/error.h"

namespace foremoe {

TomlFields::TomlFields(const toml::table& table, std::string file, std::string place)
    : table_(&table), file_(std::move(file)), place_(std::move(place)) {}

void TomlFields::fail(std::string_view key, const std::string& what) const {
  const std::string field = place_.empty() ? std::string(key) : fmt::format("{}.{}", place_, key);
  throw InputError({.file = file_, .field = field, .index = {}}, what);
}

const toml::node* TomlFields::find(std::string_view key) {
  known_.emplace(key);
  return table_->get(key);
}

std::optional<std::string> TomlFields::text(std::string_view key) {
  const toml::node* const node = find(key);
  if (node == nullptr) return {};
  if (!node->is_string()) fail(key, "expected a text");
  return node->as_string()->get();
}

std::optional<bool> TomlFields::truth(std::string_view key) {
  const toml::node* const node = find(key);
  if (node == nullptr) return {};
  if (!node->is_boolean()) fail(key, "expected true or false");
  return node->as_boolean()->get();
}

std::optional<std::int64_t> TomlFields::integer(std::string_view key, std::int64_t least, std::int64_t most) {
  const toml::node* const node = find(key);
  if (node == nullptr) return {};
  if (!node->is_integer()) fail(key, "expected an integer");
  const std::int64_t value = node->as_integer()->get();
  if (value < least || value > most) fail(key, fmt::format("{}, expected {} to {}", value, least, most));
  return value;
}

std::optional<double> TomlFields::number(std::string_view key, double least, double most) {
  const toml::node* const node = find(key);
  if (node == nullptr) return {};
  if (!node->is_number()) fail(key, "expected a number");
  const double value = *node->value<double>();
  if (!(value >= least && value <= most)) fail(key, fmt::format("{}, expected {} to {}", value, least, most));
  return value;
}

std::optional<std::variant<double, std::string>> TomlFields::number_or_text(std::string_view key) {
  const toml::node* const node = find(key);
  if (node == nullptr) return {};
  if (node->is_string()) return node->as_string()->get();
  return *number(key);
}

void TomlFields::set(const Option& option) {
  const toml::node* const node = find(option.name);
  if (node == nullptr) return;
  std::string value;
  if (node->is_string()) {
    value = node->as_string()->get();
  } else if (node->is_integer()) {
    value = fmt::format("{}", node->as_integer()->get());
  } else if (node->is_floating_point()) {
    value = fmt::format("{}", node->as_floating_point()->get());
  } else {
    fail(option.name, "expected a number or a text");
  }
  try {
    option.set(value);
  } catch (const InputError& error) {
    fail(option.name, error.problem());
  }
}

std::vector<std::string> TomlFields::texts(std::string_view key) {
  const toml::node* const node = find(key);
  if (node == nullptr) return {};
  if (!node->is_array()) fail(key, "expected a list of texts");
  std::vector<std::string> all;
  for (const toml::node& item : *node->as_array()) {
    if (!item.is_string()) fail(fmt::format("{}[{}]", key, all.size()), "expected a text");
    all.push_back(item.as_string()->get());
  }
  return all;
}

std::string TomlFields::required_text(std::string_view key) {
  auto value = text(key);
  if (!value || value->empty()) fail(key, "is missing");
  return *std::move(value);
}

std::string TomlFields::one_of(std::string_view key, const std::vector<std::string_view>& words,
                               std::string_view otherwise) {
  std::string value = text(key).value_or(std::string(otherwise));
  if (std::ranges::find(words, value) == words.end()) {
    fail(key, fmt::format("'{}', expected {}", value, fmt::join(words, ", ")));
  }
  return value;
}

std::optional<TomlFields> TomlFields::table(std::string_view key) {
  const toml::node* const node = find(key);
  if (node == nullptr) return {};
  if (!node->is_table()) fail(key, "expected a table");
  return TomlFields(*node->as_table(), file_, place_.empty() ? std::string(key) : fmt::format("{}.{}", place_, key));
}

std::vector<TomlFields> TomlFields::tables(std::string_view key) {
  const toml::node* const node = find(key);
  if (node == nullptr) return {};
  if (!node->is_array_of_tables()) fail(key, fmt::format("expected tables, [[{}]]", key));
  std::vector<TomlFields> all;
  for (const toml::node& item : *node->as_array()) {
    all.emplace_back(*item.as_table(), file_, fmt::format("{}[{}]", key, all.size()));
  }
  return all;
}

void TomlFields::finish() const {
  for (const auto& [key, node] : *table_) {
    if (!known_.contains(key.str())) fail(key.str(), "no such key, or none of use here");
  }
}

}  // namespace foremoe
