#pragma once

// Traces and loads drawn from a model of routing, for experiments of any size.
//
//   LoadTable load = synthesize_load({.num_layers = 8, .num_ranks = 8, .seed = 1}, GrpoRouting{});
//
// A step's sequences fill every rank's tokens; a routing model says with which probability a token of a sequence
// chooses each expert (never above 1/top_k, since a token takes an expert once). A load draws counts, a trace draws
// every token; expectations are equal. Same options → same bytes.

#include <cstdint>
#include <string>
#include <variant>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/rollout/routing_trace.h"
#include "foremoe/rollout/synthesis/stress.h"

namespace foremoe {

enum class Layout : std::uint8_t {
  kGrouped,  // a group's sequences share a micro-step, on neighbouring ranks
  kShuffled  // they are anywhere in the step
};

struct SynthesisOptions {
  int num_layers = 4;
  int num_experts = 128;
  int top_k = 8;
  int num_micro_steps = 32;
  int num_ranks = 8;
  int ranks_per_node = 0;               // 0: min(8, ranks)
  std::int64_t tokens_per_rank = 8192;  // per micro-step
  int sequences_per_rank = 2;           // per micro-step
  double length_spread = 0.5;           // lengths ∝ exp(length_spread · N), scaled to fill the rank's tokens
  int group_size = 16;                  // sequences per GRPO group (fewer where a micro-step's do not divide)
  Layout layout = Layout::kGrouped;
  std::uint64_t seed = 1;
};

// The i-th most popular expert of a layer has p ∝ i^−skew (FineMoE, figure 8); which expert that is, is drawn.
struct ZipfRouting {
  double skew = 1.0;
  double permute_probability = 0.0;  // that a micro-step draws the order anew, for all layers
};

// Popularity of a layer ~ Dirichlet(concentration, …): small is skewed, 1 is uniform over the simplex.
struct DirichletRouting {
  double concentration = 0.5;
  double sequence_concentration = 0.0;  // > 0: a sequence's own popularity ~ Dirichlet(this · layer's); 0: the layer's
};

// Popularity ∝ exp(step_spread·N per layer and expert + group_spread·N per group + 0.3·group_spread·N per sequence):
// skewed and stable over the step, wild from micro-step to micro-step where a group meets in one.
struct GrpoRouting {
  double step_spread = 0.7;
  double group_spread = 0.5;
};

using RoutingModel = std::variant<ZipfRouting, DirichletRouting, GrpoRouting, StressWorkload>;

// The same options with layers, experts and top_k of the shape.
SynthesisOptions with_shape(SynthesisOptions options, const ModelShape& shape);

// Throw InputError naming the option that cannot be.
LoadTable synthesize_load(const SynthesisOptions& options, const RoutingModel& model);
RoutingTrace synthesize_trace(const SynthesisOptions& options, const RoutingModel& model);  // with its batching

// "grpo step_spread=0.7 …": model, layout and seed, for a file's metadata.
std::string describe(const SynthesisOptions& options, const RoutingModel& model);

}  // namespace foremoe
