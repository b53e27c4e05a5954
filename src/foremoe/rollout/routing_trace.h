#pragma once

// What a rollout recorded: the experts of every token in every layer, sequence after sequence.
//
// A row (one token in one layer) is *missing* when the token was padding, the last of its sequence or
// prefix-cached: then all top_k entries are the sentinel, −1 or the largest value of an unsigned type. Missing
// rows are no load; the runtime routes them to homes as the router picks then.

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
RouteType narrowest_route_type(int num_experts);  // smallest unsigned type whose sentinel is not an expert

std::int64_t num_ids(RouteType type);  // ids that the type can tell from its sentinel

struct RoutingTrace {
  std::string name;  // the file it came from, for messages and display

  // [tokens][layers][top_k] logical expert ids in the type in which they were recorded, little-endian,
  // memory-mapped from the file or owned; `storage` keeps them alive.
  RouteType type = RouteType::kU8;
  const std::byte* routes = nullptr;
  std::shared_ptr<const void> storage;

  std::int64_t num_tokens = 0;
  int num_layers = 0;
  int top_k = 1;
  int num_experts = 0;

  std::vector<std::int64_t> cu_seqlens;      // [sequences + 1], first token of each sequence; ends with num_tokens
  std::vector<std::int32_t> prompt_lengths;  // [sequences], tokens; empty when not recorded
  std::vector<std::int32_t> group_ids;       // [sequences], GRPO group; empty when not recorded
  std::vector<std::int32_t> micro_step;      // [sequences]; empty when no batching was recorded
  std::vector<std::int32_t> rank;            // [sequences]; empty when no batching was recorded
  std::vector<std::int32_t> layer_ids;       // [layers], the model's own numbers
  std::string model;
  std::string origin;
  int ranks = 0;           // of the recorded batching; 0 when none
  int ranks_per_node = 0;  // of the recorded batching; 0 when none

  int num_sequences() const { return static_cast<int>(cu_seqlens.size()) - 1; }
  bool has_batching() const { return !micro_step.empty(); }
  std::int64_t sequence_length(int s) const { return cu_seqlens[s + 1] - cu_seqlens[s]; }

  // One row widened: out[0 … top_k) are expert ids, or all kNoExpert when the row is missing. Throws InputError when
  // an entry is out of range. Only check_routes and collect check that a row's experts are distinct.
  void route(std::int64_t token, LayerId layer, std::span<ExpertId> out) const;
};

// Everything but the routes themselves, which are checked when they are counted: sequences that follow one another and
// end with the tokens, entries per sequence in range, a known shape. Throws InputError in the file of the trace's name,
// with field and index.
void expect_valid(const RoutingTrace& trace);

// Of a valid trace with batching: ranks and ranks_per_node, where they are 0, follow from the ranks that it names.
void infer_ranks(RoutingTrace& trace);

}  // namespace foremoe
