#pragma once

// Counting recorded routes: how often each expert of each layer was chosen, and whether every row is what a row
// may be (all sentinel, or distinct experts in range), in one sweep over memory.
//
// This sweep validates the routes: reading a trace checks everything but them, so that a file of many gigabytes is
// passed over once. A caller that needs routes without counts calls check_routes.
//
// Method. Routes lie token by token, so consecutive rows belong to different layers and never touch the same
// counter: counting is a plain scatter without chains of dependent additions, into a 16-bit histogram that fits
// the first-level cache (2·layers·experts bytes) and is added to the caller's 64-bit counts every 65,535 tokens.
// Validation runs a few hundred bytes ahead of it, many rows at once where the processor has vectors for them: a
// row is distinct when it differs everywhere from its own rotations, in range when the maximum is. Rows that fail,
// missing ones among them, are looked at one by one. Where AVX-512 meets the shape of most models (U8, top-8, up to
// 128 experts), rows become sets of bits and are added 64 experts at a time (count_rows_avx512.cpp).
//
// Cost: the scatter is bound by one addition to memory per id, about a cycle; validation by vectors adds a tenth,
// row by row three times as much again; sets of bits take half a cycle in all. Measured in lab/performance.md.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

struct RouteShape {
  RouteType type = RouteType::kU8;
  int num_layers = 1;
  int top_k = 1;
  int num_experts = 1;  // less than the sentinel when the type is unsigned

  std::size_t row_bytes() const { return static_cast<std::size_t>(top_k) * size_of(type); }
  std::size_t token_bytes() const { return static_cast<std::size_t>(num_layers) * row_bytes(); }
};

RouteShape shape_of(const RoutingTrace& trace);

// How rows are counted; all give the same result.
enum class RouteKernel : std::uint8_t {
  kAny,       // the fastest that the processor has for the shape
  kVectors,   // scatter, validated by vectors where there are any
  kPortable,  // row by row
};

// Scratch memory and the choice of kernel for one shape; one per thread.
class RouteCounter {
 public:
  explicit RouteCounter(const RouteShape& shape, RouteKernel kernel = RouteKernel::kAny);

  // Adds the routes of num_tokens tokens, [token][layer][top_k], to counts[layer * layer_stride + expert]. Returns
  // false when a row is malformed; then the counts are unspecified and find_fault tells which.
  bool count(const std::byte* routes, std::int64_t num_tokens, std::int64_t* counts, std::size_t layer_stride);

 private:
  bool count_some(const std::byte* rows, std::size_t num_tokens);
  template <class Id>
  bool count_checked(const std::byte* rows, std::size_t num_tokens);
  template <class Id>
  bool count_row_by_row(const std::byte* rows, std::size_t num_tokens);
  void flush(std::int64_t* counts, std::size_t layer_stride);

  RouteShape shape_;
  bool (*count_rows_)(const RouteShape&, const std::byte*, std::size_t, std::uint16_t*) = nullptr;  // route_kernels.h
  bool (*clean_rows_)(const std::byte*, std::size_t, int) = nullptr;
  std::vector<std::uint16_t> histogram_;  // [layer][expert], since the last flush
  std::vector<std::uint64_t> seen_;       // [expert], number of the last row that had it
  std::uint64_t row_ = 0;                 // rows looked at one by one, ever
};

struct RouteFault {
  std::int64_t token = 0;
  int layer = 0;
  int entry = 0;  // the first that is out of range or repeats an earlier one
  std::string what;
};

// The first malformed row.
std::optional<RouteFault> find_fault(const RouteShape& shape, const std::byte* routes, std::int64_t num_tokens);

// Throws InputError for the first malformed row, with index [token, layer, entry].
void check_routes(const RoutingTrace& trace);

}  // namespace foremoe
