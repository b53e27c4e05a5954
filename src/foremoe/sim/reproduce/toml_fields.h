#pragma once

// A TOML table read key by key: what is missing, of another type, out of range or not known is an InputError that
// names file, key and place.

#include <toml++/toml.h>

#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "foremoe/core/option.h"

namespace foremoe {

class TomlFields {
 public:
  // `place` is how messages call the table: "input[2]", or empty for the file's own keys. Refers to the table.
  TomlFields(const toml::table& table, std::string file, std::string place);

  bool has(std::string_view key) const { return table_->contains(key); }

  // Nothing when the key is absent.
  std::optional<std::string> text(std::string_view key);
  std::optional<bool> truth(std::string_view key);
  std::optional<std::int64_t> integer(std::string_view key, std::int64_t least, std::int64_t most);
  std::optional<double> number(std::string_view key, double least = std::numeric_limits<double>::lowest(),
                               double most = std::numeric_limits<double>::max());
  std::optional<std::variant<double, std::string>> number_or_text(std::string_view key);
  std::vector<std::string> texts(std::string_view key);

  void set(const Option& option);  // where its name is a key

  std::string required_text(std::string_view key);
  std::string one_of(std::string_view key, const std::vector<std::string_view>& words, std::string_view otherwise);

  std::optional<TomlFields> table(std::string_view key);
  std::vector<TomlFields> tables(std::string_view key);  // [[key]]

  // Somebody else reads this key.
  void has_been_read(std::string_view key) { known_.emplace(key); }

  // Throws when a key was given that nobody asked for.
  void finish() const;

  [[noreturn]] void fail(std::string_view key, const std::string& what) const;

 private:
  const toml::node* find(std::string_view key);

  const toml::table* table_;
  std::string file_;
  std::string place_;
  std::set<std::string, std::less<>> known_;
};

}  // namespace foremoe
