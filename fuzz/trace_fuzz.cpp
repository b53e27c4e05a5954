// Fuzzes foremoe.trace/1: every readable trace can be batched and counted, and the counts equal a row-wise count.

#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/trace_file.h"
#include "fuzzed_input.h"

namespace {

using namespace foremoe;

constexpr std::int64_t kMaxCells = std::int64_t{1} << 18;  // per load; a short valid file may require gigabytes

LoadTable counted_row_by_row(const RoutingTrace& trace, const Batching& batching, const LoadTable& like) {
  LoadTable table{.load = Array<Tokens, 4>(like.load.shape()),
                  .top_k = like.top_k,
                  .ranks_per_node = like.ranks_per_node,
                  .name = {}};
  std::vector<ExpertId> route(static_cast<std::size_t>(trace.top_k));
  for (int s = 0; s < trace.num_sequences(); ++s) {
    const auto i = static_cast<std::size_t>(s);
    for (std::int64_t token = trace.cu_seqlens[i]; token < trace.cu_seqlens[i + 1]; ++token) {
      for (int l = 0; l < trace.num_layers; ++l) {
        trace.route(token, LayerId{l}, route);
        for (const ExpertId e : route) {
          if (e >= ExpertId{0}) table.load(batching.micro_step[i], LayerId{l}, batching.rank[i], e) += Tokens{1};
        }
      }
    }
  }
  return table;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static ThreadPool pool(1);
  return read_or_refuse(data, size, [](std::span<const std::byte> bytes) {
    const RoutingTrace trace = read_trace(Safetensors::parse(bytes, kFuzzedInput));
    const Batching batching = make_batching(trace, {.num_ranks = trace.has_batching() ? 0 : 2});
    const std::int64_t pairs = std::int64_t{batching.num_micro_steps} * batching.num_ranks;
    if (pairs > kMaxCells / trace.num_layers / trace.num_experts) return;
    const LoadTable load = collect(trace, batching, pool);
    if (load_digest(load) != load_digest(counted_row_by_row(trace, batching, load)))
      found("the counts differ from the rows");
  });
}
