#include "foremoe/sim/sharded_experts.h"

#include <algorithm>

namespace foremoe {

namespace {

class Sharding {
 public:
  Sharding(const SimulationInput& input, const TurnOrder& order, int depth)
      : plan_(input.plan),
        cost_(input.cost),
        order_(order),
        depth_(depth),
        topology_({.num_ranks = plan_.num_ranks(), .ranks_per_node = plan_.ranks_per_node}) {}

  ShardedTransfers transfers() {
    for (int t = 0; t < order_.size(); ++t) {
      const TurnId turn{t};
      for (int r = 0; r < plan_.num_ranks(); ++r) {
        const int experts = experts_of(order_[turn], RankId{r});
        result_.gathered += experts;
        const Transfer gather{.begins = TurnId{std::max(0, t - depth_ + 1)}, .deadline = turn};
        add(RankId{r}, Bytes{experts * cost_.expert_weights().value}, gather);
        if (order_[turn].pass == Pass::kForward) continue;
        const Transfer scatter{
            .begins = turn, .moment = Moment::kExpertsDone, .gradient = true, .deadline = next_backward(t + depth_)};
        add(RankId{r}, Bytes{experts * cost_.expert_gradient().value}, scatter);
      }
    }
    return std::move(result_);
  }

 private:
  int experts_of(const Turn& turn, RankId rank) const {
    const auto slots = plan_.slot_expert.row(turn.event, turn.layer, rank);
    return static_cast<int>(slots.size() - static_cast<std::size_t>(std::ranges::count(slots, kNoExpert)));
  }

  TurnId next_backward(int t) const {
    while (t < order_.size() && order_[TurnId{t}].pass == Pass::kForward) ++t;
    return TurnId{std::min(t, order_.size())};
  }

  // Adds the parts of whole experts that come from the rank's own node and from other nodes.
  void add(RankId rank, Bytes whole, Transfer transfer) {
    const NodeId node = topology_.node_of(rank);
    const RankRange near = topology_.ranks_of(node);
    const RankRange next = topology_.ranks_of(NodeId{(node.value + 1) % topology_.num_nodes()});
    const int position = rank.value - near.first;
    const RankId neighbour{near.first + (position + 1) % near.size()};
    const RankId opposite{next.first + position % next.size()};
    add(neighbour, rank, part(whole, near.size() - 1), transfer);
    add(opposite, rank, part(whole, topology_.num_ranks - near.size()), transfer);
  }

  // Returns the part of `whole` that `ranks` ranks store.
  Bytes part(Bytes whole, int ranks) const { return Bytes{whole.value * ranks / topology_.num_ranks}; }

  // Gradients travel in the opposite direction.
  void add(RankId other, RankId rank, Bytes bytes, Transfer transfer) {
    if (bytes == Bytes{0}) return;
    transfer.way = transfer.gradient ? Way{.from = rank, .to = other} : Way{.from = other, .to = rank};
    transfer.bytes = bytes;
    result_.transfers.push_back(transfer);
  }

  const StepPlan& plan_;
  const CostModel& cost_;
  const TurnOrder& order_;
  int depth_;
  Topology topology_;
  ShardedTransfers result_;
};

}  // namespace

ShardedTransfers sharded_transfers(const SimulationInput& input, const TurnOrder& order, int depth) {
  return Sharding(input, order, depth).transfers();
}

}  // namespace foremoe
