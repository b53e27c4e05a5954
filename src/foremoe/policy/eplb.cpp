#include "foremoe/policy/eplb.h"

#include <algorithm>

#include "foremoe/core/error.h"
#include "foremoe/policy/eplb_rebalance.h"
#include "foremoe/policy/free_plan.h"

namespace foremoe {

namespace {

enum class Expects : std::uint8_t { kStepMean, kMicroStep };

// Sums over micro-steps, which EPLB takes for means: it does not ask for the unit. [1][expert], tokens.
Array<std::int64_t, 2> sum_over_micro_steps(ArrayView<const std::int64_t, 2> load) {
  Array<std::int64_t, 2> sum({1, load.extent(1)});
  for (std::size_t m = 0; m < load.extent(0); ++m) {
    std::ranges::transform(load.row(m), sum.row(0), sum.row(0).begin(), std::plus<>{});
  }
  return sum;
}

class Eplb final : public Policy {
 public:
  Eplb(std::string_view name, std::string_view summary, Expects expects, Split split)
      : name_(name), summary_(summary), expects_(expects), split_(split) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const LoadTable& load = input.load;
    const LoadTable* const former = expects_ == Expects::kStepMean ? input.previous_load : nullptr;
    if (former && (former->num_layers() != load.num_layers() || former->num_experts() != load.num_experts())) {
      throw InputError({.file = former->name, .field = "load"},
                       "must be of as many layers and experts as the load that is planned");
    }
    const EplbShape shape{.num_experts = load.num_experts(),
                          .num_replicas = load.num_experts() + load.num_ranks() * input.options.guest_slots,
                          .num_ranks = load.num_ranks()};
    const auto place = [&](LayerId layer, ArrayView<const std::int64_t, 2> own) {
      if (expects_ == Expects::kMicroStep) return eplb_rebalance(own, shape).slot_expert;
      const Array<std::int64_t, 2> mean = sum_over_micro_steps(former ? layer_load(*former, layer).view() : own);
      return eplb_rebalance(mean, shape).slot_expert;
    };
    return plan_freely({.name = name_, .split = split_, .place = place}, input, pool);
  }

 private:
  std::string_view name_;
  std::string_view summary_;
  Expects expects_;
  Split split_;
};

}  // namespace

std::unique_ptr<Policy> make_eplb() {
  return std::make_unique<Eplb>("eplb", "EPLB: replicas placed by the step's mean load, equal split",
                                Expects::kStepMean, Split::kEqual);
}

std::unique_ptr<Policy> make_eplb_exact() {
  return std::make_unique<Eplb>("eplb-exact", "EPLB's placement, our exact split", Expects::kStepMean, Split::kExact);
}

std::unique_ptr<Policy> make_eplb_oracle() {
  return std::make_unique<Eplb>("eplb-oracle", "EPLB in every micro-step, by its own load, equal split",
                                Expects::kMicroStep, Split::kEqual);
}

std::unique_ptr<Policy> make_eplb_oracle_exact() {
  return std::make_unique<Eplb>("eplb-oracle-exact", "EPLB's placement in every micro-step, our exact split",
                                Expects::kMicroStep, Split::kExact);
}

}  // namespace foremoe
