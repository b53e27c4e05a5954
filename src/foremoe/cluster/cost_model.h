#pragma once

// Computes seconds and bytes of each part of a training step on a cluster from the numbers of tokens, rows and copies.
// The model has no state or schedule. The simulator decides when parts run and which transfers share a link.
//
// Compute follows a roofline: max(FLOPs ÷ reached FLOP/s, bytes ÷ memory bandwidth) plus a fixed cost per kernel
// (Williams, Waterman, Patterson, 2009). A grouped GEMM pads each replica's rows to whole row tiles and reads each
// replica's weights once, so splitting is not free. 64 replicas of 8 rows use 64 tiles of 128 rows; one replica of 512
// rows uses 4. An exchange of rows takes latency + bytes ÷ bandwidth on the rank's busiest link direction. The dispatch
// determines the rows and, with Cluster::exchange, the share of the peers' bandwidth that they reach. A backward pass
// has twice the FLOPs of a forward pass, or three times if activations (of whole layers or of experts only) are
// recomputed. Attention's factor is 2.5 instead of 2, since its scores are recomputed (FlashAttention-2, arXiv
// 2307.08691, §3.1.2). docs/users/simulation.md lists the omissions.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "foremoe/cluster/cluster.h"
#include "foremoe/cluster/model_shape.h"
#include "foremoe/cluster/topology.h"
#include "foremoe/core/ids.h"
#include "foremoe/core/units.h"

namespace foremoe {

// How rows travel between ranks.
//   row    sends every token–expert assignment separately, directly to the rank that serves it
//   token  sends a token once to each node that serves it. There, the rank in the source's position receives it and
//          forwards it once to each rank that serves it. Results return on the same path and are summed on the way
enum class Dispatch : std::uint8_t { kRow, kToken };

std::string_view to_string(Dispatch dispatch);

inline constexpr int kSequenceTokens = 4096;

struct CostOptions {
  // Length of all sequences; a token attends to half of it on average. Null: the lengths in the input, if known,
  // otherwise kSequenceTokens.
  std::optional<int> sequence_tokens = {};
  bool recompute_activations = true;       // backward repeats the forward, and only layer inputs are kept
  bool recompute_experts = false;          // repeats only experts' GEMMs, keeps only their rows; not with the above
  int bytes_per_parameter = 2;             // of weights and rows (bf16)
  int bytes_per_gradient = 4;              // accumulated in float32
  int optimizer_bytes_per_parameter = 12;  // master weights and two moments, float32
  std::optional<int> optimizer_shards =
      {};                              // data-parallel ranks that shard one expert's optimizer state; null: groups
  int ep_groups = 1;                   // of the job; they share the other parameters' optimizer state, ≥ 1
  bool groups_share_node = false;      // all groups are in one node
  bool shares_uplink = true;           // host copies and network traffic share the switch's uplink
  double other_seconds_per_layer = 0;  // unmodelled time per layer and pass; fitted to a measured step
  Dispatch dispatch = Dispatch::kToken;
};

// Rows of one rank in one exchange, after the dispatch. Rows that stay on their rank are not counted.
struct RankRows {
  std::int64_t sent_to_peers = 0;
  std::int64_t received_from_peers = 0;
  std::int64_t sent_to_nodes = 0;
  std::int64_t received_from_nodes = 0;
};

class CostModel {
 public:
  // Throws InputError if the model's shape lacks a required field or an option is out of range.
  CostModel(Cluster cluster, ModelShape model, CostOptions options = {});

  const Cluster& cluster() const { return cluster_; }
  const ModelShape& model() const { return model_; }
  const CostOptions& options() const { return options_; }
  int sequence_tokens() const { return options_.sequence_tokens.value_or(kSequenceTokens); }
  // Σ length² over sequences of sequence_tokens() that have this number of tokens together, tokens².
  double squared_lengths(Tokens tokens) const;
  int optimizer_shards() const { return options_.optimizer_shards.value_or(options_.ep_groups); }

