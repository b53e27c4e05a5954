#include "foremoe/core/message_text.h"

#include <fmt/format.h>

namespace foremoe {
namespace {

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; }

bool is_control(std::string_view character) {
  const auto last = static_cast<unsigned char>(character.back());
  return character.size() == 1 ? last < 0x20 || last == 0x7F : character < "\xC2\xA0";  // U+0080 to U+009F
}

}  // namespace

std::size_t character_bytes(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = at(0);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const std::size_t bytes = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (text.size() < bytes) return 0;
  for (std::size_t i = 1; i < bytes; ++i) {
    if (!continues_character(text[i])) return 0;
  }
  const unsigned second = at(1);
  const bool is_too_long = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
  const bool is_no_character = (first == 0xED && second > 0x9F) || (first == 0xF4 && second > 0x8F);
  return is_too_long || is_no_character ? 0 : bytes;
}

std::string printable(std::string_view text) {
  std::string all;
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    const std::string_view character = text.substr(0, bytes == 0 ? 1 : bytes);
    if (bytes > 0 && !is_control(character)) {
      all += character;
    } else if (character == "\n") {
      all += "\\n";
    } else {
      all += fmt::format("\\x{:02x}", static_cast<unsigned char>(character.back()));
    }
    text.remove_prefix(character.size());
  }
  return all;
}

std::string shortened(std::string text) {
  text = printable(text);
  if (text.size() > kLongestText) {
    constexpr std::size_t kTail = kLongestText / 5;
    std::size_t begin = kLongestText - kTail;  // start of the removed part
    std::size_t end = text.size() - kTail;
    while (begin > 0 && continues_character(text[begin])) --begin;
    while (end < text.size() && continues_character(text[end])) ++end;
    text = text.substr(0, begin) + "…" + text.substr(end);
  }
  return text;
}

}  // namespace foremoe
