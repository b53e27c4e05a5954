// Fuzzes cluster files (TOML): every cluster that can be read has links.

#include <string_view>

#include "foremoe/cluster/cluster.h"
#include "fuzzed_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace foremoe;
  return read_or_refuse(data, size, [](std::span<const std::byte> bytes) {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const Cluster cluster = parse_cluster(text, kFuzzedInput);
    if (cluster.ranks_per_node < 1) found("a node without ranks");
    for (const LinkSpeed& link : {cluster.peers, cluster.network, cluster.host}) {
      if (!(link.bytes_per_second > 0) || !(link.latency_seconds >= 0)) found("a link without a speed");
    }
  });
}
