#pragma once

// Traces and loads drawn from a model of routing, for experiments of any size.
//
//   LoadTable load = synthesize_load({.num_layers = 8, .num_ranks = 8, .seed = 1}, GrpoRouting{});
//
// A step's sequences fill every rank's tokens; a routing model says with which probability a token of a sequence
// chooses each expert (never above 1/top_k, since a token takes an expert once). A load draws counts, a trace draws
// every token; expectations are equal. Where a token is limited to some groups of experts, a load counts the tokens
// that a trace would have, and popularities become those of a router's scores (GroupedSampler in draw.h). Same options
// → same bytes.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

enum class Layout : std::uint8_t {
  kGrouped,  // a group's sequences share a micro-step, on neighbouring ranks
  kShuffled  // they are anywhere in the step
};

// The largest that the options may be; the least of each is 1.
struct SynthesisLimits {
  static constexpr std::int64_t kLayers = 1 << 20;
  static constexpr std::int64_t kExperts = kMaxExperts - 1;  // U16 keeps one value for missing rows
  static constexpr std::int64_t kMicroSteps = 1 << 20;
  static constexpr std::int64_t kRanks = kMaxRanks;
  static constexpr std::int64_t kTokensPerRank = std::int64_t{1} << 31;
  static constexpr std::int64_t kSequencesPerRank = 1 << 16;
  static constexpr std::int64_t kGroupSize = 1 << 20;
};

struct SynthesisOptions {
  int num_layers = 4;
  int num_experts = 128;
  int top_k = 8;
  ExpertGroups groups = {};  // of a layer; not for stress workloads
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

// Eight workloads, each with one difficulty and nothing else, so that a planner's answer to each can be read
// separately. Nothing is drawn: counts are rounded shares. With R ranks and E experts at home in equal runs, all loads
// below are relative to the mean; p is an expert's share of the tokens.
enum class StressWorkload : std::uint8_t {
  kBalanced,    // w0: every expert alike; any two differ by at most one token
  kHotExperts,  // w1: max(1, R/8) experts at home eight ranks apart, each with p = 1.5/R: alone more than a rank's
                //     fair share, so only replicas help
  kHotRank,     // w2: all experts of rank 0 alike, together p = min(3, (R+1)/2)/R: each is small, so moving some helps
  kSpreadHeat,  // w3: the loads of w2, but the hot experts are at home on different ranks
  kRaggedSources,  // w4: experts as in w0; rank r sends w/mean(w) times tokens_per_rank, w a shuffle of 1 … R, anew in
                   // each micro-step
  kZeroLoadRanks,    // w5: nobody chooses the experts of the last max(1, R/4) ranks, the others are alike
  kRotatingHotSpot,  // w6: w2 with the hot rank m mod R in micro-step m: even on the mean, never at once
  kBursts  // w7: w0, but in every fourth micro-step (1, 5, …) max(1, R/8) experts drawn anew are as hot as w1's
};

inline constexpr int kNumStressWorkloads = 8;

std::string_view name_of(StressWorkload workload);         // "w0" … "w7"
std::string_view description_of(StressWorkload workload);  // "hot experts"
std::optional<StressWorkload> stress_workload_named(std::string_view name);

using RoutingModel = std::variant<ZipfRouting, DirichletRouting, GrpoRouting, StressWorkload>;

// The same options with layers, experts and top_k of the shape, not its groups.
SynthesisOptions with_shape(SynthesisOptions options, const ModelShape& shape);

// Throw InputError naming the option that is out of range: "ranks", "tokens_per_rank".
LoadTable synthesize_load(const SynthesisOptions& options, const RoutingModel& model);
RoutingTrace synthesize_trace(const SynthesisOptions& options, const RoutingModel& model);  // with its batching

// "grpo step_spread=0.7 …": model, layout and seed, for a file's metadata.
std::string describe(const SynthesisOptions& options, const RoutingModel& model);

}  // namespace foremoe
