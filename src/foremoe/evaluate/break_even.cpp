#include "foremoe/evaluate/break_even.h"

namespace foremoe {
namespace {

constexpr std::int64_t kMostRows = std::int64_t{1} << 40;  // more than any micro-step has

// The smallest n ≥ 1 for which `is_enough`, which must be true for all larger ones.
template <class IsEnough>
Tokens fewest(IsEnough&& is_enough) {
  std::int64_t below = 0;
  std::int64_t enough = 1;
  while (enough < kMostRows && !is_enough(Tokens{enough})) {
    below = enough;
    enough *= 2;
  }
  while (enough - below > 1) {
    const std::int64_t middle = below + (enough - below) / 2;
    (is_enough(Tokens{middle}) ? enough : below) = middle;
  }
  return Tokens{enough};
}

double seconds_over(const LinkSpeed& link, Bytes bytes) {
  return link.latency_seconds + static_cast<double>(bytes.value) / link.bytes_per_second;
}

}  // namespace

std::vector<BreakEven> break_even(const CostModel& cost, const Topology& topology) {
  const auto of = [&](std::string_view path, const LinkSpeed& link, int CostModel::HiddenCopies::*hidden) {
    BreakEven even{.path = path,
                   .copy_seconds = seconds_over(link, cost.expert_weights()),
                   .return_seconds = seconds_over(link, cost.expert_gradient())};
    even.recompute_rows = fewest([&](Tokens rows) {
      return cost.experts({&rows, 1}, Pass::kForward) >= even.copy_seconds;
    });
    even.policy_update_rows = fewest([&](Tokens rows) {
      return cost.experts({&rows, 1}, Pass::kForward) + cost.experts({&rows, 1}, Pass::kBackward) >=
             even.copy_seconds + even.return_seconds;
    });
    if (hidden != nullptr) {
      even.hiding_tokens = fewest([&](Tokens tokens) { return cost.hidden_copies(tokens).*hidden >= 1; });
    }
    return even;
  };
  std::vector<BreakEven> all{of("peers", cost.cluster().peers, &CostModel::HiddenCopies::from_peers)};
  if (topology.num_nodes() > 1) all.push_back(of("network", cost.cluster().network, nullptr));
  all.push_back(of("host", cost.shared_host(), &CostModel::HiddenCopies::from_host));
  return all;
}

}  // namespace foremoe
