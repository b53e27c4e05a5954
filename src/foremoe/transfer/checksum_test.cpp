#include "foremoe/transfer/checksum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "foremoe/core/random.h"

namespace foremoe {
namespace {

std::vector<std::byte> random_bytes(std::size_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::byte> bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.bits());
  return bytes;
}

TEST(Checksum, DetectsEveryFlippedBit) {
  for (const std::size_t n : {1U, 63U, 64U, 200U}) {
    std::vector<std::byte> bytes = random_bytes(n, n);
    const std::uint64_t whole = checksum(bytes);
    for (std::size_t bit = 0; bit < 8 * n; ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
      EXPECT_NE(checksum(bytes), whole) << "bit " << bit << " of " << n << " bytes";
      bytes[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
    }
  }
}

TEST(Checksum, DetectsExchangedBlocks) {
  std::vector<std::byte> bytes = random_bytes(64 * 40, 1);
  const std::uint64_t whole = checksum(bytes);
  for (std::size_t i = 0; i < 40; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const auto swap = [&] { std::swap_ranges(&bytes[64 * i], &bytes[64 * i] + 64, &bytes[64 * j]); };
      swap();
      EXPECT_NE(checksum(bytes), whole) << i << " and " << j;
      swap();
    }
  }
}

TEST(Checksum, DetectsExchangedBlocksThatDifferInOneSignBit) {
  std::vector<std::byte> bytes(64 * 4, std::byte{0});
  bytes[63] = std::byte{0x80};
  std::vector<std::byte> swapped(64 * 4, std::byte{0});
  swapped[64 * 2 + 63] = std::byte{0x80};
  EXPECT_NE(checksum(bytes), checksum(swapped));
}

TEST(Checksum, DetectsMissingAndZeroedEnds) {
  const std::vector<std::byte> bytes = random_bytes(1000, 2);
  const std::uint64_t whole = checksum(bytes);
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_NE(checksum(std::span(bytes).first(n)), whole) << n;
    std::vector<std::byte> zeroed = bytes;
    std::fill(zeroed.begin() + static_cast<std::ptrdiff_t>(n), zeroed.end(), std::byte{0});
    EXPECT_EQ(checksum(zeroed) == whole, zeroed == bytes) << n;
  }
  EXPECT_NE(checksum(std::vector<std::byte>(64)), checksum(std::vector<std::byte>(128)));
}

TEST(Checksum, IsTheSameForAllKernelsWithAndWithoutCopying) {
  for (const std::size_t n : {0U, 1U, 31U, 64U, 65U, 4096U, (1U << 20) - 1, (1U << 20) + 64 * 3 + 17}) {
    for (const std::size_t shift : {0U, 4U, 32U}) {  // the vector kernel uses other stores for unaligned memory
      const std::vector<std::byte> bytes = random_bytes(n + shift, n);
      const std::span<const std::byte> from = std::span(bytes).subspan(shift);
      const std::uint64_t expected = checksum_with(checksum_blocks_portable, nullptr, from);
      EXPECT_EQ(checksum(from), expected) << n;
      const auto check = [&](ChecksumBlocks blocks) {
        std::vector<std::byte> to(n + shift + 96, std::byte{0xA5});
        void* first = to.data();
        std::size_t space = to.size();
        std::byte* const at = static_cast<std::byte*>(std::align(32, n + 1, first, space)) + shift;
        if (blocks == nullptr) {
          EXPECT_EQ(copy_and_checksum(at, from), expected) << n;
        } else {
          EXPECT_EQ(checksum_with(blocks, at, from), expected) << n;
          EXPECT_EQ(checksum_with(blocks, nullptr, from), expected) << n;
        }
        EXPECT_TRUE(std::equal(from.begin(), from.end(), at)) << n;
        EXPECT_EQ(at[n], std::byte{0xA5}) << "wrote beyond " << n;
      };
      check(nullptr);
      check(checksum_blocks_portable);
      if (const ChecksumBlocks avx2 = checksum_blocks_avx2()) check(avx2);
    }
  }
}

// The values were computed independently from the header's description. If they changed, a build would reject data
// published by another build.
TEST(Checksum, HasKnownValues) {
  EXPECT_EQ(checksum({}), 10748934342431810960U);
  std::vector<std::byte> bytes(100);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  EXPECT_EQ(checksum(bytes), 5174475244801745781U);
}

}  // namespace
}  // namespace foremoe
