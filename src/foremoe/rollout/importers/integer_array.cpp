#include "foremoe/rollout/importers/integer_array.h"

#include <fmt/format.h>

#include <cstring>
#include <limits>

namespace foremoe {

namespace {

template <class T>
std::int64_t load_as(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return static_cast<std::int64_t>(value);
}

template <class T>
void add_rows(TraceAssembler& assembler, const IntegerArray& array) {
  const auto [tokens, layers, top_k] = array.shape;
  const std::array<std::uint64_t, 3> stride = array.fortran_order
                                                  ? std::array<std::uint64_t, 3>{1, tokens, tokens * layers}
                                                  : std::array<std::uint64_t, 3>{layers * top_k, top_k, 1};
  std::vector<std::int64_t> row(top_k);
  for (std::uint64_t t = 0; t < tokens; ++t) {
    for (std::uint64_t l = 0; l < layers; ++l) {
      const std::byte* at = array.bytes.data() + (t * stride[0] + l * stride[1]) * sizeof(T);
      for (std::uint64_t k = 0; k < top_k; ++k) row[k] = load_as<T>(at + k * stride[2] * sizeof(T));
      assembler.add_row(row);
    }
  }
}

// The whole size in bytes, or false when it does not fit in 64 bits.
bool size_in_bytes(const IntegerArray& array, std::uint64_t& size) {
  size = static_cast<std::uint64_t>(array.type.bytes);
  bool fits = true;
  for (const std::uint64_t extent : array.shape) fits &= !__builtin_mul_overflow(size, extent, &size);
  return fits;
}

}  // namespace

void add_sequence(TraceAssembler& assembler, const Where& where, const IntegerArray& array,
                  std::int32_t prompt_length) {
  const auto& shape = array.shape;
  std::uint64_t size = 0;
  if (!size_in_bytes(array, size) || size != array.bytes.size()) {
    throw InputError(where, fmt::format("[{}, {}, {}] of {} bytes each was claimed, but there are {} bytes", shape[0],
                                        shape[1], shape[2], array.type.bytes, array.bytes.size()));
  }
  constexpr std::uint64_t kMax = std::numeric_limits<std::int64_t>::max();
  if (shape[0] > kMax || shape[1] > kMax || shape[2] > kMax) throw InputError(where, "an extent is beyond 64 bits");
  const bool is_unsigned = !array.type.is_signed && array.type.bytes < 8;
  assembler.begin_sequence(where, {.num_tokens = static_cast<std::int64_t>(shape[0]),
                                   .num_layers = static_cast<std::int64_t>(shape[1]),
                                   .top_k = static_cast<std::int64_t>(shape[2]),
                                   .sentinel = is_unsigned ? (std::int64_t{1} << 8 * array.type.bytes) - 1 : -1,
                                   .prompt_length = prompt_length});
  switch (array.type.bytes * 2 + (array.type.is_signed ? 1 : 0)) {
    case 2:
      return add_rows<std::uint8_t>(assembler, array);
    case 3:
      return add_rows<std::int8_t>(assembler, array);
    case 4:
      return add_rows<std::uint16_t>(assembler, array);
    case 5:
      return add_rows<std::int16_t>(assembler, array);
    case 8:
      return add_rows<std::uint32_t>(assembler, array);
    case 9:
      return add_rows<std::int32_t>(assembler, array);
    case 16:
      return add_rows<std::uint64_t>(assembler, array);
    default:
      return add_rows<std::int64_t>(assembler, array);
  }
}

}  // namespace foremoe
