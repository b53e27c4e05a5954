#pragma once

// ReLibra between batches: chooses the node that owns each expert of a layer, so that nodes are evenly loaded and
// exchange few tokens.
//
// Problem. Each node's number of experts is fixed. Minimise, summed over the micro-steps of the batch,
//   max over nodes of  tokens of its experts ÷ its ranks
//   + communication_weight · max over nodes of  max(tokens sent to, received from other nodes) ÷ its ranks,
// plus, once per batch, move_price · experts that leave their initial node ÷ ranks.
// The first term is the slowest node's compute if replication balances its ranks. The second is the busiest link. The
// third is the time to move the experts' weights and optimizer states, shared by all ranks' links.
//
// Method. Simulated annealing. A trial exchanges two experts of different nodes. It is accepted if the cost does not
// rise, otherwise with probability exp(−rise / temperature). The temperature falls by a constant factor per trial. The
// result is the best assignment found, so it is never worse than the initial one.
//
// Inferred. We know only "swap-based simulated annealing on compute and communication" for "batch-level cross-node
// balancing". We chose the cost, its sum over micro-steps (in the other reading, `batch_totals`, loads are summed
// first), the weight (sending a token costs as much as serving it), the price and the schedule. Rows are not
// deduplicated per node, because loads do not record which rows belong to the same token.
//
// The price is ours. Without it, all experts move in every step, also if the step is shorter than the moves. It is the
// number of tokens that an expert computes in the time of a move. With bf16 weights and float32 master weights and
// moments, a move sends 14 bytes for each of 3·hidden·intermediate parameters over a link of 400 Gb/s. A token costs
// four times the 6·hidden·intermediate operations of a forward (recompute, forward, backward) at 400 Tflop/s. The ratio
// is 14,000 tokens for any size of expert. A sent token that is saved can take longer, but by-token dispatch saves few.
//
// Complexity. O(trials · micro-steps · nodes); trials are evaluated incrementally.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/core/ids.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe::relibra {

struct ReorderingOptions {
  double communication_weight = 1;
  double move_price = 14000;          // tokens per moved expert
  bool batch_totals = false;          // treat the batch as one micro-step
  int trials_per_expert = 200;        // exchanges tried per expert of the layer
  int most_trials = 20000;            // at most, in total
  double first_temperature = 0.003;   // relative to the initial cost
  double last_temperature = 0.00001;  // relative to the initial cost, > 0
};

// The cost of an assignment of experts to nodes, updated incrementally by exchanges.
class ReorderingCost {
 public:
  // `node_of_expert` is [expert], before any move.
  ReorderingCost(const LoadTable& load, LayerId layer, std::vector<int> node_of_expert,
                 const ReorderingOptions& options);

  const std::vector<int>& node_of_expert() const { return node_of_expert_; }
  double cost() const { return cost_; }
  double cost_after_exchange(int a, int b) const;  // of experts on different nodes
  void exchange(int a, int b);
  double cost_from_scratch() const;

 private:
  struct NodeLoad {
    std::int64_t served = 0;    // tokens of its experts
    std::int64_t received = 0;  // of these, from other nodes
    std::int64_t sent = 0;      // to other nodes
  };
  struct Change {  // a node that gives one expert and takes another
    int node;
    int given;
    int taken;
  };
  NodeLoad after(std::size_t micro_step, const Change& change) const;
  Array<NodeLoad, 2> node_loads() const;      // from scratch
  int moved_by_exchange(int a, int b) const;  // change of moved_

  double communication_weight_;
  double cost_of_move_;                     // move_price ÷ ranks
  std::vector<int> initial_node_;           // [expert]
  std::vector<int> node_of_expert_;         // [expert]
  int moved_ = 0;                           // experts that are not on their initial node
  std::vector<double> ranks_;               // [node]
  Array<std::int64_t, 3> from_node_;        // [micro_step][node][expert], tokens
  Array<std::int64_t, 2> of_expert_;        // [micro_step][expert], tokens
  Array<std::int64_t, 2> sources_of_node_;  // [micro_step][node], tokens whose sources are its ranks
  Array<NodeLoad, 2> loads_;                // [micro_step][node]
  double cost_ = 0;
};

// Returns the homes of one layer after annealing, [expert]. An expert that stays on its node stays on its rank. The
// others, largest first, each take a free place on the least loaded rank of their new node. Deterministic per seed.
std::vector<RankId> reorder_experts(const LoadTable& load, LayerId layer, std::span<const RankId> home,
                                    const ReorderingOptions& options, std::uint64_t seed);

}  // namespace foremoe::relibra
