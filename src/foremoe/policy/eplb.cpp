#include "foremoe/policy/eplb.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <optional>

#include "foremoe/policy/eplb_rebalance.h"
#include "foremoe/policy/former_step.h"
#include "foremoe/policy/free_plan.h"

namespace foremoe {

namespace {

EplbShape shape_of(const PolicyInput& input, const EplbOptions& options) {
  const LoadTable& load = input.load;
  const bool is_global = options.mode == EplbMode::kGlobal;
  return {.num_experts = load.num_experts(),
          .num_replicas = load.num_experts() + load.num_ranks() * input.options.guest_slots,
          .num_ranks = load.num_ranks(),
          .num_nodes = is_global ? 1 : load.topology().num_nodes(),
          .num_groups = is_global ? 1 : options.num_groups};
}

std::optional<std::string> obstacle(const EplbShape& shape, EplbMode mode, const Topology& topology) {
  const bool divides = shape.num_groups % shape.num_nodes == 0;
  if (mode == EplbMode::kHierarchical && !divides) {
    return fmt::format("{} expert groups cannot be divided among {} nodes, which a hierarchical placement needs",
                       shape.num_groups, shape.num_nodes);
  }
  if (divides && shape.num_nodes > 1 && shape.num_ranks % topology.ranks_per_node != 0) {
    return fmt::format("{} ranks do not fill nodes of {}, which a hierarchical placement needs", shape.num_ranks,
                       topology.ranks_per_node);
  }
  return eplb_obstacle(shape);
}

// One placement by expected loads: [rank][slot].
Array<ExpertId, 3> placed_by(std::span<const std::int64_t> expected, const EplbShape& shape) {
  return eplb_rebalance({expected.data(), {1, expected.size()}}, shape).slot_expert;
}

// Where every layer's replicas sit. [placement][rank][slot], as FreePolicy::place has it.
using Place = std::function<Array<ExpertId, 3>(LayerId layer, ArrayView<const std::int64_t, 2> load)>;

class Eplb : public Policy {
 public:
  Eplb(std::string_view name, std::string_view summary, Split split, const EplbOptions& options)
      : name_(name), summary_(summary), split_(split), options_(options) {
    assert(options.num_groups >= 1);
  }

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const EplbShape shape = shape_of(input, options_);
    const bool is_even = input.load.num_experts() % input.load.num_ranks() == 0;
    if (is_even && input.options.guest_slots >= 0) {  // else plan_freely has the word for it
      if (auto reason = obstacle(shape, options_.mode, input.load.topology())) return Skipped{*std::move(reason)};
    }
    return plan_freely({.name = name_, .split = split_, .place = place(input, shape)}, input, pool);
  }

 private:
  virtual Place place(const PolicyInput& input, const EplbShape& shape) const = 0;

  std::string_view name_;
  std::string_view summary_;
  Split split_;
  EplbOptions options_;
};

class EplbOfStep final : public Eplb {
 public:
  using Eplb::Eplb;

 private:
  // By sums over micro-steps, which EPLB takes for means: it does not ask for the unit.
  Place place(const PolicyInput& input, const EplbShape& shape) const override {
    return [former = former_load(input), shape](LayerId layer, ArrayView<const std::int64_t, 2> load) {
      return placed_by(sum_over_micro_steps(former ? layer_load(*former, layer).view() : load), shape);
    };
  }
};

class EplbOracle final : public Eplb {
 public:
  using Eplb::Eplb;

 private:
  Place place(const PolicyInput&, const EplbShape& shape) const override {
    return [shape](LayerId, ArrayView<const std::int64_t, 2> load) { return eplb_rebalance(load, shape).slot_expert; };
  }
};

// Of one layer's loads, in 2⁻¹⁰ tokens as EPLB takes it.
class MovingAverage {
 public:
  explicit MovingAverage(double decay) : decay_(decay) {}

  bool empty() const { return average_.empty(); }

