#pragma once

// A raw array of integer ids [tokens, layers, top_k], as several formats carry it, into the assembler.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "foremoe/rollout/importers/trace_assembler.h"

namespace foremoe {

struct IntegerType {
  int bytes = 4;  // 1, 2, 4 or 8, little-endian
  bool is_signed = true;
};

struct IntegerArray {
  std::span<const std::byte> bytes;  // exactly the array
  IntegerType type;
  std::array<std::uint64_t, 3> shape{};  // tokens, layers, top_k, as claimed
  bool fortran_order = false;            // first axis fastest
};

// One sequence. Throws InputError when the bytes are not what the shape claims.
void add_sequence(TraceAssembler& assembler, const Where& where, const IntegerArray& array,
                  std::int32_t prompt_length = -1);

}  // namespace foremoe
