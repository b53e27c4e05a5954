#include "foremoe/core/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace foremoe {

// FIPS 180-4, section 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
const std::array<std::uint32_t, 64> kSha256RoundConstants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

namespace {

// The standard uses big-endian words. This code runs only on little-endian machines (safetensors.h).
std::uint32_t big_endian_word(const std::byte* bytes) {
  std::uint32_t word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return __builtin_bswap32(word);
}

Sha256Blocks fastest() {
  const Sha256Blocks extensions = sha256_blocks_extensions();
  return extensions != nullptr ? extensions : sha256_blocks_portable;
}

// Section 6.2.2, with the standard's variable names.
void compress_one(Sha256State& state, const std::byte* block) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t t = 0; t < 16; ++t) w[t] = big_endian_word(block + 4 * t);
  for (std::size_t t = 16; t < 64; ++t) {
    const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t t = 0; t < 64; ++t) {
    const std::uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + (g ^ (e & (f ^ g))) +
                             kSha256RoundConstants[t] + w[t];
    const std::uint32_t t2 = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) | (c & (a | b)));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<std::uint32_t, 8> mixed{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < state.size(); ++i) state[i] += mixed[i];
}

}  // namespace

void sha256_blocks_portable(Sha256State& state, const std::byte* blocks, std::size_t num_blocks) {
  for (; num_blocks > 0; --num_blocks, blocks += 64) compress_one(state, blocks);
}

void Sha256::update(std::span<const std::byte> bytes) {
  static const Sha256Blocks compress = fastest();
  std::size_t filled = num_bytes_ % kBlockBytes;
  num_bytes_ += bytes.size();
  if (filled != 0) {
    const auto head = bytes.first(std::min(bytes.size(), kBlockBytes - filled));
    std::ranges::copy(head, pending_.begin() + static_cast<std::ptrdiff_t>(filled));
    bytes = bytes.subspan(head.size());
    filled += head.size();
    if (filled < kBlockBytes) return;
    compress(state_, pending_.data(), 1);
  }
  const std::size_t whole = bytes.size() / kBlockBytes;
  compress(state_, bytes.data(), whole);
  bytes = bytes.subspan(whole * kBlockBytes);
  std::ranges::copy(bytes, pending_.begin());
}

// Appends a one bit, zeros up to the last eight bytes of a block, and the message's length in bits.
std::string Sha256::hex() {
  const std::uint64_t num_bits = __builtin_bswap64(8 * num_bytes_);
  constexpr std::size_t kLengthAt = kBlockBytes - sizeof num_bits;
  std::array<std::byte, 2 * kBlockBytes> padding{std::byte{0x80}};
  const std::size_t filled = num_bytes_ % kBlockBytes;
  const std::size_t num_padding = (filled < kLengthAt ? kLengthAt : kBlockBytes + kLengthAt) - filled;
  update(std::span(padding).first(num_padding));
  update(std::as_bytes(std::span(&num_bits, 1)));
  std::string digits;
  for (const std::uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) digits += "0123456789abcdef"[word >> shift & 15];
  }
  return digits;
}

std::string sha256_hex(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.hex();
}

}  // namespace foremoe
