#pragma once

// The links of a modelled cluster, numbered, and which of them bytes cross on their way.
//
//   peers, network, host   one of each per rank and direction
//   switch                 the uplink of ranks_per_switch ranks to the host, per direction
//   host memory            one per node, reads and writes together
// A copy from the node's arena crosses host memory, switch and the reader's host link; one from a rank of the node both
// ranks' links to peers; one from another node both ranks' links to the network and, where cards and host path meet
// below the switch, both ranks' host links too.

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
  RankId from;  // kPeer: whose memory is read
  RankId to;
};

class ClusterLinks {
 public:
  ClusterLinks(const Cluster& cluster, const Topology& topology, bool shares_uplink);

  int size() const { return first_memory_ + topology_.num_nodes(); }
  const Topology& topology() const { return topology_; }
  bool shares_uplink() const { return shares_uplink_; }

  LinkId of_rank(LinkKind kind, LinkSide side, RankId rank) const;  // kPeers, kNetwork, kHost
  LinkId of_switch(LinkSide side, RankId rank) const;               // above this rank
  LinkId host_memory(NodeId node) const { return LinkId{first_memory_ + node.value}; }

  struct Named {
    LinkKind kind{};
    LinkSide side{};
    int index = 0;  // rank, switch or node
  };
  Named operator[](LinkId link) const;
  double bytes_per_second(LinkKind kind) const { return bytes_per_second_[static_cast<std::size_t>(kind)]; }
  double seconds(LinkId link, Bytes bytes) const;  // bytes ÷ bandwidth, without latency

  // What crosses a link when `bytes` go this way. Latency is on the receiver's link, so that small copies queue too.
  struct Crossing {
    LinkId link;
    double seconds = 0;
  };
  void cross(const Way& way, Bytes bytes, std::vector<Crossing>& crossings) const;  // replaces what was there
  // The same without latency: of one message of several, all of which one latency delays.
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