  void begin_with_mean(ArrayView<const std::int64_t, 2> load) {
    for (const std::int64_t sum : sum_over_micro_steps(load)) {
      average_.push_back(static_cast<double>(sum) / static_cast<double>(load.extent(0)));
    }
  }

  void see(std::span<const std::int64_t> load) {
    if (empty()) average_.assign(load.begin(), load.end());
    for (std::size_t e = 0; e < load.size(); ++e) {
      average_[e] = decay_ * static_cast<double>(load[e]) + (1 - decay_) * average_[e];
    }
  }

  std::vector<std::int64_t> rounded() const {
    std::vector<std::int64_t> expected(average_.size());
    std::ranges::transform(average_, expected.begin(), [](double a) { return std::llround(a * 1024); });
    return expected;
  }

 private:
  double decay_;
  std::vector<double> average_;  // [expert], tokens; empty: nothing is known
};

class EplbEma final : public Eplb {
 public:
  EplbEma(std::string_view name, std::string_view summary, const EplbEmaOptions& options)
      : Eplb(name, summary, Split::kEqual, options.placement), options_(options) {
    assert(options.decay > 0 && options.decay <= 1 && options.period >= 1);
  }

 private:
  Place place(const PolicyInput& input, const EplbShape& shape) const override {
    return [this, former = former_load(input), home = input.home, shape](LayerId layer,
                                                                         ArrayView<const std::int64_t, 2> load) {
      MovingAverage average(options_.decay);
      if (former) average.begin_with_mean(layer_load(*former, layer));
      return replaced(load, average, home.row(layer), shape);
    };
  }

  // [micro_step][rank][slot]
  Array<ExpertId, 3> replaced(ArrayView<const std::int64_t, 2> load, MovingAverage& average,
                              std::span<const RankId> home, const EplbShape& shape) const {
    const auto num_ranks = static_cast<std::size_t>(shape.num_ranks);
    Array<ExpertId, 3> placements({load.extent(0), num_ranks, static_cast<std::size_t>(shape.num_replicas) / num_ranks},
                                  kNoExpert);
    for (std::size_t m = 0; m < load.extent(0); ++m) {
      const auto now = placements.view()[m];
      if (m % static_cast<std::size_t>(options_.period) == 0 && !average.empty()) {
        std::ranges::copy(placed_by(average.rounded(), shape).flat(), now.flat().begin());
      } else if (m > 0) {
        std::ranges::copy(placements.view()[m - 1].flat(), now.flat().begin());
      } else {
        for (std::size_t e = 0; e < home.size(); ++e) *std::ranges::find(now.row(home[e]), kNoExpert) = ExpertId{e};
      }
      average.see(load.row(m));
    }
    return placements;
  }

  EplbEmaOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_eplb(const EplbOptions& options) {
  return std::make_unique<EplbOfStep>("eplb", "EPLB: replicas placed by the step's mean load, equal split",
                                      Split::kEqual, options);
}

std::unique_ptr<Policy> make_eplb_exact(const EplbOptions& options) {
  return std::make_unique<EplbOfStep>("eplb-exact", "EPLB's placement, our exact split", Split::kExact, options);
}

std::unique_ptr<Policy> make_eplb_ema(const EplbEmaOptions& options) {
  return std::make_unique<EplbEma>("eplb-ema", "EPLB every few micro-steps, by a moving average of those before",
                                   options);
}

std::unique_ptr<Policy> make_eplb_oracle(const EplbOptions& options) {
  return std::make_unique<EplbOracle>("eplb-oracle", "EPLB in every micro-step, by its own load, equal split",
                                      Split::kEqual, options);
}

std::unique_ptr<Policy> make_eplb_oracle_exact(const EplbOptions& options) {
  return std::make_unique<EplbOracle>("eplb-oracle-exact", "EPLB's placement in every micro-step, our exact split",
                                      Split::kExact, options);
}

}  // namespace foremoe
