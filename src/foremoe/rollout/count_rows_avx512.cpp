#include "foremoe/rollout/route_kernels.h"

// Counting without a scatter, for the most common shape: one byte per entry, top-8, at most 128 experts.
//
// Eight rows, one per 64-bit lane, become two words of bits each: bit e is set if the row contains expert e. Shifts by
// 64 or more produce 0, which drops the sentinel and ids outside the word. Counting then adds single bits, for 64
// experts of eight layers at once. Bit e of plane b stores bit b of counter e. Three full adders add four tokens. Eight
// planes count to 255 and are then unpacked.

#if defined(__x86_64__)

#if !defined(__clang__)  // g++ 12 warns about undefined values in its own intrinsics (gcc bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <algorithm>
#include <array>

#define FOREMOE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq")))

namespace foremoe {

namespace {

constexpr std::size_t kRows = 8;      // layers counted together: 8 rows of 8 bytes fill a vector
constexpr std::size_t kWords = 2;     // words of 64 experts
constexpr std::size_t kPlanes = 8;    // bits per counter
constexpr std::size_t kTogether = 4;  // tokens added together
constexpr std::size_t kTokensPerBlock = 255 / kTogether * kTogether;

struct Bits {
  __m512i word[kWords];
};

// Converts eight rows to bits. Clears `valid` unless each row is all sentinel, or distinct and in range.
FOREMOE_AVX512 inline __attribute__((always_inline)) Bits bits_of(const std::byte* rows, __m512i num_experts,
                                                                  bool& valid) {
  const __m512i v = _mm512_loadu_si512(rows);
  const __m512i one = _mm512_set1_epi64(1);
  Bits bits{{_mm512_setzero_si512(), _mm512_setzero_si512()}};
  __m512i rest = v;
  for (int k = 0; k < 8; ++k, rest = _mm512_srli_epi64(rest, 8)) {
    const __m512i id = _mm512_and_si512(rest, _mm512_set1_epi64(255));
    bits.word[0] = _mm512_or_si512(bits.word[0], _mm512_sllv_epi64(one, id));
    bits.word[1] = _mm512_or_si512(bits.word[1], _mm512_sllv_epi64(one, _mm512_sub_epi64(id, _mm512_set1_epi64(64))));
  }
  // Any two entries of a row are 1, 2, 3 or 4 places apart, cyclically.
  const __mmask64 repeated =
      _mm512_cmpeq_epi8_mask(v, _mm512_ror_epi64(v, 8)) | _mm512_cmpeq_epi8_mask(v, _mm512_ror_epi64(v, 16)) |
      _mm512_cmpeq_epi8_mask(v, _mm512_ror_epi64(v, 24)) | _mm512_cmpeq_epi8_mask(v, _mm512_ror_epi64(v, 32));
  const __mmask64 beyond = _mm512_cmpge_epu8_mask(v, num_experts);
  const __mmask8 missing = _mm512_cmpeq_epi64_mask(v, _mm512_set1_epi64(-1));
  valid = valid && ((repeated | beyond) & ~_mm512_movepi8_mask(_mm512_movm_epi64(missing))) == 0;
  return bits;
}

// Counters of eight layers and 64 experts.
struct Counters {
  __m512i plane[kPlanes];
};

FOREMOE_AVX512 inline __attribute__((always_inline)) __m512i add_bits(__m512i& sum, __m512i a, __m512i b) {
  const __m512i carry = _mm512_ternarylogic_epi64(sum, a, b, 0xe8);  // majority
  sum = _mm512_ternarylogic_epi64(sum, a, b, 0x96);                  // parity
  return carry;
}

FOREMOE_AVX512 inline __attribute__((always_inline)) void add(Counters& c, __m512i t0, __m512i t1, __m512i t2,
                                                              __m512i t3) {
  const __m512i twos = add_bits(c.plane[0], t0, t1);
  const __m512i more_twos = add_bits(c.plane[0], t2, t3);
  __m512i carry = add_bits(c.plane[1], twos, more_twos);
  for (std::size_t b = 2; b < kPlanes; ++b) {
    const __m512i next = _mm512_and_si512(c.plane[b], carry);
    c.plane[b] = _mm512_xor_si512(c.plane[b], carry);
    carry = next;
  }
}

// Adds the counters of one layer to its histogram of `experts` experts, at most 64.
FOREMOE_AVX512 void flush(const Counters& c, std::size_t row, std::uint16_t* histogram, std::size_t experts) {
  __m512i count = _mm512_setzero_si512();  // one byte per expert, built from the highest bit down
  for (std::size_t b = kPlanes; b-- > 0;) {
    alignas(64) std::array<std::uint64_t, kRows> bits;
    _mm512_store_si512(bits.data(), c.plane[b]);
    count = _mm512_add_epi8(count, count);
    count = _mm512_mask_add_epi8(count, bits[row], count, _mm512_set1_epi8(1));
  }
  alignas(64) std::array<std::uint8_t, 64> counts;
  _mm512_store_si512(counts.data(), count);
  for (std::size_t e = 0; e < experts; ++e) histogram[e] = static_cast<std::uint16_t>(histogram[e] + counts[e]);
}

// Counts at most kTokensPerBlock tokens. Processes eight layers at a time, so that counters stay in registers. The last
// group of eight ends with the last layer and may overlap the previous group; the overlap is flushed only once. The
// strided access defeats the hardware prefetcher, so the next block is prefetched line by line.
FOREMOE_AVX512 bool count_block(const RouteShape& shape, const std::byte* rows, std::size_t num_tokens,
                                std::uint16_t* histogram) {
  static constexpr auto kMissing = [] {
    std::array<std::byte, 8 * kRows> rows_without_route{};
    rows_without_route.fill(std::byte{0xff});
    return rows_without_route;
  }();
  const auto layers = static_cast<std::size_t>(shape.num_layers);
  const auto experts = static_cast<std::size_t>(shape.num_experts);
  const __m512i num_experts = _mm512_set1_epi8(static_cast<char>(shape.num_experts));
  const std::size_t token_bytes = shape.token_bytes();
  const std::byte* ahead = rows + num_tokens * token_bytes;
  bool valid = true;
  for (std::size_t counted = 0; counted < layers; counted = std::min(counted + kRows, layers)) {
    const std::size_t first = std::min(counted, layers - kRows);
    const std::byte* const group = rows + first * 8;
    Counters counters[kWords];
    for (Counters& c : counters) std::fill_n(c.plane, kPlanes, _mm512_setzero_si512());
    for (std::size_t t = 0; t < num_tokens; t += kTogether) {
      Bits bits[kTogether];
      for (std::size_t i = 0; i < kTogether; ++i, ahead += sizeof(__m512i)) _mm_prefetch(ahead, _MM_HINT_T1);
      for (std::size_t i = 0; i < kTogether; ++i) {  // rows past the end count as missing
        bits[i] = bits_of(t + i < num_tokens ? group + (t + i) * token_bytes : kMissing.data(), num_experts, valid);
      }
      for (std::size_t w = 0; w < kWords; ++w) {
        add(counters[w], bits[0].word[w], bits[1].word[w], bits[2].word[w], bits[3].word[w]);
      }
    }
    for (std::size_t row = counted - first; row < kRows; ++row) {
      std::uint16_t* const of_layer = histogram + (first + row) * experts;
      flush(counters[0], row, of_layer, std::min<std::size_t>(experts, 64));
      if (experts > 64) flush(counters[1], row, of_layer + 64, experts - 64);
    }
  }
  return valid;
}

bool count_rows(const RouteShape& shape, const std::byte* rows, std::size_t num_tokens, std::uint16_t* histogram) {
  for (std::size_t t = 0; t < num_tokens; t += kTokensPerBlock) {
    const std::size_t tokens = std::min(kTokensPerBlock, num_tokens - t);
    if (!count_block(shape, rows + t * shape.token_bytes(), tokens, histogram)) return false;
  }
  return true;
}

}  // namespace

CountRows count_rows_avx512(const RouteShape& shape) {
  const bool fits = shape.type == RouteType::kU8 && shape.top_k == 8 && shape.num_experts <= 128 &&
                    shape.num_layers >= static_cast<int>(kRows);
  const bool able =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return fits && able ? count_rows : nullptr;
}

}  // namespace foremoe

#else

namespace foremoe {

CountRows count_rows_avx512(const RouteShape&) { return nullptr; }

}  // namespace foremoe

#endif
