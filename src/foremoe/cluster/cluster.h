#pragma once

// Cluster parameters of the cost model: one type of device and one type of node. Presets are embedded TOML files,
// data/clusters/NAME.toml, which give a source for each number. `foremoe calibrate` writes such a file for the machine
// that it runs on.

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/core/units.h"

namespace foremoe {

// One direction of a link.
struct LinkSpeed {
  double bytes_per_second = 0;  // > 0; measured for large messages, not the nominal speed
  double latency_seconds = 0;   // ≥ 0
};

// Exchanges of rows between ranks, relative to copies over the same links. Kernels move rows; copy engines move copies.
// The defaults make an exchange as fast as a copy.
struct ExchangeSpeed {
  double token_efficiency = 1;       // (0, 1], fraction of the peer bandwidth in token dispatch inside a node
  double forwarding_efficiency = 1;  // (0, 1], the same while the rank also exchanges rows with other nodes
  double row_efficiency = 1;         // (0, 1], the same in row dispatch
  double token_seconds = 0;          // ≥ 0, of token dispatch, besides the link's latency
};

struct Cluster {
  std::string name = {};
  int ranks_per_node = 8;  // ranks that share the fast interconnect and one host memory

  // The device of one rank.
  double flops_per_second = 0;         // dense bf16 matrix products, published peak
  double gemm_efficiency = 0;          // (0, 1], fraction of that peak in a large grouped GEMM
  double attention_efficiency = 0;     // (0, 1], fraction of that peak in attention
  double memory_bytes_per_second = 0;  // bandwidth of its own memory, measured with a large kernel
  Bytes memory = {};                   // capacity of its own memory
  int row_tile = 128;                  // a grouped GEMM pads the rows of each expert to a multiple of this
  double kernel_seconds = 0;           // fixed cost of each kernel

  // The links of one rank. All transfers of the rank over a link share its bandwidth.
  LinkSpeed peers = {};    // to the other ranks of its node
  LinkSpeed network = {};  // to other nodes; this rank's share of the node's network cards
  LinkSpeed host = {};     // to host memory
  ExchangeSpeed exchange = {};

  // Resources that the ranks of a node share.
  int ranks_per_switch = 1;                 // ranks that share one uplink to host memory
  double switch_bytes_per_second = 0;       // of that uplink, per direction
  double host_memory_bytes_per_second = 0;  // of the node, for reads and writes together
};

// Inclusive bounds. They are wide enough for any machine, but reject values in a wrong unit.
struct KeyRange {
  double least = 0;
  double most = 0;
  std::string_view unit;
  bool optional = false;  // a file without the key is valid; the member keeps its default
};

inline constexpr KeyRange kRanksRange{1, 1 << 16, "ranks"};
inline constexpr KeyRange kRowsRange{1, 1 << 16, "rows"};
inline constexpr KeyRange kFlopsRange{1e8, 1e18, "FLOP per second"};
inline constexpr KeyRange kEfficiencyRange{1e-3, 1, "fraction of the peak"};
inline constexpr KeyRange kBandwidthRange{1e6, 1e15, "bytes per second"};
inline constexpr KeyRange kMemoryRange{1 << 20, 1e15, "bytes"};
inline constexpr KeyRange kLatencyRange{0, 0.1, "seconds"};
inline constexpr KeyRange kExchangeRange{1e-3, 1, "fraction of the peers' bandwidth", /*optional=*/true};
inline constexpr KeyRange kExchangeSecondsRange{0, 0.1, "seconds", /*optional=*/true};

// Visits the keys of a cluster file in the file's order, for reading and writing: visit(section, key, member, range).
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
  visit("exchange", "token_efficiency", c.exchange.token_efficiency, kExchangeRange);
  visit("exchange", "forwarding_efficiency", c.exchange.forwarding_efficiency, kExchangeRange);
  visit("exchange", "row_efficiency", c.exchange.row_efficiency, kExchangeRange);
  visit("exchange", "token_seconds", c.exchange.token_seconds, kExchangeSecondsRange);
  visit("node", "ranks_per_switch", c.ranks_per_switch, kRanksRange);
  visit("node", "switch_bytes_per_second", c.switch_bytes_per_second, kBandwidthRange);
  visit("node", "host_memory_bytes_per_second", c.host_memory_bytes_per_second, kBandwidthRange);
}

// A file with the key `base`, the name of a preset, may leave out keys; they have the preset's values.
// Throw InputError, with file, key and line, for unknown or missing keys, wrong types and values out of range. The
// ranges detect wrong units (25 instead of 25e9 bytes per second).
Cluster read_cluster(const std::string& path);
Cluster parse_cluster(std::string_view text, const std::string& file);  // `file` names the text in errors

// Parsing the text restores the cluster. The note for a key ("host.bytes_per_second") becomes a comment on its line.
using ClusterNotes = std::map<std::string, std::string, std::less<>>;
std::string to_toml(const Cluster& cluster, const ClusterNotes& notes = {});

std::vector<std::string> cluster_names();  // names of the presets
// Finds a preset by name, ignoring case, or reads the TOML file at this path. The InputError lists the presets.
Cluster find_cluster(std::string_view name_or_path);

}  // namespace foremoe
