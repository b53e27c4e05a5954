#pragma once

// A cluster as the cost model sees it: one kind of device, one kind of node. Presets are TOML files,
// data/clusters/NAME.toml, embedded in the program, each number with its source; `foremoe calibrate` writes one of the
// machine it runs on.

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/core/units.h"

namespace foremoe {

// One direction of a link.
struct LinkSpeed {
  double bytes_per_second = 0;  // > 0; what a large message reaches, not the number on the box
  double latency_seconds = 0;   // ≥ 0
};

struct Cluster {
  std::string name;
  int ranks_per_node = 8;  // that share the fast interconnect and one host memory

  // The device of one rank.
  double flops_per_second = 0;         // dense bf16 products, published peak
  double gemm_efficiency = 0;          // (0, 1], of that peak in a large grouped product
  double attention_efficiency = 0;     // (0, 1], of that peak in attention
  double memory_bytes_per_second = 0;  // of its own memory, as a large kernel reaches it
  Bytes memory;                        // of its own
  int row_tile = 128;                  // rows of one expert are multiplied in whole tiles of so many
  double kernel_seconds = 0;           // what every kernel costs besides its work

  // The links of one rank; whatever of the rank uses one shares it.
  LinkSpeed peers;    // to the other ranks of its node
  LinkSpeed network;  // to other nodes, this rank's share of the node's cards
  LinkSpeed host;     // to the host's memory

  // What ranks of a node share.
  int ranks_per_switch = 1;                 // that reach the host's memory through one uplink
  double switch_bytes_per_second = 0;       // of that uplink, one direction
  double host_memory_bytes_per_second = 0;  // of the node, reads and writes together
};

// Inclusive; ends that no machine reaches, so that a number in a wrong unit falls outside.
struct KeyRange {
  double least = 0;
  double most = 0;
  std::string_view unit;
};

inline constexpr KeyRange kRanksRange{1, 1 << 16, "ranks"};
inline constexpr KeyRange kRowsRange{1, 1 << 16, "rows"};
inline constexpr KeyRange kFlopsRange{1e8, 1e18, "FLOP per second"};
inline constexpr KeyRange kEfficiencyRange{1e-3, 1, "a part of the peak"};
inline constexpr KeyRange kBandwidthRange{1e6, 1e15, "bytes per second"};
inline constexpr KeyRange kMemoryRange{1 << 20, 1e15, "bytes"};
inline constexpr KeyRange kLatencyRange{0, 0.1, "seconds"};

// The keys of a cluster file in the file's order, once for reading and writing: visit(section, key, member, range).
// `C` is Cluster or const Cluster. Members are int, double or Bytes.
template <class C, class Visit>
void visit_keys(C& c, Visit&& visit) {
  visit("", "ranks_per_node", c.ranks_per_node, kRanksRange);
  visit("device", "flops_per_second", c.flops_per_second, kFlopsRange);
  visit("device", "gemm_efficiency", c.gemm_efficiency, kEfficiencyRange);
  visit("device", "attention_efficiency", c.attention_efficiency, kEfficiencyRange);
  visit("device", "memory_bytes_per_second", c.memory_bytes_per_second, kBandwidthRange);
  visit("device", "memory_bytes", c.memory, kMemoryRange);
  visit("device", "row_tile", c.row_tile, kRowsRange);
  visit("device", "kernel_seconds", c.kernel_seconds, kLatencyRange);
  const auto visit_link = [&](const char* section, auto& link) {
    visit(section, "bytes_per_second", link.bytes_per_second, kBandwidthRange);
    visit(section, "latency_seconds", link.latency_seconds, kLatencyRange);
  };
  visit_link("peers", c.peers);
  visit_link("network", c.network);
  visit_link("host", c.host);
  visit("node", "ranks_per_switch", c.ranks_per_switch, kRanksRange);
  visit("node", "switch_bytes_per_second", c.switch_bytes_per_second, kBandwidthRange);
  visit("node", "host_memory_bytes_per_second", c.host_memory_bytes_per_second, kBandwidthRange);
}

// Throw InputError naming file, key, line and what is wrong: unknown or missing keys, wrong types, values out of range.
// The ranges are wide; what they catch is a wrong unit (25 where 25e9 bytes a second are meant).
Cluster read_cluster(const std::string& path);
Cluster parse_cluster(std::string_view text, const std::string& file);  // `file` names the text in errors

// The same cluster when read again. A note, by key ("host.bytes_per_second"), becomes the comment beside its number.
using ClusterNotes = std::map<std::string, std::string, std::less<>>;
std::string to_toml(const Cluster& cluster, const ClusterNotes& notes = {});

std::vector<std::string> cluster_names();  // of the presets
// A preset by name, whatever the case; else a TOML file by that path. Throws InputError that lists the presets.
Cluster find_cluster(std::string_view name_or_path);

}  // namespace foremoe
