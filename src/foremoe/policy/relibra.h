#pragma once

// ReLibra (Jin et al., arXiv 2605.08639): load balancing by replayed routes at two timescales. Between batches experts
// change homes across nodes, by simulated annealing on swaps (reorder_experts). Inside a batch every
// micro-step gets replicas within the nodes, by an incremental greedy that stands for a MILP over placement and token
// split (replicate_in_node); their buffers are shared by the layers.
//
// As a plan. The reordering is the homes of the plan, counted as home moves; replicas are guests of residency `shared`.
// It plans before the phase begins, so nothing of it lies between router and experts.
//
// Inferred, as we know the paper's abstract and what others tell of it, and there is no code: both objectives, the
// schedule of the annealing, the order of the greedy; it is said at each.
//
// No counterpart in a plan: moving weights and optimizer states of reordered experts, which the count of home moves
// stands for.

#include <cstdint>
#include <vector>

#include "foremoe/planner/token_assignment.h"
#include "foremoe/policy/policy.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe::relibra {

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

// ReLibra inside a batch: replicas on the ranks of one node for one layer of one micro-step.
//
// Problem. A MILP: choose which rank holds a replica of which of the node's experts, at most guest_slots besides its
// homes, and how many tokens each replica serves, so that the most loaded rank of the node serves as few as possible.
// What the node's experts serve altogether is given by their homes: nothing leaves the node.
//
// Method. An incremental greedy on the most loaded rank.
//   1. While it is above the node's ⌈mean⌉: of its experts and the ranks below the mean that hold the expert or have a
//      free slot, take the pair that can move most tokens without taking either rank past the mean; one that needs no
//      new replica before one that does, then the lowest ids.
//   2. When none can move, what the replicas placed so far serve is solved exactly (planner/token_assignment.h): with
//      the placement fixed the MILP is FineMoE's LP 1.
//   3. Still above the mean, the most loaded rank gets one new replica of the expert that can move most tokens to a
//   rank
//      with a free slot until the two are level; then again from 1. The end when there is none.
//
// Inferred. "A MILP over placement and token split, solved by incremental greedy" is all that is known to us: what an
// increment is and the exact split are ours; so is that tokens alone count, not communication, which inside a node is
// cheap.
//
// Guarantee. None but that it never raises the largest load; the test tells how far it is from the optimum in small
// cases. Cost. O(increments · homes · ranks of the node) and an exact split for each replica of step 3.

struct NodeLoad {
  int num_ranks = 1;
  int guest_slots = 0;             // per rank
  std::vector<int> home;           // [expert], rank, both counted within the node; equally many on each
  std::vector<std::int64_t> load;  // [expert], tokens
};

struct NodeReplicas {
  planner::ReplicaGraph graph;  // homes in the first slots of their rank
  planner::Assignment assignment;
};

// A guest may be left without quota.
NodeReplicas replicate_in_node(const NodeLoad& node, planner::AssignmentSearch& search);

}  // namespace foremoe::relibra

namespace foremoe {

struct RelibraOptions {
  bool reorder = true;
  relibra::ReorderingOptions reordering;
};

std::unique_ptr<Policy> make_relibra(const RelibraOptions& options = {});

}  // namespace foremoe
