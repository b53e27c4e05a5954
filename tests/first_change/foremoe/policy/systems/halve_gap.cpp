#include "foremoe/policy/systems/halve_gap.h"

#include <algorithm>

#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

void choose(const LayerLoad& load, std::vector<Share>& shares) {
  std::vector<std::int64_t> tokens;  // [rank], of its home experts
  count_at_home(load, tokens);
  const auto [fewest, most] = std::ranges::minmax_element(tokens);

  std::vector<std::vector<ExpertId>> experts;  // [rank]
  list_at_home(load, experts);
  const auto of_expert = [&](ExpertId e) { return load.of_expert[e.index()]; };
  const ExpertId expert = *std::ranges::max_element(experts[most - tokens.begin()], {}, of_expert);

  const std::int64_t moved = std::min((*most - *fewest) / 2, of_expert(expert));
  if (load.guest_slots == 0 || moved == 0) return;
  shares.push_back({.expert = expert, .rank = RankId{static_cast<int>(fewest - tokens.begin())}, .tokens = moved});
}

class HalveGap final : public Policy {
 public:
  std::string_view name() const override { return "halve-gap"; }
  std::string_view summary() const override {
    return "halves the difference between the ranks with the most and the fewest tokens";
  }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return true; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    return plan_fetched({.name = name(), .of_layer = [](LayerId) { return choose; }}, input, pool);
  }
};

}  // namespace

std::unique_ptr<Policy> make_halve_gap() { return std::make_unique<HalveGap>(); }

}  // namespace foremoe
