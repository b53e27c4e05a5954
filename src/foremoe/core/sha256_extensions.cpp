#include "foremoe/core/sha256.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

namespace foremoe {
namespace {

bool has_sha_extensions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kShaBit = 1U << 29;  // in EBX of leaf 7
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & kShaBit) != 0 && __builtin_cpu_supports("sse4.1");
}

// The processor stores the eight words of the state as ABEF and CDGH, and computes two rounds per instruction.
__attribute__((target("sha,sse4.1"))) void compress(Sha256State& state, const std::byte* block,
                                                    std::size_t num_blocks) {
  const auto load = [](const void* p) __attribute__((target("sha,sse4.1"))) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
  };
  const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i dcba = _mm_shuffle_epi32(load(state.data()), 0xb1);
  __m128i hgfe = _mm_shuffle_epi32(load(state.data() + 4), 0x1b);
  __m128i abef = _mm_alignr_epi8(dcba, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, dcba, 0xf0);
  for (; num_blocks > 0; --num_blocks, block += 64) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i w[4];
    for (std::size_t i = 0; i < 4; ++i) w[i] = _mm_shuffle_epi8(load(block + 16 * i), to_big_endian);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < 16; ++i) {  // four rounds each
      const __m128i keyed = _mm_add_epi32(w[i % 4], load(kSha256RoundConstants.data() + 4 * i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, keyed);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(keyed, 0x0e));
      if (i >= 12) continue;
      const __m128i middle = _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4);
      const __m128i early = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), middle);
      w[i % 4] = _mm_sha256msg2_epu32(early, w[(i + 3) % 4]);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  dcba = _mm_blend_epi16(feba, dchg, 0xf0);
  hgfe = _mm_alignr_epi8(dchg, feba, 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data()), dcba);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data() + 4), hgfe);
}

}  // namespace

Sha256Blocks sha256_blocks_extensions() { return has_sha_extensions() ? compress : nullptr; }

}  // namespace foremoe

#else

namespace foremoe {

Sha256Blocks sha256_blocks_extensions() { return nullptr; }

}  // namespace foremoe

#endif
