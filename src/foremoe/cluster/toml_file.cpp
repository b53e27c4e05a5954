#include "foremoe/cluster/toml_file.h"

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/core/error.h"

namespace foremoe {

constexpr std::size_t kMostBytes = std::size_t{1}
                                   << 16;  // tens of times a file's size; toml++ recurses for dotted keys

toml::table parse_toml(std::string_view text, const std::string& file) {
  if (text.size() > kMostBytes) {
    throw InputError({.file = file}, fmt::format("has {} bytes, more than the {} permitted", text.size(), kMostBytes));
  }
  try {
    return toml::parse(text, file);
  } catch (const toml::parse_error& error) {
    throw InputError({.file = file, .index = fmt::format("line {}", error.source().begin.line)},
                     fmt::format("is not TOML: {}", error.description()));
  }
}

std::string line_of(const toml::node& node) { return fmt::format("line {}", node.source().begin.line); }

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

std::string read_toml_name(const toml::table& root, const std::string& file) {
  const toml::node* const node = root.get("name");
  if (node == nullptr) throw InputError({.file = file, .field = "name"}, "is missing");
  const Where where{.file = file, .field = "name", .index = line_of(*node)};
  const auto* const text = node->as_string();
  if (text == nullptr || text->get().empty()) throw InputError(where, "must be a name in quotes");
  if (std::ranges::any_of(text->get(), is_control)) throw InputError(where, "has a control character");
  return text->get();
}

}  // namespace foremoe
