#pragma once

// The keys of a cluster file, once for reading and writing: visit(section, key, member, range) in the file's order.

#include <cstdint>
#include <string_view>

#include "foremoe/cluster/cluster.h"

namespace foremoe {

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

}  // namespace foremoe
