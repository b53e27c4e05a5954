#include "foremoe/sim/arena_load.h"

#include <algorithm>

namespace foremoe {

ArenaLoad load_arenas(const std::vector<std::vector<ArenaExpert>>& arena, const StepPlan& plan, Bytes expert,
                      const ClusterLinks& links) {
  const Topology& topology = links.topology();
  const auto nodes = static_cast<std::size_t>(topology.num_nodes());
  ArenaLoad load{.bytes = std::vector<Bytes>(static_cast<std::size_t>(links.size())),
                 .between_nodes = Array<Bytes, 2>({nodes, nodes})};
  const auto carry = [&](LinkId link, Bytes bytes) { load.bytes[link.index()] += bytes; };
  for (std::size_t n = 0; n < nodes; ++n) {
    Bytes from_others;
    for (const ArenaExpert& entry : arena[n]) {
      const RankId home = plan.home(entry.layer, entry.expert);
      carry(links.host_memory(NodeId{n}), expert);
      if (topology.node_of(home) == NodeId{n}) {
        carry(links.of_rank(LinkKind::kHost, LinkSide::kOut, home), expert);
        carry(links.of_switch(LinkSide::kOut, home), expert);
        continue;
      }
      from_others += expert;
      load.between_nodes(topology.node_of(home), n) += expert;
      carry(links.of_rank(LinkKind::kNetwork, LinkSide::kOut, home), expert);
      if (links.shares_uplink()) carry(links.of_rank(LinkKind::kHost, LinkSide::kOut, home), expert);
    }
    const RankRange ranks = topology.ranks_of(NodeId{n});
    const Bytes part{from_others.value / ranks.size()};
    for (int r = ranks.first; r < ranks.last; ++r) {
      carry(links.of_rank(LinkKind::kNetwork, LinkSide::kIn, RankId{r}), part);
      carry(links.of_switch(LinkSide::kOut, RankId{r}), part);  // from the card towards the host
    }
    load.largest = std::max(load.largest, Bytes{expert.value * static_cast<std::int64_t>(arena[n].size())});
  }
  for (int l = 0; l < links.size(); ++l) {
    load.seconds = std::max(load.seconds, links.seconds(LinkId{l}, load.bytes[static_cast<std::size_t>(l)]));
  }
  return load;
}

}  // namespace foremoe
