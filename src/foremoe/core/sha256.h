#pragma once

// SHA-256 (FIPS 180-4). Digests identify the load of a plan and compare results bit by bit.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace foremoe {

using Sha256State = std::array<std::uint32_t, 8>;

class Sha256 {
 public:
  void update(std::span<const std::byte> bytes);
  std::string hex();  // 64 lower-case digits; call once, after the last update

 private:
  static constexpr std::size_t kBlockBytes = 64;

  Sha256State state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlockBytes> pending_{};  // the bytes after the last whole block
  std::uint64_t num_bytes_ = 0;
};

std::string sha256_hex(std::span<const std::byte> bytes);

// Mix whole blocks of 64 bytes into the state. All implementations compute the same state.
using Sha256Blocks = void (*)(Sha256State& state, const std::byte* blocks, std::size_t num_blocks);
void sha256_blocks_portable(Sha256State& state, const std::byte* blocks, std::size_t num_blocks);
Sha256Blocks sha256_blocks_extensions();  // uses the processor's SHA extensions; null if it has none

extern const std::array<std::uint32_t, 64> kSha256RoundConstants;

}  // namespace foremoe