  // Seconds on one rank in one layer.
  // Attention, norms, router, shared experts and CostOptions::other_seconds_per_layer, for this rank's tokens.
  double dense(Tokens tokens, Pass direction) const { return dense(tokens, squared_lengths(tokens), direction); }
  // squared_lengths: Σ length² over the rank's sequences, tokens². Scores of causal attention are half as many.
  double dense(Tokens tokens, double squared_lengths, Pass direction) const;
  double experts(std::span<const Tokens> replicas, Pass direction) const;  // [replica], assignments; 0: idle
  double sort(Tokens assignments) const;                                   // part of experts(): sorting rows by expert
  double exchange(const RankRows& rows) const;                             // dispatch or combine on this rank
  // All-gather of token counts per expert for this number of layers. Each rank sends one message to each other.
  double gather_loads(const Topology& topology, std::int64_t layers = 1) const;
  // Seconds per micro-step on one rank outside the MoE layers: dense layers and the output head.
  double other_layers(Tokens tokens, Pass direction) const {
    return other_layers(tokens, squared_lengths(tokens), direction);
  }
  double other_layers(Tokens tokens, double squared_lengths, Pass direction) const;
  // Round trips of rows in a pass: one, or two if a backward repeats the forward.
  int round_trips(Pass direction) const {
    return direction == Pass::kBackward && options_.recompute_activations ? 2 : 1;
  }
  double optimizer(int num_experts) const;  // one step for `num_experts` home experts, counted over all layers

  // Ring collectives over the ranks that have the same home experts, one in each of the job's groups. Seconds and bytes
  // that one rank sends for its home experts of one layer. Nothing if the job has one group.
  struct Collective {
    double seconds = 0;
    double bytes = 0;
  };
  // With S shards of the optimizer state and n groups: reduce-scatter over S ranks, then all-reduce of each shard over
  // n ÷ S. A plain all-reduce if S = 1, a plain reduce-scatter if S = n.
  Collective reduce_gradients(int num_experts) const;
  Collective gather_weights(int num_experts) const;  // updated weights, over the shards

  // Bytes.
  Bytes expert_weights() const;         // of one expert, as copied
  Bytes expert_gradient() const;        // of one expert, as returned
  Bytes row() const;                    // of one row in an exchange
  Bytes activations_per_token() const;  // kept from forward to backward, per token and layer, without experts
  Bytes activations_per_row() const;    // kept from forward to backward, per assignment and layer
  Bytes working_memory_per_row(Pass direction = Pass::kBackward) const;  // per assignment, while a layer runs
  // Weights, gradients and optimizer state of one rank over all layers, for its home experts and all other parameters.
  // The optimizer state of the other parameters is sharded over the num_ranks ranks of all expert-parallel groups.
  Bytes rank_state(int num_experts_per_layer, int num_ranks) const;

  // Numbers of copies that one rank can receive over the host path and from peers during one layer's forward. The
  // micro-step is balanced and has this number of tokens (not assignments) per rank. All ranks receive at the same time
  // and share the node's resources. Exchanges of rows are assumed to use other links. A rank can send one copy to peers
  // for each that it receives, since links are equally fast in both directions.
  struct HiddenCopies {
    int from_host = 0;
    int from_peers = 0;
  };
  HiddenCopies hidden_copies(Tokens tokens_per_rank) const;
  // The host link of one rank while all ranks of its node copy over theirs.
  LinkSpeed shared_host() const;

 private:
  // One GEMM, or several that run together.
  struct Product {
    double flops = 0;       // forward
    double parameters = 0;  // read once
    double row_bytes = 0;   // of input and output rows
    double efficiency = 1;
    double backward_flops = 2;  // multiple of the forward pass's FLOPs
    bool of_experts = false;
  };
  // True if a backward pass repeats the forward pass.
  bool anew(bool of_experts) const {
    return options_.recompute_activations || (of_experts && options_.recompute_experts);
  }
  double seconds(const Product& product, Pass direction) const;
  // Seconds of memory-bound kernels.
  double moving(double bytes, int kernels, Pass direction, bool of_experts = false) const;
  double attention(double tokens, double squared_lengths, Pass direction) const;
  Collective ring(double ranks, double bytes) const;  // reduce-scatter or all-gather of `bytes`
  double shards_in_job() const { return std::min(optimizer_shards(), options_.ep_groups); }
  Bytes inside_experts_per_row() const;  // gate, up and their product
  double feed_forward(double tokens, double parameters, double intermediate, Pass direction) const;

  Cluster cluster_;
  ModelShape model_;
  CostOptions options_;
};

}  // namespace foremoe
