#include "foremoe/rollout/importers/base64.h"

#include <fmt/format.h>

#include <array>
#include <cstdint>

namespace foremoe {

namespace {

constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

// The six bits that a character of the alphabet stands for.
constexpr auto kBitsOf = [] {
  std::array<std::uint8_t, 256> bits{};
  for (std::size_t i = 0; i < kAlphabet.size(); ++i) bits[static_cast<std::uint8_t>(kAlphabet[i])] = i;
  return bits;
}();

std::size_t padding_of(std::string_view text) { return text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0; }

}  // namespace

bool looks_like_base64(std::string_view text) {
  return !text.empty() && text.size() % 4 == 0 &&
         text.substr(0, text.size() - padding_of(text)).find_first_not_of(kAlphabet) == std::string_view::npos;
}

std::vector<std::byte> decode_base64(std::string_view text, const Where& where) {
  if (text.size() % 4 != 0) throw InputError(where, fmt::format("{} characters are no whole base64", text.size()));
  const std::size_t padding = padding_of(text);
  const auto bad = text.substr(0, text.size() - padding).find_first_not_of(kAlphabet);
  if (bad != std::string_view::npos) throw InputError(where, fmt::format("character {} is not base64", bad));

  std::vector<std::byte> bytes(text.size() / 4 * 3);  // four characters are three bytes; '=' counts as zero bits
  for (std::size_t at = 0, out = 0; at < text.size(); at += 4, out += 3) {
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < 4; ++i) bits = bits << 6 | kBitsOf[static_cast<std::uint8_t>(text[at + i])];
    for (std::size_t i = 0; i < 3; ++i) bytes[out + i] = static_cast<std::byte>(bits >> (16 - 8 * i));
  }
  bytes.resize(bytes.size() - padding);
  return bytes;
}

}  // namespace foremoe
