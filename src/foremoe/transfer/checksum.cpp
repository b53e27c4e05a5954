#include "foremoe/transfer/checksum.h"

#include <cstring>

namespace foremoe {

namespace {

// Keys of block 0: the first eight outputs of SplitMix64 with seed 0.
constexpr std::array<std::uint64_t, kChecksumWords> kFirstKeys = {
    0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC,
    0x1B39896A51A8749B, 0x53CB9F0C747EA2EA, 0x2C829ABE1F4532E1, 0xC584133AC916AB3C};

// Injective in each argument.
std::uint64_t fold(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * 0xBF58476D1CE4E5B9;
  return hash ^ (hash >> 31);
}

ChecksumBlocks fastest() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return checksum_blocks_portable;  // so that the sanitizers see its accesses
#else
  const ChecksumBlocks avx2 = checksum_blocks_avx2();
  return avx2 != nullptr ? avx2 : checksum_blocks_portable;
#endif
}

ChecksumBlocks chosen() {
  static const ChecksumBlocks blocks = fastest();
  return blocks;
}

}  // namespace

void checksum_blocks_portable(ChecksumSums& sums, std::byte* to, const std::byte* from, std::size_t blocks) {
  ChecksumSums s = sums;
  for (std::size_t i = 0; i < blocks; ++i) {
    std::array<std::uint64_t, kChecksumWords> x;
    std::memcpy(x.data(), from + i * kChecksumBlock, kChecksumBlock);
    if (to != nullptr) std::memcpy(to + i * kChecksumBlock, x.data(), kChecksumBlock);
    for (std::size_t j = 0; j < kChecksumWords; ++j) {
      const std::uint64_t keyed = x[j] ^ s.key[j];
      s.sum[j] += x[j];
      s.mix[j] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
      s.key[j] += kChecksumKeyStep;
    }
  }
  sums = s;
}

std::uint64_t checksum_with(ChecksumBlocks blocks, std::byte* to, std::span<const std::byte> from) {
  ChecksumSums sums;
  sums.key = kFirstKeys;
  const std::size_t whole = from.size() / kChecksumBlock;
  blocks(sums, to, from.data(), whole);
  if (const auto rest = from.subspan(whole * kChecksumBlock); !rest.empty()) {
    std::array<std::byte, kChecksumBlock> last{};
    std::memcpy(last.data(), rest.data(), rest.size());
    checksum_blocks_portable(sums, nullptr, last.data(), 1);
    if (to != nullptr) std::memcpy(to + whole * kChecksumBlock, last.data(), rest.size());
  }
  std::uint64_t hash = fold(kChecksumKeyStep, from.size());
  for (const std::uint64_t word : sums.sum) hash = fold(hash, word);
  for (const std::uint64_t word : sums.mix) hash = fold(hash, word);
  return hash == 0 ? 1 : hash;
}

std::uint64_t checksum(std::span<const std::byte> bytes) { return checksum_with(chosen(), nullptr, bytes); }

std::uint64_t copy_and_checksum(std::byte* to, std::span<const std::byte> from) {
  return checksum_with(chosen(), to, from);
}

}  // namespace foremoe
