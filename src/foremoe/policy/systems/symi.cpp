#include "foremoe/policy/systems/symi.h"

#include <algorithm>
#include <cassert>
#include <numeric>

#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

class Symi final : public Policy {
 public:
  explicit Symi(const SymiOptions& options) : period_(static_cast<std::size_t>(options.micro_steps_per_iteration)) {
    assert(options.micro_steps_per_iteration >= 1);
  }

  std::string_view name() const override { return "symi"; }
  std::string_view summary() const override {
    return "SYMI: replicas in proportion to the previous micro-step's loads, equal split";
  }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const LoadTable* const former = former_load(input);
    const auto place = [&](LayerId layer, ArrayView<const std::int64_t, 2> load) {
      std::vector<std::int64_t> expected(load.extent(1));
      if (former) expected = last_iteration(layer_load(*former, layer));
      return placements(load, std::move(expected), input);
    };
    return plan_freely({.name = name(), .place = place}, input, pool);
  }

 private:
  std::vector<std::int64_t> last_iteration(ArrayView<const std::int64_t, 2> load) const {
    const std::size_t count = std::min(period_, load.extent(0));
    return sum_over_micro_steps(load, load.extent(0) - count, count);
  }

  // Returns [micro_step][rank][slot]. `expected` is [expert], the load of the iteration before the first.
  Array<ExpertId, 3> placements(ArrayView<const std::int64_t, 2> load, std::vector<std::int64_t> expected,
                                const PolicyInput& input) const {
    const auto num_ranks = static_cast<std::size_t>(input.load.num_ranks());
    const std::size_t num_slots = load.extent(1) / num_ranks + static_cast<std::size_t>(input.options.guest_slots);
    Array<ExpertId, 3> slots({load.extent(0), num_ranks, num_slots});
    for (std::size_t m = 0; m < load.extent(0); ++m) {
      if (m % period_ == 0) {
        if (m > 0) expected = sum_over_micro_steps(load, m - period_, period_);
        const std::vector<int> counts = symi_replica_counts(expected, static_cast<int>(num_ranks * num_slots));
        auto slot = slots.view()[m].flat().begin();
        for (std::size_t e = 0; e < counts.size(); ++e) slot = std::fill_n(slot, counts[e], ExpertId{e});
      } else {
        std::ranges::copy(slots.view()[m - 1].flat(), slots.view()[m].flat().begin());
      }
    }
    return slots;
  }

  std::size_t period_;  // micro-steps per iteration
};

}  // namespace

std::vector<int> symi_replica_counts(std::span<const std::int64_t> load, int num_slots) {
  assert(num_slots >= std::ssize(load));
  std::vector<std::int64_t> share(load.begin(), load.end());
  std::int64_t total = std::accumulate(share.begin(), share.end(), std::int64_t{0});
  if (total == 0) {
    std::ranges::fill(share, 1);
    total = std::ssize(share);
  }
  // too_many: (replicas − exact share of the slots) · `total`.
  std::vector<int> counts(share.size());
  std::vector<std::int64_t> too_many(share.size());
  int num_given = 0;
  for (std::size_t e = 0; e < share.size(); ++e) {
    const std::int64_t exact = share[e] * num_slots;
    counts[e] = std::max(1, static_cast<int>(exact / total));
    too_many[e] = counts[e] * total - exact;
    num_given += counts[e];
  }
  const auto give = [&](std::size_t e, int replicas) {
    counts[e] += replicas;
    too_many[e] += replicas * total;
    num_given += replicas;
  };
  while (num_given > num_slots) {
    std::size_t most = share.size();
    for (std::size_t e = 0; e < share.size(); ++e) {
      if (counts[e] > 1 && (most == share.size() || too_many[e] > too_many[most])) most = e;
    }
    give(most, -1);
  }
  while (num_given < num_slots) give(std::ranges::min_element(too_many) - too_many.begin(), 1);
  return counts;
}

std::unique_ptr<Policy> make_symi(const SymiOptions& options) { return std::make_unique<Symi>(options); }

}  // namespace foremoe
