#pragma once

// Synthetic traces and loads, drawn from a routing model, for experiments of any size.
//
//   LoadTable load = synthesize_load({.num_layers = 8, .num_ranks = 8, .seed = 1}, GrpoRouting{});
//
// The sequences of a step fill the tokens of every rank. A routing model gives each expert's share of the expert
// choices in a sequence (at most 1/top_k, since a token chooses an expert at most once). For a load, counts are drawn;
// for a trace, every token is drawn. Both have equal expectations. If tokens are limited to some expert groups, loads
// also count drawn tokens, and popularities become router scores (GroupedSampler in draw.h). The same options produce
// the same bytes.

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
  kGrouped,  // sequences of a group share a micro-step, on neighbouring ranks
  kShuffled  // sequences of a group are anywhere in the step
};

// Upper limits of the options. The lower limit of each is 1.
struct SynthesisLimits {
  static constexpr std::int64_t kLayers = 1 << 20;
  static constexpr std::int64_t kExperts = kMaxExperts - 1;  // U16 reserves one value for missing rows
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
  ExpertGroups groups = {};  // expert groups per layer; not for stress workloads
  int num_micro_steps = 32;
  int num_ranks = 8;
  int ranks_per_node = 0;               // 0: min(8, ranks)
  std::int64_t tokens_per_rank = 8192;  // per micro-step
  int sequences_per_rank = 2;           // per micro-step
  double length_spread = 0.5;           // lengths ∝ exp(length_spread · N), scaled to the rank's tokens
  int group_size = 16;                  // sequences per GRPO group; the last group of a micro-step may be smaller
  Layout layout = Layout::kGrouped;
  std::uint64_t seed = 1;
};

// The i-th most popular expert of a layer has p ∝ i^−skew (FineMoE, figure 8). The order of experts is random.
struct ZipfRouting {
  double skew = 1.0;
  double permute_probability = 0.0;  // probability that a micro-step redraws the order, for all layers
};

// Popularity of a layer ~ Dirichlet(concentration, …): small values are skewed, 1 is uniform over the simplex.
struct DirichletRouting {
  double concentration = 0.5;
  double sequence_concentration = 0.0;  // > 0: popularity per sequence ~ Dirichlet(this · layer's); 0: the layer's
};

// Popularity ∝ exp(step_spread·N per layer and expert + group_spread·N per group + 0.3·group_spread·N per sequence):
// skewed over the step, and very different between micro-steps if each group runs in one micro-step.
struct GrpoRouting {
  double step_spread = 0.7;
  double group_spread = 0.5;
};

// Eight stress workloads. Each workload poses a single difficulty, so that the planner's response can be measured
// separately. Counts are deterministic rounded shares except where noted. E experts are at home on R ranks in equal
// runs. Loads below are relative to the mean; p is an expert's share of the tokens.
enum class StressWorkload : std::uint8_t {
  kBalanced,       // w0: all experts equal; loads differ by at most one token
  kHotExperts,     // w1: max(1, R/8) experts at home eight ranks apart, each with p = 1.5/R: each exceeds a rank's
                   //     fair share, so only replicas help
  kHotRank,        // w2: rank 0's experts, equal, sum to p = min(3, (R+1)/2)/R: each is small, so moving some helps
  kSpreadHeat,     // w3: loads of w2, but the hot experts have homes on different ranks
  kRaggedSources,  // w4: experts as in w0; rank r sends w/mean(w) times tokens_per_rank; w is a permutation of 1 … R,
                   // redrawn in each micro-step
  kZeroLoadRanks,  // w5: experts of the last max(1, R/4) ranks get no tokens; all others are equal
  kRotatingHotSpot,  // w6: w2 with hot rank m mod R in micro-step m: even on average, but in no micro-step
  kBursts            // w7: w0, but in micro-steps 1, 5, … max(1, R/8) random experts are as hot as in w1
};

inline constexpr int kNumStressWorkloads = 8;

std::string_view name_of(StressWorkload workload);         // "w0" … "w7"
std::string_view description_of(StressWorkload workload);  // "hot experts"
std::optional<StressWorkload> stress_workload_named(std::string_view name);

using RoutingModel = std::variant<ZipfRouting, DirichletRouting, GrpoRouting, StressWorkload>;

// Returns the options with the shape's layers, experts and top_k. Ignores the shape's groups.
SynthesisOptions with_shape(SynthesisOptions options, const ModelShape& shape);

// Throw InputError with the name of an option that is out of range: "ranks", "tokens_per_rank".
LoadTable synthesize_load(const SynthesisOptions& options, const RoutingModel& model);
RoutingTrace synthesize_trace(const SynthesisOptions& options, const RoutingModel& model);  // includes its batching

// Describes model, layout and seed, for a file's metadata: "grpo step_spread=0.7 …".
std::string describe(const SynthesisOptions& options, const RoutingModel& model);

}  // namespace foremoe
