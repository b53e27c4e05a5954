#include "foremoe/cluster/toml_file.h"

#include <fmt/format.h>

#include <algorithm>

#include "foremoe/core/error.h"

namespace foremoe {

constexpr std::size_t kMostBytes = std::size_t{1}
                                   << 16;  // tens of times a file's size; toml++ recurses for dotted keys

static bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }

// Returns the number of quotes that enclose the string at the front: 1, 3 around several lines, or 0 if there is none.
static std::size_t num_quotes(std::string_view text) {
  if (text.front() != '"' && text.front() != '\'') return 0;
  return text.size() > 2 && text[1] == text[0] && text[2] == text[0] ? 3 : 1;
}

// Returns the length of the comment or string at the front; 1 if there is none. Strings that do not end, which toml++
// refuses, reach to the end of the line or text.
static std::size_t token_length(std::string_view text) {
  if (text.front() == '#') return std::min(text.find('\n'), text.size());
  const std::size_t quotes = num_quotes(text);
  if (quotes == 0) return 1;
  const std::string_view end = text.substr(0, quotes);
  std::size_t at = quotes;
  while (at < text.size() && !text.substr(at).starts_with(end) && (quotes == 3 || text[at] != '\n')) {
    at += end.front() == '"' && text[at] == '\\' ? 2 : 1;
  }
  at += quotes;
  while (quotes == 3 && at < text.size() && text[at] == end.front()) ++at;  // quotes at the end of the string's text
  return std::min(at, text.size());
}

// toml++ 3.3 has undefined behaviour where a character that is not ASCII is neither in a comment nor in a string. TOML
// permits none there. Throws InputError for those, and for those in strings of several lines, where toml++ looks for
// white space.
static void expect_ascii_outside_of_strings(std::string_view text, const std::string& file) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  std::size_t at = text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0;
  while (at < text.size()) {
    const std::string_view rest = text.substr(at);
    const std::string_view token = rest.substr(0, token_length(rest));
    const auto wrong = std::ranges::find_if_not(token, is_ascii);
    if (wrong != token.end() && token.front() != '#' && num_quotes(token) != 1) {
      const auto line = 1 + std::ranges::count(text.begin(), wrong, '\n');
      throw InputError({.file = file, .index = fmt::format("line {}", line)},
                       "has a character that is not ASCII outside of comments and of strings in one line");
    }
    at += token.size();
  }
}

toml::table parse_toml(std::string_view text, const std::string& file) {
  if (text.size() > kMostBytes) {
    throw InputError({.file = file}, fmt::format("has {} bytes, more than the {} permitted", text.size(), kMostBytes));
  }
  expect_ascii_outside_of_strings(text, file);
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
