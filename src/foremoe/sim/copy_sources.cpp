#include "foremoe/sim/copy_sources.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace foremoe {

void choose_sources(ChooseSources choose, const Topology& topology, std::span<ScheduledCopy> copies) {
  if (choose == nullptr) return;
  std::vector<ScheduledCopy*> by_expert;
  for (ScheduledCopy& copy : copies) {
    if (copy.path == Path::kPeer) by_expert.push_back(&copy);
  }
  const auto of = [](const ScheduledCopy* copy) {
    return std::tuple(copy->arrives, copy->layer, copy->source, copy->expert);
  };
  std::ranges::sort(by_expert, {},
                    [&](const ScheduledCopy* copy) { return std::tuple_cat(of(copy), std::tuple(copy->rank)); });
  std::vector<int> sent;
  for (std::size_t first = 0, last = 0; first < by_expert.size(); first = last) {
    if (first == 0 || by_expert[first]->arrives != by_expert[first - 1]->arrives) {
      sent.assign(static_cast<std::size_t>(topology.num_ranks), 0);
    }
    const auto of_first = of(by_expert[first]);  // before sources change
    std::vector<RankId> ranks;
    while (last < by_expert.size() && of(by_expert[last]) == of_first) ranks.push_back(by_expert[last++]->rank);
    const RankId home = by_expert[first]->source;
    std::vector<RankId> sources(ranks.size(), home);
    choose({.home = home, .ranks = ranks, .sources = sources, .ranks_per_node = topology.ranks_per_node}, sent);
    for (std::size_t i = 0; i < ranks.size(); ++i) by_expert[first + i]->source = sources[i];
  }
}

}  // namespace foremoe
