#pragma once

// 64-bit checksum of what a copy moves, computed while it is copied. Not against an adversary: against lost, torn,
// displaced and flipped bytes.
//
// Method. Memory is read in blocks of 64 bytes, eight words each; the last block is filled up with zeros. For word j of
// block i, with a key k(i, j) = k(0, j) + i·g that is different at every place, modulo 2^64
//   sum[j] += x        mix[j] += low32(x ^ k(i, j)) · high32(x ^ k(i, j))
// and in the end a hash of length, sums and mixes. A changed bit changes its sum; blocks that changed places change
// the mixes, whose terms depend on the place. The work, two additions and one multiplication per word, is hidden
// behind the memory accesses; the loads go through registers anyway, so that a large copy may use streaming stores,
// which do not first read what they overwrite.
// Guarantee. The same value on every processor.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace foremoe {

std::uint64_t checksum(std::span<const std::byte> bytes);  // never 0
std::uint64_t copy_and_checksum(std::byte* to, std::span<const std::byte> from);

inline constexpr std::size_t kChecksumBlock = 64;
inline constexpr std::size_t kChecksumWords = kChecksumBlock / sizeof(std::uint64_t);
inline constexpr std::uint64_t kChecksumKeyStep = 0x9E3779B97F4A7C15;  // odd: a key returns after 2^64 blocks

struct ChecksumSums {
  alignas(64) std::array<std::uint64_t, kChecksumWords> sum{};
  alignas(64) std::array<std::uint64_t, kChecksumWords> mix{};
  alignas(64) std::array<std::uint64_t, kChecksumWords> key;  // of the next block
};

// Takes whole blocks in; `to` null: does not copy.
using ChecksumBlocks = void (*)(ChecksumSums& sums, std::byte* to, const std::byte* from, std::size_t blocks);
void checksum_blocks_portable(ChecksumSums& sums, std::byte* to, const std::byte* from, std::size_t blocks);
ChecksumBlocks checksum_blocks_avx2();  // null where the processor is another

// With kernels of the caller's choice, for tests.
std::uint64_t checksum_with(ChecksumBlocks blocks, std::byte* to, std::span<const std::byte> from);

}  // namespace foremoe
