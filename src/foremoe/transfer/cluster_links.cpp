#include "foremoe/transfer/cluster_links.h"

#include <algorithm>
#include <array>

namespace foremoe {

namespace {

constexpr int kRankKinds = 3;  // peers, network, host: one of each per rank and direction
constexpr int kSides = 2;
constexpr int kLinksOfRank = kRankKinds * kSides;

}  // namespace

std::string_view to_string(LinkKind kind) {
  static constexpr std::array<std::string_view, kNumLinkKinds> kNames = {"peers", "network", "host", "switch",
                                                                         "host memory"};
  return kNames[static_cast<std::size_t>(kind)];
}

ClusterLinks::ClusterLinks(const Cluster& cluster, const Topology& topology, bool shares_uplink)
    : topology_(topology),
      shares_uplink_(shares_uplink),
      ranks_per_switch_(std::max(1, cluster.ranks_per_switch)),
      switches_per_node_((topology.ranks_per_node + ranks_per_switch_ - 1) / ranks_per_switch_),
      first_switch_(topology.num_ranks * kLinksOfRank),
      first_memory_(first_switch_ + topology.num_nodes() * switches_per_node_ * kSides),
      bytes_per_second_{cluster.peers.bytes_per_second, cluster.network.bytes_per_second, cluster.host.bytes_per_second,
                        cluster.switch_bytes_per_second, cluster.host_memory_bytes_per_second},
      latency_seconds_{cluster.peers.latency_seconds, cluster.network.latency_seconds, cluster.host.latency_seconds, 0,
                       0} {}

LinkId ClusterLinks::of_rank(LinkKind kind, LinkSide side, RankId rank) const {
  return LinkId{rank.value * kLinksOfRank + static_cast<int>(kind) * kSides + static_cast<int>(side)};
}

LinkId ClusterLinks::of_switch(LinkSide side, RankId rank) const {
  const int on_node = rank.value % topology_.ranks_per_node / ranks_per_switch_;
  const int index = topology_.node_of(rank).value * switches_per_node_ + on_node;
  return LinkId{first_switch_ + index * kSides + static_cast<int>(side)};
}

ClusterLinks::Named ClusterLinks::operator[](LinkId link) const {
  if (link.value >= first_memory_) return {LinkKind::kHostMemory, LinkSide::kIn, link.value - first_memory_};
  if (link.value >= first_switch_) {
    const int at = link.value - first_switch_;
    return {LinkKind::kSwitch, static_cast<LinkSide>(at % kSides), at / kSides};
  }
  const int at = link.value % kLinksOfRank;
  return {static_cast<LinkKind>(at / kSides), static_cast<LinkSide>(at % kSides), link.value / kLinksOfRank};
}

double ClusterLinks::seconds(LinkId link, Bytes bytes) const {
  return static_cast<double>(bytes.value) / bytes_per_second((*this)[link].kind);
}

void ClusterLinks::add(LinkId link, Bytes bytes, std::vector<Crossing>& crossings) const {
  crossings.push_back({.link = link, .seconds = seconds(link, bytes)});
}

void ClusterLinks::cross(const Way& way, Bytes bytes, std::vector<Crossing>& crossings) const {
  cross_without_latency(way, bytes, crossings);
  crossings.front().seconds += latency(way);
}

double ClusterLinks::latency(const Way& way) const {
  const LinkKind kind = way.path == Path::kHost                 ? LinkKind::kHost
                        : topology_.same_node(way.from, way.to) ? LinkKind::kPeers
                                                                : LinkKind::kNetwork;
  return latency_seconds_[static_cast<std::size_t>(kind)];
}

void ClusterLinks::cross_without_latency(const Way& way, Bytes bytes, std::vector<Crossing>& crossings) const {
  crossings.clear();
  if (way.path == Path::kHost) {
    add(of_rank(LinkKind::kHost, LinkSide::kIn, way.to), bytes, crossings);
    add(of_switch(LinkSide::kIn, way.to), bytes, crossings);
    add(host_memory(topology_.node_of(way.to)), bytes, crossings);
  } else {
    const LinkKind kind = topology_.same_node(way.from, way.to) ? LinkKind::kPeers : LinkKind::kNetwork;
    add(of_rank(kind, LinkSide::kIn, way.to), bytes, crossings);
    add(of_rank(kind, LinkSide::kOut, way.from), bytes, crossings);
    if (kind == LinkKind::kNetwork && shares_uplink_) {
      add(of_rank(LinkKind::kHost, LinkSide::kIn, way.to), bytes, crossings);
      add(of_rank(LinkKind::kHost, LinkSide::kOut, way.from), bytes, crossings);
    }
  }
}

}  // namespace foremoe
