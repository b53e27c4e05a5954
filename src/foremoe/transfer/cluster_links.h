#pragma once

// Numbered links of a modelled cluster, and the links that a transfer crosses.
//
//   peers, network, host   one of each per rank and direction
//   switch                 uplink of ranks_per_switch ranks to the host, per direction
//   host memory            one per node, for reads and writes together
// A copy from the node's arena crosses the host memory, the switch and the reader's host link. A copy inside a node
// crosses the peer links of both ranks. A copy between nodes crosses the network links of both ranks. If network cards
// share the uplink with the host path, it also crosses the host links of both ranks.

#include <cstdint>
#include <string_view>
#include <vector>

#include "foremoe/cluster/cluster.h"
#include "foremoe/cluster/topology.h"
#include "foremoe/core/ids.h"
#include "foremoe/core/units.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

using LinkId = Id<struct LinkTag>;

enum class LinkKind : std::uint8_t { kPeers, kNetwork, kHost, kSwitch, kHostMemory };
inline constexpr int kNumLinkKinds = 5;
std::string_view to_string(LinkKind kind);  // "peers", "network", "host", "switch", "host memory"

enum class LinkSide : std::uint8_t { kIn, kOut };  // as seen from the rank

struct Way {
  Path path = Path::kPeer;
  RankId from;  // kPeer: the rank that is read
  RankId to;
};

class ClusterLinks {
 public:
  ClusterLinks(const Cluster& cluster, const Topology& topology, bool shares_uplink);

  int size() const { return first_memory_ + topology_.num_nodes(); }
  const Topology& topology() const { return topology_; }
  bool shares_uplink() const { return shares_uplink_; }

  LinkId of_rank(LinkKind kind, LinkSide side, RankId rank) const;  // kPeers, kNetwork, kHost
  LinkId of_switch(LinkSide side, RankId rank) const;               // the switch above this rank
  LinkId host_memory(NodeId node) const { return LinkId{first_memory_ + node.value}; }

  struct Named {
    LinkKind kind{};
    LinkSide side{};
    int index = 0;  // rank, switch or node
  };
  Named operator[](LinkId link) const;
  double bytes_per_second(LinkKind kind) const { return bytes_per_second_[static_cast<std::size_t>(kind)]; }
  double seconds(LinkId link, Bytes bytes) const;  // bytes ÷ bandwidth, without latency

  // Time that `bytes` occupy a link. The receiver's link includes the latency, so that small copies queue, too.
  struct Crossing {
    LinkId link;
    double seconds = 0;
  };
  void cross(const Way& way, Bytes bytes, std::vector<Crossing>& crossings) const;  // replaces the contents
  // Like cross(), but without latency, for one of several messages that share a single latency.
  void cross_without_latency(const Way& way, Bytes bytes, std::vector<Crossing>& crossings) const;
  double latency(const Way& way) const;

 private:
  void add(LinkId link, Bytes bytes, std::vector<Crossing>& crossings) const;

  Topology topology_;
  bool shares_uplink_;
  int ranks_per_switch_;
  int switches_per_node_;
  int first_switch_;
  int first_memory_;
  std::vector<double> bytes_per_second_;  // [kind]
  std::vector<double> latency_seconds_;   // [kind]
};

}  // namespace foremoe
