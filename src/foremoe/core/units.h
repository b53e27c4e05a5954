#pragma once

// Units of quantities that cross module boundaries. All are integers, so loads and objectives are exact.

#include <compare>
#include <concepts>
#include <cstdint>

#include "foremoe/core/debug_mode.h"

namespace foremoe {

template <class Tag>
struct Quantity {
  std::int64_t value = 0;

  constexpr Quantity() = default;
  constexpr explicit Quantity(std::integral auto v) : value(static_cast<std::int64_t>(v)) {}

  constexpr Quantity& operator+=(Quantity o) {
    value += o.value;
    return *this;
  }
  constexpr Quantity& operator-=(Quantity o) {
    value -= o.value;
    return *this;
  }
  friend constexpr Quantity operator+(Quantity a, Quantity b) { return Quantity{a.value + b.value}; }
  friend constexpr Quantity operator-(Quantity a, Quantity b) { return Quantity{a.value - b.value}; }
  friend constexpr auto operator<=>(Quantity, Quantity) = default;
};

using Tokens = Quantity<struct TokensTag>;  // token–expert assignments: a token counts once per chosen expert
using Bytes = Quantity<struct BytesTag>;

inline constexpr double kBytesPerGigabyte = 1e9;

static_assert(sizeof(Tokens) == 8, "arrays of tokens are read and written as I64");

}  // namespace foremoe
