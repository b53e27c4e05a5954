#include "foremoe/rollout/route_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstring>

namespace foremoe {

namespace {

constexpr std::size_t kVector = sizeof(__m256i);
static_assert(kVector <= kCopySlack);
using Vector = std::array<std::byte, kVector>;

// Returns the byte shuffle that rotates every row by `entries` entries. Rows do not cross 16-byte lanes, as the
// instruction requires.
template <std::size_t EntryBytes, std::size_t TopK>
constexpr Vector rotation(std::size_t entries) {
  constexpr std::size_t kRow = EntryBytes * TopK;
  static_assert(16 % kRow == 0);
  Vector from{};
  for (std::size_t i = 0; i < kVector; ++i) {
    const std::size_t row = i % 16 / kRow * kRow;
    from[i] = static_cast<std::byte>(row + (i % kRow + entries * EntryBytes) % kRow);
  }
  return from;
}

__attribute__((target("avx2"))) inline __m256i load(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

template <std::size_t EntryBytes>
__attribute__((target("avx2"))) inline __m256i equal(__m256i a, __m256i b) {
  if constexpr (EntryBytes == 1) return _mm256_cmpeq_epi8(a, b);
  if constexpr (EntryBytes == 2) return _mm256_cmpeq_epi16(a, b);
  if constexpr (EntryBytes == 4) return _mm256_cmpeq_epi32(a, b);
}

template <std::size_t EntryBytes>
__attribute__((target("avx2"))) inline __m256i maximum(__m256i a, __m256i b) {  // unsigned
  if constexpr (EntryBytes == 1) return _mm256_max_epu8(a, b);
  if constexpr (EntryBytes == 2) return _mm256_max_epu16(a, b);
  if constexpr (EntryBytes == 4) return _mm256_max_epu32(a, b);
}

template <std::size_t EntryBytes>
__attribute__((target("avx2"))) inline __m256i broadcast(int value) {
  if constexpr (EntryBytes == 1) return _mm256_set1_epi8(static_cast<char>(value));
  if constexpr (EntryBytes == 2) return _mm256_set1_epi16(static_cast<short>(value));
  if constexpr (EntryBytes == 4) return _mm256_set1_epi32(value);
}

// Each pair of entries is compared by some rotation, and rotations by i and TopK − i compare the same pairs. Half of
// the rotations are therefore sufficient.
template <std::size_t EntryBytes, std::size_t TopK>
__attribute__((target("avx2"))) bool clean_rows(const std::byte* rows, std::size_t bytes, int num_experts,
                                                std::byte* copy) {
  static constexpr std::array<Vector, 4> kRotations{rotation<EntryBytes, TopK>(1), rotation<EntryBytes, TopK>(2 % TopK),
                                                    rotation<EntryBytes, TopK>(3 % TopK),
                                                    rotation<EntryBytes, TopK>(4 % TopK)};
  static_assert(TopK / 2 <= kRotations.size());
  __m256i repeated = _mm256_setzero_si256();
  __m256i largest = _mm256_setzero_si256();
  Vector tail;
  for (std::size_t i = 0; i < bytes; i += kVector) {
    const std::byte* at = rows + i;
    if (bytes - i < kVector) {  // the last rows, padded with copies of the last one
      constexpr std::size_t kRow = EntryBytes * TopK;
      for (std::size_t j = 0; j < kVector; j += kRow) {
        std::memcpy(tail.data() + j, j < bytes - i ? at + j : rows + bytes - kRow, kRow);
      }
      at = tail.data();
    }
    const __m256i v = load(at);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(copy + i), v);
    largest = maximum<EntryBytes>(largest, v);
    for (std::size_t r = 0; r < TopK / 2; ++r) {
      const __m256i rotated = _mm256_shuffle_epi8(v, load(&kRotations[r]));
      repeated = _mm256_or_si256(repeated, equal<EntryBytes>(v, rotated));
    }
  }
  const __m256i limit = broadcast<EntryBytes>(num_experts - 1);
  const __m256i beyond = _mm256_xor_si256(maximum<EntryBytes>(largest, limit), limit);
  const __m256i fault = _mm256_or_si256(repeated, beyond);
  return _mm256_testz_si256(fault, fault) != 0;
}

template <std::size_t EntryBytes>
CleanRows for_top_k(int top_k) {
  if (top_k == 2) return clean_rows<EntryBytes, 2>;
  if (top_k == 4) return clean_rows<EntryBytes, 4>;
  if constexpr (EntryBytes <= 2) {
    if (top_k == 8) return clean_rows<EntryBytes, 8>;
  }
  return nullptr;
}

}  // namespace

CleanRows clean_rows_avx2(const RouteShape& shape) {
  if (!__builtin_cpu_supports("avx2")) return nullptr;
  switch (size_of(shape.type)) {
    case 1:
      return for_top_k<1>(shape.top_k);
    case 2:
      return for_top_k<2>(shape.top_k);
    default:
      return for_top_k<4>(shape.top_k);
  }
}

}  // namespace foremoe

#else

namespace foremoe {

CleanRows clean_rows_avx2(const RouteShape&) { return nullptr; }

}  // namespace foremoe

#endif
