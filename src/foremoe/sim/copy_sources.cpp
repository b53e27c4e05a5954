#include "foremoe/sim/copy_sources.h"

#include <algorithm>
#include <tuple>
#include <vector>

namespace foremoe {

namespace {

constexpr std::size_t kLeastForRelays = 6;  // ULTRA_EP_WEIGHT_SYNC_RELAY_MIN_REPLICAS
constexpr std::size_t kMostRelays = 8;      // ULTRA_EP_WEIGHT_SYNC_RELAY_MAX_RELAYS

using Copies = std::span<ScheduledCopy*>;  // of one expert for one turn, by rank

void in_ring(Copies copies, int num_ranks) {
  const int home = copies.front()->source.value;
  std::ranges::sort(copies, {},
                    [&](const ScheduledCopy* copy) { return (copy->rank.value - home + num_ranks) % num_ranks; });
  for (std::size_t i = 1; i < copies.size(); ++i) copies[i]->source = copies[i - 1]->rank;
}

// sent: [rank], copies that it sends for this turn so far.
void by_relays(Copies copies, std::vector<int>& sent) {
  int& by_home = sent[copies.front()->source.index()];
  if (copies.size() < kLeastForRelays) {
    by_home += static_cast<int>(copies.size());
    return;
  }
  std::size_t num_relays = 1;
  while (num_relays < kMostRelays && (num_relays + 1) * (num_relays + 1) <= copies.size()) ++num_relays;
  by_home += static_cast<int>(num_relays);

  const auto sends = [&](RankId rank) { return std::pair(sent[rank.index()], rank); };
  std::vector<RankId> relays;
  for (const ScheduledCopy* copy : copies) relays.push_back(copy->rank);
  std::ranges::sort(relays, {}, sends);
  relays.resize(num_relays);
  std::size_t num_leaves = 0;
  for (ScheduledCopy* copy : copies) {
    if (std::ranges::find(relays, copy->rank) != relays.end()) continue;
    copy->source = num_leaves < num_relays ? relays[num_leaves] : *std::ranges::min_element(relays, {}, sends);
    ++sent[copy->source.index()];
    ++num_leaves;
  }
}

}  // namespace

void choose_sources(Fanout fanout, int num_ranks, std::span<ScheduledCopy> copies) {
  if (fanout == Fanout::kFromHome) return;
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
      sent.assign(static_cast<std::size_t>(num_ranks), 0);
    }
    while (last < by_expert.size() && of(by_expert[last]) == of(by_expert[first])) ++last;
    const Copies of_one = std::span(by_expert).subspan(first, last - first);
    if (fanout == Fanout::kBroadcast) {
      in_ring(of_one, num_ranks);
    } else {
      by_relays(of_one, sent);
    }
  }
}

}  // namespace foremoe
