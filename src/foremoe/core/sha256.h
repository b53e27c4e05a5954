#pragma once

// SHA-256 (FIPS 180-4). A digest names the load that a plan was made for, and compares results bit by bit.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace foremoe {

class Sha256 {
 public:
  void update(std::span<const std::byte> bytes);
  std::string hex();  // 64 lower-case digits; once, after the last update

 private:
  static constexpr std::size_t kBlockBytes = 64;

  void compress(const std::byte* block);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlockBytes> pending_{};  // the bytes after the last whole block
  std::uint64_t num_bytes_ = 0;
};

std::string sha256_hex(std::span<const std::byte> bytes);

}  // namespace foremoe
