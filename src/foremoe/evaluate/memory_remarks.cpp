#include "foremoe/evaluate/memory_remarks.h"

#include <fmt/format.h>

#include <algorithm>

namespace foremoe {
namespace {

double in_gigabytes(Bytes bytes) { return static_cast<double>(bytes.value) / kBytesPerGigabyte; }

// Returns an empty string if no policy exceeds the limit.
std::string remark(const std::vector<NeededMemory>& needed, Bytes limit, const std::string& what) {
  std::string over;
  std::size_t count = 0;
  for (const NeededMemory& one : needed) {
    if (one.bytes <= limit) continue;
    over += (count++ == 0 ? "" : ", ") + one.who;
  }
  if (count == 0) return {};
  if (count < needed.size()) {
    const auto most = std::ranges::max_element(needed, {}, &NeededMemory::bytes);
    return fmt::format("more than {}: {}; the most is {} GB", what, over, gigabytes(most->bytes));
  }
  const auto least = std::ranges::min_element(needed, {}, &NeededMemory::bytes);
  return fmt::format("nothing fits {}; the least is {} GB, {}", what, gigabytes(least->bytes), least->who);
}

}  // namespace

std::string gigabytes(Bytes bytes) { return fmt::format("{:.1f}", in_gigabytes(bytes)); }

std::vector<std::string> memory_remarks(const std::vector<NeededMemory>& needed, const CostModel& cost,
                                        std::optional<Bytes> budget) {
  const Cluster& cluster = cost.cluster();
  std::vector<std::string> remarks{remark(
      needed, cluster.memory, fmt::format("the {:g} GB of a rank of {}", in_gigabytes(cluster.memory), cluster.name))};
  if (budget) remarks.push_back(remark(needed, *budget, fmt::format("the budget of {:g} GB", in_gigabytes(*budget))));
  std::erase(remarks, std::string{});
  return remarks;
}

std::string optimizer_remark(const CostModel& cost, int num_ranks) {
  constexpr std::int64_t kExample = 8;
  const CostOptions& options = cost.options();
  if (options.optimizer_shards || options.ep_groups > 1) return {};
  const ModelShape& model = cost.model();
  const Bytes bytes{model.expert_parameters() * model.moe_layers * (model.experts / num_ranks) *
                    options.optimizer_bytes_per_parameter};
  return fmt::format(
      "the experts' optimizer state is not sharded (--optimizer-shards 1): {} GB per rank; with {} "
      "data-parallel ranks that share it, {} GB",
      gigabytes(bytes), kExample, gigabytes(Bytes{bytes.value / kExample}));
}

}  // namespace foremoe
