#include "foremoe/transfer/checksum.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace foremoe {

namespace {

constexpr std::size_t kStreamedBytes = std::size_t{1} << 20;  // larger copies would evict other data from the caches
constexpr std::size_t kAhead = 2048;                          // bytes; hardware prefetchers stop at page boundaries

enum class Store { kNone, kCached, kStreamed };

struct Half {  // of a block: four words
  __m256i sum, mix, key;
};

__attribute__((target("avx2"))) inline __m256i load(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

template <Store kStore>
__attribute__((target("avx2"))) inline void take(Half& half, std::byte* to, const std::byte* from) {
  const __m256i x = load(from);
  if constexpr (kStore == Store::kCached) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
  if constexpr (kStore == Store::kStreamed) _mm256_stream_si256(reinterpret_cast<__m256i*>(to), x);
  const __m256i keyed = _mm256_xor_si256(x, half.key);
  half.sum = _mm256_add_epi64(half.sum, x);
  half.mix = _mm256_add_epi64(half.mix, _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
  half.key = _mm256_add_epi64(half.key, _mm256_set1_epi64x(static_cast<long long>(kChecksumKeyStep)));
}

template <Store kStore>
__attribute__((target("avx2"))) void run(ChecksumSums& sums, std::byte* to, const std::byte* from, std::size_t blocks) {
  constexpr std::size_t kHalf = kChecksumBlock / 2;
  Half a{load(sums.sum.data()), load(sums.mix.data()), load(sums.key.data())};
  Half b{load(&sums.sum[4]), load(&sums.mix[4]), load(&sums.key[4])};
  for (std::size_t i = 0; i < blocks * kChecksumBlock; i += kChecksumBlock) {
    _mm_prefetch(reinterpret_cast<const char*>(from) + i + kAhead, _MM_HINT_T0);
    std::byte* const at = kStore == Store::kNone ? nullptr : to + i;
    take<kStore>(a, at, from + i);
    take<kStore>(b, kStore == Store::kNone ? nullptr : at + kHalf, from + i + kHalf);
  }
  if constexpr (kStore == Store::kStreamed) _mm_sfence();  // nothing else orders streaming stores
  const auto save = [](std::uint64_t * word, __m256i value) __attribute__((target("avx2"))) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(word), value);
  };
  save(sums.sum.data(), a.sum);
  save(&sums.sum[4], b.sum);
  save(sums.mix.data(), a.mix);
  save(&sums.mix[4], b.mix);
  save(sums.key.data(), a.key);
  save(&sums.key[4], b.key);
}

void checksum_blocks(ChecksumSums& sums, std::byte* to, const std::byte* from, std::size_t blocks) {
  if (to == nullptr) {
    run<Store::kNone>(sums, to, from, blocks);
  } else if (reinterpret_cast<std::uintptr_t>(to) % sizeof(__m256i) == 0 && blocks * kChecksumBlock >= kStreamedBytes) {
    run<Store::kStreamed>(sums, to, from, blocks);
  } else {
    run<Store::kCached>(sums, to, from, blocks);
  }
}

}  // namespace

ChecksumBlocks checksum_blocks_avx2() { return __builtin_cpu_supports("avx2") ? checksum_blocks : nullptr; }

}  // namespace foremoe

#else

namespace foremoe {

ChecksumBlocks checksum_blocks_avx2() { return nullptr; }

}  // namespace foremoe

#endif
