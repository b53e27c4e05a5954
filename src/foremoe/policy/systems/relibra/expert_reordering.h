#pragma once

// ReLibra between batches: which node is to own which expert of a layer, so that nodes are evenly loaded and little is
// sent between them.
//
// Problem. Every node owns as many experts as before. Minimise, summed over the micro-steps of the batch,
//   largest over nodes of  tokens of its experts ÷ its ranks
//   + communication_weight · largest over nodes of  max(tokens sent to, received from other nodes) ÷ its ranks.
// The first is the compute of the slowest node once replication has levelled its ranks; the second its busiest link.
//
// Method. Simulated annealing: a trial exchanges two experts of different nodes; it is kept when the cost does not
// rise, else with probability exp(−rise / temperature). The temperature falls by a constant factor from trial to trial.
// The best assignment met is the result, so it is never worse than the one before.
//
// Inferred. "Swap-based simulated annealing on compute and communication" for "batch-level cross-node balancing" is all
// that is known to us. The cost, that it is summed over micro-steps (`batch_totals` sums the loads first, the other way
// to read it), the weight (a token sent costs what a token served does) and the schedule are ours. Rows are not
// deduplicated by node, as loads do not tell which of them are one token's.
//
// Cost. O(trials · micro-steps · nodes); a trial is evaluated by what it changes.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/core/array.h"
#include "foremoe/core/ids.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe::relibra {

struct ReorderingOptions {
  double communication_weight = 1;
  bool batch_totals = false;          // as if the batch were one micro-step
  int trials_per_expert = 200;        // exchanges tried, per expert of the layer,
  int most_trials = 20000;            // and altogether
  double first_temperature = 0.003;   // in parts of the initial cost
  double last_temperature = 0.00001;  // in parts of the initial cost, > 0
};

// What an assignment of experts to nodes costs, kept up to date while they are exchanged.
class ReorderingCost {
 public:
  // `node_of_expert` is [expert].
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
    std::int64_t received = 0;  // of these from other nodes
    std::int64_t sent = 0;      // to other nodes
  };
  struct Change {  // a node that gives one expert and takes another
    int node;
    int given;
    int taken;
  };
  NodeLoad after(std::size_t micro_step, const Change& change) const;
  Array<NodeLoad, 2> node_loads() const;  // from scratch

  double communication_weight_;
  std::vector<int> node_of_expert_;         // [expert]
  std::vector<double> ranks_;               // [node]
  Array<std::int64_t, 3> from_node_;        // [micro_step][node][expert], tokens
  Array<std::int64_t, 2> of_expert_;        // [micro_step][expert], tokens
  Array<std::int64_t, 2> sources_of_node_;  // [micro_step][node], tokens that its ranks have
  Array<NodeLoad, 2> loads_;                // [micro_step][node]
  double cost_ = 0;
};

// Homes of one layer, [expert], after annealing. An expert that stays on its node stays on its rank; of the others the
// one with most tokens takes the place on its new node whose rank has least, and so on. The same for the same seed.
std::vector<RankId> reorder_experts(const LoadTable& load, LayerId layer, std::span<const RankId> home,
                                    const ReorderingOptions& options, std::uint64_t seed);

}  // namespace foremoe::relibra
