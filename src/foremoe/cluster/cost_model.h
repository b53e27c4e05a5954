#pragma once

// What the parts of a training step cost on a cluster: seconds and bytes as functions of how many tokens, rows and
// copies there are. It has no state and no schedule: the simulator decides when things happen and what shares a link.
//
// Compute is a roofline: max(FLOPs ÷ reached FLOP/s, bytes ÷ memory bandwidth) plus a kernel's fixed cost (Williams,
// Waterman, Patterson, 2009). A grouped product multiplies each replica's rows in whole row tiles and reads each
// replica's weights once, so splitting is not free: 64 replicas of 8 rows use 64 tiles of 128 rows where one replica of
// 512 rows uses 4. An exchange of rows takes latency + bytes ÷ bandwidth on the busiest of a rank's link directions;
// which rows these are, the dispatch says. A backward pass multiplies twice as
// much as a forward, three times where activations are computed anew, of whole layers or of experts alone. Attention
// multiplies 2.5 times as much, because its scores are computed again (FlashAttention-2, arXiv 2307.08691, §3.1.2).
// docs/users/simulation.md has the formulas and lists what is left out.

#include <cstdint>
#include <span>
#include <string_view>

#include "foremoe/cluster/cluster.h"
#include "foremoe/cluster/model_shape.h"
#include "foremoe/cluster/topology.h"
#include "foremoe/core/ids.h"
#include "foremoe/core/units.h"

namespace foremoe {

// How rows travel between ranks.
//   row    every token–expert assignment by itself, directly to the rank that serves it
//   token  a token once to each node that serves it, to the rank there with its source's place on the node, and from
//          there once to each rank that serves it. Results come back along the same way, added up
enum class Dispatch : std::uint8_t { kRow, kToken };

std::string_view to_string(Dispatch dispatch);

struct CostOptions {
  int sequence_tokens = 4096;              // of a sequence: a token attends to half as many in the mean
  bool recompute_activations = true;       // backward begins with a forward, and only layer inputs are kept
  bool recompute_experts = false;          // else: backward repeats the experts' products and keeps their rows alone
  int bytes_per_parameter = 2;             // of weights and rows (bf16)
  int bytes_per_gradient = 4;              // accumulated in float32
  int optimizer_bytes_per_parameter = 12;  // master weights and two moments, float32
  int optimizer_shards = 1;                // data-parallel ranks that share one expert's optimizer state, ≥ 1
  bool shares_uplink = true;               // host path and network cards meet at the switch
  double other_seconds_per_layer = 0;      // per layer and pass, of what is not modelled; fitted to a measured step
  Dispatch dispatch = Dispatch::kToken;
};

// Rows of one rank in one exchange, as the dispatch has them; rows that stay on their rank are in none.
struct RankRows {
  std::int64_t sent_to_peers = 0;
  std::int64_t received_from_peers = 0;
  std::int64_t sent_to_nodes = 0;
  std::int64_t received_from_nodes = 0;
};

class CostModel {
 public:
  // Throws InputError when the model's shape lacks what is needed.
  CostModel(Cluster cluster, ModelShape model, CostOptions options = {});

  const Cluster& cluster() const { return cluster_; }
  const ModelShape& model() const { return model_; }
  const CostOptions& options() const { return options_; }

  // Seconds on one rank, one layer.
  // Attention, norms, router, shared experts, and CostOptions::other_seconds_per_layer; tokens of the rank.
  double dense(Tokens tokens, Pass direction) const;
  double experts(std::span<const Tokens> replicas, Pass direction) const;  // [replica], assignments; 0: not run
  double sort(Tokens assignments) const;        // of experts(): bringing so many rows into the order of their experts
  double exchange(const RankRows& rows) const;  // dispatch or combine, this rank's part
  // An all-gather of the tokens by expert that each rank has in so many layers: one message from all others.
  double gather_loads(const Topology& topology, std::int64_t layers = 1) const;
  // Seconds on one rank of what a micro-step runs besides its MoE layers: dense layers and the output head.
  double other_layers(Tokens tokens, Pass direction) const;
  // How often rows go there and back in a pass: once, and once more where a backward begins with a forward.
  int round_trips(Pass direction) const {
    return direction == Pass::kBackward && options_.recompute_activations ? 2 : 1;
  }
  double optimizer(int num_experts) const;  // one step of so many home experts, their layers together

  // Bytes.
  Bytes expert_weights() const;         // of one expert, as a copy carries it
  Bytes expert_gradient() const;        // of one expert, as a return carries it
  Bytes row() const;                    // of one row in an exchange
  Bytes activations_per_token() const;  // kept from forward to backward, per token and layer, without rows of experts
  Bytes activations_per_row() const;    // the same per assignment
  Bytes working_memory_per_row(Pass direction = Pass::kBackward) const;  // held while a layer runs, the same
  // Weights, gradients and optimizer of one rank, all layers: its home experts, and all that is not a routed expert,
  // the optimizer of which the num_ranks ranks share.
  Bytes rank_state(int num_experts_per_layer, int num_ranks) const;

  // How many copies over the host path, and from peers, one rank can receive while one layer's forward of a balanced
  // micro-step with so many tokens of each rank (not assignments) computes: what a planner may spend and still hide.
  // All ranks receive at once, so each has its share of what a node shares; exchanges of rows keep their links. A rank
  // sends to peers as many as it receives from them, for its link is as fast either way.
  struct HiddenCopies {
    int from_host = 0;
    int from_peers = 0;
  };
  HiddenCopies hidden_copies(Tokens tokens_per_rank) const;

 private:
  // One product of rows with weights, or several that run together.
  struct Product {
    double flops = 0;       // forward
    double parameters = 0;  // read once
    double row_bytes = 0;   // of rows in and out
    double efficiency = 1;
    double backward_flops = 2;  // times forward's
    bool of_experts = false;
  };
  // Whether a backward begins with computing the forward again.
  bool anew(bool of_experts) const {
    return options_.recompute_activations || (of_experts && options_.recompute_experts);
  }
  double seconds(const Product& product, Pass direction) const;
  // What is bound by memory alone.
  double moving(double bytes, int kernels, Pass direction, bool of_experts = false) const;
  double attention(double tokens, Pass direction) const;
  Bytes inside_experts_per_row() const;  // gate, up, their product
  double feed_forward(double tokens, double parameters, double intermediate, Pass direction) const;

  Cluster cluster_;
  ModelShape model_;
  CostOptions options_;
};

}  // namespace foremoe
