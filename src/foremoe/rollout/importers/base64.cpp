#include "foremoe/rollout/importers/base64.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <algorithm>

namespace foremoe {

namespace {

constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr std::size_t kChunk = std::size_t{1} << 24;  // characters; OpenSSL counts in int

std::size_t padding_of(std::string_view text) { return text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0; }

}  // namespace

bool looks_like_base64(std::string_view text) {
  return !text.empty() && text.size() % 4 == 0 &&
         text.substr(0, text.size() - padding_of(text)).find_first_not_of(kAlphabet) == std::string_view::npos;
}

std::vector<std::byte> decode_base64(std::string_view text, const Where& where) {
  if (text.size() % 4 != 0) throw InputError(where, fmt::format("{} characters are no whole base64", text.size()));
  const std::size_t padding = padding_of(text);
  // OpenSSL skips blanks at the ends and reads '=' as zero anywhere: check before.
  const auto bad = text.substr(0, text.size() - padding).find_first_not_of(kAlphabet);
  if (bad != std::string_view::npos) throw InputError(where, fmt::format("character {} is not base64", bad));

  std::vector<std::byte> bytes(text.size() / 4 * 3);
  for (std::size_t at = 0; at < text.size(); at += kChunk) {
    const std::string_view chunk = text.substr(at, kChunk);
    EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data() + at / 4 * 3),
                    reinterpret_cast<const unsigned char*>(chunk.data()), static_cast<int>(chunk.size()));
  }
  bytes.resize(bytes.size() - padding);
  return bytes;
}

}  // namespace foremoe
