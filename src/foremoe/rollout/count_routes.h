#pragma once

// Counts how often each expert of each layer was chosen in recorded routes, and checks that every row is valid
// (routing_trace.h). One sweep over memory does both.
//
// Only this sweep validates routes. Reading a trace checks everything else, so a file of many gigabytes is read only
// once. To validate routes without counting, call check_routes.
//
// Method. Routes are stored token by token, so consecutive rows belong to different layers and use different counters.
// Counting scatters increments, without dependent additions, into a 16-bit histogram that fits the L1 cache
// (2·layers·experts bytes). The histogram is added to the caller's 64-bit counts every 65,535 tokens. Validation runs a
// few hundred bytes ahead, on many rows at once if the processor has vector instructions. Entries are distinct if a row
// differs everywhere from its own rotations, and in range if their maximum is in range. Rows that fail, including
// missing rows and rows with sentinels, are checked one by one, as are all rows of shapes with weightless ids or with
// different layers. With AVX-512 and the shape of most models (U8, top-8, up to 128 experts), rows
// become bit sets that are added for 64 experts at a time (count_rows_avx512.cpp).
//
// Cost: the scatter needs one addition to memory per id, about one cycle. Vectorised validation adds a tenth of that;
// row-by-row validation adds three times as much. Bit sets need half a cycle in total. Measured in lab/performance.md.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

struct RouteShape {
  RouteType type = RouteType::kU8;
  int num_layers = 1;
  int top_k = 1;
  int num_experts = 1;  // with weightless ids at most the sentinel if the type is unsigned
  int weightless_experts = 0;
  std::span<const int> experts_of_layer = {};  // [layers]; empty: num_experts in all
  std::span<const int> top_k_of_layer = {};    // [layers]; empty: top_k in all
  bool partial_rows = true;                    // accept rows with fewer ids than top_k; whole rows only: false

  bool has_layers_alike() const {
    return weightless_experts == 0 && experts_of_layer.empty() && top_k_of_layer.empty();
  }
  std::size_t row_bytes() const { return static_cast<std::size_t>(top_k) * size_of(type); }
  std::size_t token_bytes() const { return static_cast<std::size_t>(num_layers) * row_bytes(); }
};

// Shape of routes of this type. Refers to the lists of `of`, a RoutingTrace or RolloutCollector::Shape.
template <class Shape>
RouteShape route_shape(RouteType type, const Shape& of) {
  return {.type = type,
          .num_layers = of.num_layers,
          .top_k = of.top_k,
          .num_experts = of.num_experts,
          .weightless_experts = of.weightless_experts,
          .experts_of_layer = of.experts_of_layer,
          .top_k_of_layer = of.top_k_of_layer};
}
inline RouteShape shape_of(const RoutingTrace& trace) { return route_shape(trace.type, trace); }

// Counting methods. All produce the same result.
enum class RouteKernel : std::uint8_t {
  kAny,       // fastest method that the processor supports for the shape
  kVectors,   // scatter, with vectorised validation if available
  kPortable,  // row by row
};

// Scratch memory and kernel for one shape. Use one per thread.
class RouteCounter {
 public:
  explicit RouteCounter(const RouteShape& shape, RouteKernel kernel = RouteKernel::kAny);

  // Adds the routes of num_tokens tokens, [token][layer][top_k], to counts[layer * layer_stride + expert]. Returns
  // false if a row is malformed; the counts are then unspecified, and find_fault locates the row. Others may change the
  // routes meanwhile: every entry is loaded once, and checked and counted from the same copy.
  bool count(const std::byte* routes, std::int64_t num_tokens, std::int64_t* counts, std::size_t layer_stride);

  // Entries of rows with a route that no count contains, so far: weightless ids and sentinels. The number of these rows
  // is (counted + uncounted) ÷ top_k.
  std::int64_t uncounted() const { return uncounted_; }

 private:
  bool count_some(const std::byte* rows, std::size_t num_tokens);
  template <class Id>
  bool count_blocks(const std::byte* rows, std::size_t num_tokens);
  template <class Id>
  bool count_row_by_row(const std::byte* rows, std::size_t num_tokens);
  void flush(std::int64_t* counts, std::size_t layer_stride);

  RouteShape shape_;
  bool (*count_rows_)(const RouteShape&, const std::byte*, std::size_t, std::uint16_t*) = nullptr;  // route_kernels.h
  bool (*clean_rows_)(const std::byte*, std::size_t, int, std::byte*) = nullptr;
  std::vector<std::uint16_t> histogram_;  // [layer][expert], since the last flush
  std::vector<std::byte> block_;          // copy of the tokens that are validated and counted next
  std::vector<std::uint64_t> seen_;       // [id], last row that contained it
  std::uint64_t row_ = 0;                 // rows checked one by one so far
  std::int64_t uncounted_ = 0;
};

struct RouteFault {
  std::int64_t token = 0;
  int layer = 0;
  int entry = 0;  // first entry that is out of range or repeats an earlier one
  std::string what;
};

// Finds the first malformed row.
std::optional<RouteFault> find_fault(const RouteShape& shape, const std::byte* routes, std::int64_t num_tokens);

// Throws InputError for the first malformed row, with index [token, layer, entry].
void check_routes(const RoutingTrace& trace);

// Throws the error of check_routes() after a count found a malformed row, even if the row was replaced since then.
[[noreturn]] void refuse_routes(const RoutingTrace& trace);

inline constexpr const char* kRoutesChanged =
    "changed while they were counted: do not modify the array or overwrite the file before its load was used";

}  // namespace foremoe
