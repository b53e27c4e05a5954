#include "foremoe/core/long_text.h"

namespace foremoe {

// Returns whether the byte is the first of a UTF-8 character.
static bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }

std::string shortened(std::string text) {
  if (text.size() <= kLongestText) return text;
  constexpr std::size_t kTail = kLongestText / 5;
  std::size_t begin = kLongestText - kTail;  // start of the removed part
  std::size_t end = text.size() - kTail;
  while (begin > 0 && !begins_character(text[begin])) --begin;
  while (end < text.size() && !begins_character(text[end])) ++end;
  return text.substr(0, begin) + "…" + text.substr(end);
}

}  // namespace foremoe
