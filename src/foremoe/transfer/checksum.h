#pragma once

// 64-bit checksum of copied bytes, computed during the copy. Detects lost, torn, displaced and flipped bytes. Does not
// protect against deliberate changes.
//
// Method. Memory is read in blocks of 64 bytes (eight words); the last block is padded with zeros. Word j of block i
// has a key k(i, j) = k(0, j) + i·g that is unique to its position. Modulo 2^64, each word x is added as
//   sum[j] += x        mix[j] += low32(x ^ k(i, j)) · high32(x ^ k(i, j))
// The result is a hash of the length, sums and mixes. A changed bit changes a sum. Swapped blocks change the mixes,
// since the terms depend on the position. The two additions and one multiplication per word take no longer than the
// memory accesses. All data passes through registers, so a large copy may use streaming stores, which do not read the
// destination first.
// Guarantee. Returns the same value on every processor.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace foremoe {

std::uint64_t checksum(std::span<const std::byte> bytes);  // never 0
std::uint64_t copy_and_checksum(std::byte* to, std::span<const std::byte> from);

inline constexpr std::size_t kChecksumBlock = 64;
inline constexpr std::size_t kChecksumWords = kChecksumBlock / sizeof(std::uint64_t);
inline constexpr std::uint64_t kChecksumKeyStep = 0x9E3779B97F4A7C15;  // odd, so keys repeat only after 2^64 blocks

struct ChecksumSums {
  alignas(64) std::array<std::uint64_t, kChecksumWords> sum{};
  alignas(64) std::array<std::uint64_t, kChecksumWords> mix{};
  alignas(64) std::array<std::uint64_t, kChecksumWords> key;  // of the next block
};

// Adds whole blocks to the sums and copies them, unless `to` is null.
using ChecksumBlocks = void (*)(ChecksumSums& sums, std::byte* to, const std::byte* from, std::size_t blocks);
void checksum_blocks_portable(ChecksumSums& sums, std::byte* to, const std::byte* from, std::size_t blocks);
ChecksumBlocks checksum_blocks_avx2();  // null if the processor lacks AVX2

// Uses the given kernel; for tests.
std::uint64_t checksum_with(ChecksumBlocks blocks, std::byte* to, std::span<const std::byte> from);

}  // namespace foremoe
