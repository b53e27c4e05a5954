#pragma once

// The planner's input: how many tokens of each source rank chose each expert, in every layer of every micro-step. The
// complete table is known before the micro-steps run.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/core/units.h"

namespace foremoe {

struct LoadTable {
  Array<Tokens, 4> load;  // [micro_step][layer][source rank][expert], tokens, never negative
  int top_k = 1;
  int ranks_per_node = 1;
  std::string name = {};  // for display only

  std::vector<int> experts_of_layer = {};  // [layers], the others of num_experts() do not exist; empty: all exist
  std::vector<int> top_k_of_layer = {};    // [layers]; empty: top_k in all
  // [micro_step][rank], tokens with and without routes. Empty: unknown, and estimated as assignments ÷ top_k.
  Array<Tokens, 2> tokens = {};
  std::int64_t missing_rows = 0;  // (token, layer) pairs of the micro-steps that have no route; 0 if unknown

  int num_micro_steps() const { return static_cast<int>(load.extent(0)); }
  int num_layers() const { return static_cast<int>(load.extent(1)); }
  int num_ranks() const { return static_cast<int>(load.extent(2)); }
  int num_experts() const { return static_cast<int>(load.extent(3)); }
  Topology topology() const { return {.num_ranks = num_ranks(), .ranks_per_node = ranks_per_node}; }
  int experts_in(LayerId l) const { return experts_of_layer.empty() ? num_experts() : experts_of_layer[l.index()]; }
  // Home of expert e if homes are contiguous: rank e / (E_l/R) for the E_l experts of the layer. The experts that it
  // does not have fill the remaining homes in the same way.
  RankId contiguous_home(LayerId l, ExpertId e) const;
  int top_k_in(LayerId l) const { return top_k_of_layer.empty() ? top_k : top_k_of_layer[l.index()]; }

  // Sums one (micro-step, layer) over source ranks: [expert], tokens. Throws InputError if `out` has another size.
  void expert_loads(MicroStepId m, LayerId l, std::span<std::int64_t> out) const;
};

// Both functions throw InputError with file, field and index if an axis is empty or exceeds the limits of file_kind.h,
// expect_load_shape(), which is called before the table is allocated, also if memory is insufficient.
// expect_valid() also rejects negative or overflowing tokens, tokens of experts that a layer does not have, and other
// fields out of range.
void expect_load_shape(const std::array<std::size_t, 4>& shape, const std::string& file);
void expect_valid(const LoadTable& table, const std::string& file);

// Merges consecutive source ranks so that `num_ranks` remain. `num_ranks` must divide the table's ranks; throws
// InputError otherwise. ranks_per_node becomes min(ranks_per_node, num_ranks).
LoadTable fold_ranks(const LoadTable& table, int num_ranks);

// Returns the load of `count` source ranks from rank `first` on. ranks_per_node becomes min(ranks_per_node, count).
// missing_rows, which is not known by rank, becomes proportional to the tokens. The ranks must exist.
LoadTable take_ranks(const LoadTable& table, int first, int count);

// Returns the first num_micro_steps micro-steps and num_layers layers.
LoadTable take_first(const LoadTable& table, int num_micro_steps, int num_layers);

// Returns the layers from `first` on. They must exist.
LoadTable take_layers(const LoadTable& table, int first, int count);

// Divides the ranks by `factor` and multiplies the micro-steps: of R ranks, rank r runs the batches of the ranks r,
// r + R ÷ factor, … one after the other. `factor` must divide the ranks.
LoadTable in_more_micro_steps(const LoadTable& table, int factor);

// Whether rows with a route have fewer experts than their layer's top-k, so that assignments ÷ top-k underestimates
// tokens. False if `tokens` is unknown.
bool has_short_rows(const LoadTable& table);

// Tokens of each rank in each micro-step: `tokens`, or, if it is unknown, tokens_of_fullest_layers().
Array<Tokens, 2> tokens_of_ranks(const LoadTable& table);

// Tokens of each rank in each micro-step that the fullest layer needs: ⌈assignments ÷ top-k⌉. Excludes tokens without
// any route.
Array<Tokens, 2> tokens_of_fullest_layers(const LoadTable& table);

// Hex SHA-256 of the load as little-endian I64 [micro_steps, layers, ranks, experts].
std::string load_digest(const LoadTable& table);

}  // namespace foremoe
