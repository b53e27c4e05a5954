#pragma once

// Recorded rollout: the experts of every token in every layer, sequence after sequence.
//
// A row (one token in one layer) is *missing* if the token was padding, the last of its sequence or prefix-cached. All
// its top_k entries are then the sentinel: −1, or the largest value of an unsigned type. Missing rows do not count as
// load; at runtime they go to homes, with the router's current choice of experts.
//
// The entries of any other row are distinct, except for sentinels. An entry is
//   an expert of the layer: in [0, experts_in(layer)); at most top_k_in(layer) entries are ids
//   a weightless id: in [num_experts, num_experts + weightless_experts); it needs no expert and counts nowhere
//   the sentinel: the token has fewer experts. A row may have no expert at all; its token then stays on its rank.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "foremoe/core/ids.h"

namespace foremoe {

enum class RouteType : std::uint8_t { kU8, kU16, kI16, kI32 };

std::size_t size_of(RouteType type);
std::int64_t sentinel_of(RouteType type);         // entry of a missing row
RouteType narrowest_route_type(int num_experts);  // narrowest type whose sentinel is not an expert

std::int64_t num_ids(RouteType type);  // number of ids besides the sentinel

struct RoutingTrace {
  std::string name = {};  // source file, for messages and display

  // [tokens][layers][top_k] logical expert ids in the recorded type, little-endian. The ids are memory-mapped from the
  // file or owned; `storage` owns their memory.
  RouteType type = RouteType::kU8;
  const std::byte* routes = nullptr;
  std::shared_ptr<const void> storage = {};

  std::int64_t num_tokens = 0;
  int num_layers = 0;
  int top_k = 1;
  int num_experts = 0;                     // with weights; the largest of all layers
  int weightless_experts = 0;              // ids from num_experts on that need no expert, such as LongCat's
  std::vector<int> experts_of_layer = {};  // [layers]; empty: num_experts in all
  std::vector<int> top_k_of_layer = {};    // [layers]; empty: top_k in all

  std::vector<std::int64_t> cu_seqlens = {};      // [sequences + 1], first token of each sequence; ends with num_tokens
  std::vector<std::int32_t> prompt_lengths = {};  // [sequences], tokens; empty if not recorded
  std::vector<std::int32_t> group_ids = {};       // [sequences], GRPO group; empty if not recorded
  std::vector<std::int32_t> micro_step = {};      // [sequences]; empty if no batching was recorded
  std::vector<std::int32_t> rank = {};            // [sequences]; empty if no batching was recorded
  std::vector<std::int32_t> layer_ids = {};       // [layers], layer numbers of the model
  std::string model = {};
  std::string origin = {};
  bool whole_batches = false;  // each sequence is a rank's whole micro-step, whose sequences were not recorded
  int ranks = 0;               // of the recorded batching; 0 if none
  int ranks_per_node = 0;      // of the recorded batching; 0 if none

  int num_sequences() const { return static_cast<int>(cu_seqlens.size()) - 1; }
  bool has_batching() const { return !micro_step.empty(); }
  std::int64_t sequence_length(int s) const { return cu_seqlens[s + 1] - cu_seqlens[s]; }
  int experts_in(LayerId l) const { return experts_of_layer.empty() ? num_experts : experts_of_layer[l.index()]; }
  int top_k_in(LayerId l) const { return top_k_of_layer.empty() ? top_k : top_k_of_layer[l.index()]; }

  // Converts the rows of consecutive tokens, from `first` on, as many as `out` [token][k] has: expert ids, kUnassigned
  // where a row needs none, and kNoExpert in all entries of a missing row. Throws InputError if an entry is out of
  // range. Only check_routes and collect check that entries are distinct, and their number.
  void rows_of(std::int64_t first, LayerId layer, std::span<ExpertId> out) const;
  void route(std::int64_t token, LayerId layer, std::span<ExpertId> out) const { rows_of(token, layer, out); }
};

// Checks that sequences are contiguous and cover all tokens, that entries per sequence and per layer are in range, and
// that the shape is known. Does not check routes: counting checks these. Throws InputError with the trace's name as
// file, field and index.
void expect_valid(const RoutingTrace& trace);

// If a valid trace has batching, sets ranks and ranks_per_node where they are 0, and limits ranks_per_node to ranks.
void infer_ranks(RoutingTrace& trace);

}  // namespace foremoe
