#pragma once

// Entries of recorded routes in memory: little-endian, not necessarily aligned.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

// Entry of a missing row: −1, or the largest value of an unsigned type.
template <class Id>
inline constexpr Id kSentinel = static_cast<Id>(-1);

template <class Id>
Id load_entry(const std::byte* row, std::size_t k) {
  Id id;
  std::memcpy(&id, row + k * sizeof(Id), sizeof(Id));
  return id;
}

// Like load_entry(), but the compiler cannot load the entry a second time, between whose loads others may change it.
template <class Id>
Id load_once(const std::byte* row, std::size_t k) {
  Id id = load_entry<Id>(row, k);
  asm volatile("" : "+r"(id));
  return id;
}

// Calls f(std::type_identity<Id>{}) with the integer type of the entries.
template <class F>
decltype(auto) visit_route_type(RouteType type, F&& f) {
  switch (type) {
    case RouteType::kU8:
      return f(std::type_identity<std::uint8_t>{});
    case RouteType::kU16:
      return f(std::type_identity<std::uint16_t>{});
    case RouteType::kI16:
      return f(std::type_identity<std::int16_t>{});
    case RouteType::kI32:
      break;
  }
  return f(std::type_identity<std::int32_t>{});
}

}  // namespace foremoe
