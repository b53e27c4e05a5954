#include "foremoe/cluster/toml_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "foremoe/core/error.h"
#include "foremoe/core/message_text.h"

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

// Returns the escape sequence of the UTF-8 character at the front of a string in double quotes.
static std::string escaped(std::string_view character) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(character[i]); };
  std::uint32_t code = byte(0) & (0xFFU >> (character.size() + 1));
  for (std::size_t i = 1; i < character.size(); ++i) code = code << 6U | (byte(i) & 0x3FU);
  return fmt::format("\\U{:08X}", code);
}

// Returns a TOML text that means the same, in ASCII. toml++ 3.3 has undefined behaviour where a character that is not
// ASCII is neither in a comment nor in a string, where TOML permits none. Throws InputError for such characters, and
// for those in strings without escapes or of several lines.
static std::string in_ascii(std::string_view text, const std::string& file) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  std::string ascii;
  std::size_t at = text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0;
  while (at < text.size()) {
    const std::size_t end = at + token_length(text.substr(at));
    const bool is_comment = text[at] == '#';
    const bool has_escapes = text[at] == '"' && num_quotes(text.substr(at)) == 1;
    while (at < end) {
      const std::string_view rest = text.substr(at, end - at);
      const std::string_view sequence = rest.substr(0, has_escapes && rest.front() == '\\' ? 2 : 1);
      const std::size_t bytes = character_bytes(text.substr(at));
      if (std::ranges::all_of(sequence, is_ascii)) {
        ascii += sequence;
        at += sequence.size();
      } else if (bytes > 1 && (is_comment || has_escapes)) {
        ascii += is_comment ? "?" : escaped(text.substr(at, bytes));
        at += bytes;
      } else {
        const auto line = 1 + std::ranges::count(text.substr(0, at), '\n');
        throw InputError({.file = file, .index = fmt::format("line {}", line)},
                         bytes == 0 ? "is not UTF-8"
                                    : "has a character that is not ASCII: write it in a comment, or in double quotes "
                                      "on one line");
      }
    }
  }
  return ascii;
}

toml::table parse_toml(std::string_view text, const std::string& file) {
  if (text.size() > kMostBytes) {
    throw InputError({.file = file}, fmt::format("has {} bytes, more than the {} permitted", text.size(), kMostBytes));
  }
  const std::string ascii = in_ascii(text, file);
  try {
    return toml::parse(ascii, file);
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
