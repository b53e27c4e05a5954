#include "foremoe/sim/report/html_text.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace foremoe::report {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
constexpr std::string_view kEllipsis = "\xE2\x80\xA6";

struct Character {
  std::string_view bytes;
  std::uint32_t code = 0;
  bool valid = false;
};

std::uint8_t byte_at(std::string_view text, std::size_t at) { return static_cast<std::uint8_t>(text[at]); }

// The first of a text that is not empty. What is no UTF-8 (overlong forms and surrogates included) is one byte,
// invalid.
Character first_character(std::string_view text) {
  const std::uint8_t lead = byte_at(text, 0);
  if (lead < 0x80) return {.bytes = text.substr(0, 1), .code = lead, .valid = true};
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  const Character invalid{.bytes = text.substr(0, 1)};
  if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return invalid;
  std::uint32_t code = lead & (0xFFU >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte_at(text, i) & 0xC0U) != 0x80U) return invalid;
    code = code << 6U | (byte_at(text, i) & 0x3FU);
  }
  constexpr std::array<std::uint32_t, 5> kLeast{0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
  if (code < kLeast.at(length) || code > 0x10FFFF || surrogate) return invalid;
  return {.bytes = text.substr(0, length), .code = code, .valid = true};
}

bool may_be_shown(std::uint32_t code) {
  const bool control = code < 0x20 || (code >= 0x7F && code < 0xA0);
  const bool turns_direction =
      (code >= 0x202A && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069) || code == 0x200E || code == 0x200F;
  return (!control || code == '\t' || code == '\n') && !turns_direction;
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Character c = first_character(text);
    text.remove_prefix(c.bytes.size());
    if (!c.valid || !may_be_shown(c.code)) {
      out += kReplacement;
    } else if (c.code == '&') {
      out += "&amp;";
    } else if (c.code == '<') {
      out += "&lt;";
    } else if (c.code == '>') {
      out += "&gt;";
    } else if (c.code == '"') {
      out += "&quot;";
    } else if (c.code == '\'') {
      out += "&#39;";
    } else {
      out += c.bytes;
    }
  }
  return out;
}

std::size_t num_characters(std::string_view text) {
  std::size_t n = 0;
  for (; !text.empty(); ++n) text.remove_prefix(first_character(text).bytes.size());
  return n;
}

std::string shortened(std::string_view text, std::size_t most) {
  if (num_characters(text) <= most) return std::string(text);
  std::string out;
  for (std::size_t n = 0; n < std::max<std::size_t>(most, 2) - 1 && !text.empty(); ++n) {
    const std::string_view bytes = first_character(text).bytes;
    out += bytes;
    text.remove_prefix(bytes.size());
  }
  return out.append(kEllipsis);
}

double text_width(std::string_view text, double font_size) {
  double em = 0;
  while (!text.empty()) {
    const Character c = first_character(text);
    text.remove_prefix(c.bytes.size());
    const bool narrow = c.code < 0x80 && std::string_view("iljtfrI.,:;'|!()[] -").find(static_cast<char>(c.code)) !=
                                             std::string_view::npos;
    const bool wide = c.code >= 0x1100 || c.code == 'm' || c.code == 'w' || c.code == 'M' || c.code == 'W';
    em += narrow ? 0.38 : wide ? 0.95 : 0.61;
  }
  return em * font_size;
}

std::string fitted(std::string_view text, double font_size, double width) {
  std::size_t most = num_characters(text);
  std::string out(text);
  while (most > 1 && text_width(out, font_size) > width) out = shortened(text, --most);
  return out;
}

}  // namespace foremoe::report
