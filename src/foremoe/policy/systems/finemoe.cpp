#include "foremoe/policy/systems/finemoe.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/policy/placed_plan.h"
#include "foremoe/policy/systems/finemoe/symmetric_placement.h"

namespace foremoe {

namespace {

enum class Placing : std::uint8_t { kRandom, kSymmetric, kAdaptive };

// Returns a separate random sequence per layer.
Random random_of(std::uint64_t seed, LayerId layer) { return Random(seed + 0x9e3779b97f4a7c15 * (layer.index() + 1)); }

// Returns one layer's placement, [rank][slot]. `ranks` is [home rank][its j-th expert, ascending][replica].
Array<ExpertId, 2> experts_at(ArrayView<const RankId, 3> ranks, std::span<const RankId> home) {
  Array<ExpertId, 2> placement({ranks.extent(0), ranks.extent(1) * ranks.extent(2)}, kNoExpert);
  std::vector<std::size_t> num_homes(ranks.extent(0));  // seen so far
  std::vector<std::size_t> next_slot(ranks.extent(0));
  for (std::size_t e = 0; e < home.size(); ++e) {
    for (const RankId r : ranks.row(home[e], num_homes[home[e].index()])) {
      placement(r, next_slot[r.index()]++) = ExpertId{e};
    }
    ++num_homes[home[e].index()];
  }
  return placement;
}

// Returns [1][rank][slot].
Array<ExpertId, 3> for_the_step(const Array<ExpertId, 2>& placement) {
  Array<ExpertId, 3> step({1, placement.extent(0), placement.extent(1)});
  std::ranges::copy(placement.flat(), step.flat().begin());
  return step;
}

class FineMoe final : public Policy {
 public:
  FineMoe(std::string_view name, std::string_view summary, Placing placing, const FineMoeOptions& options)
      : name_(name), summary_(summary), placing_(placing), options_(options) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  bool plans_ahead(const PolicyInput& input) const override {
    return placing_ == Placing::kAdaptive && input.previous_load == nullptr;
  }
  std::string why_cold(const PlannerOptions& options) const override {
    if (placing_ != Placing::kAdaptive) return Policy::why_cold(options);
    return options.guest_slots == 0 ? "there are no guest slots" : "";
  }
  // Scheduling runs after the gate. LP time grows with the number of variables, one per slot. Unscheduled tokens are
  // sent during scheduling (A.2).
  OnlineWork online() const override {
    return {.gathers_loads = options_.scheduler.scheduled_fraction > 0,
            .planning_seconds_per_slot = seconds_per_slot(),
            .dispatched_unplanned = 1 - options_.scheduler.scheduled_fraction,
            .plans_beside_sorting = options_.overlap};
  }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    if (options_.scheduler.solver != finemoe::Solver::kExact && !finemoe::ReplicaLoadLp::is_available()) {
      return Skipped{"built without CLP"};
    }
    expect_valid(input.load, input.load.name);
    if (placing_ == Placing::kAdaptive) (void)former_load(input);  // throws if its model differs
    FreePolicy policy{.name = name_, .split = Split::kExact, .place = {}};
    policy.own_split = [&](LayerId layer) { return schedule(input, layer); };
    const int num_homes = input.load.num_experts() / input.load.num_ranks();
    const SymmetricShape shape{.num_ranks = input.load.num_ranks(),
                               .homes_per_rank = num_homes,
                               .replicas = num_homes > 0 ? 1 + input.options.guest_slots / num_homes : 1};
    const bool is_even = num_homes > 0 && input.load.num_experts() % input.load.num_ranks() == 0;
    const auto reason = finemoe::symmetric_shape_error(shape.num_ranks, num_homes, input.options.guest_slots);
    Array<RankId, 3> symmetric;
    if (is_even && !reason && placing_ != Placing::kRandom) symmetric = finemoe::symmetric_placement(shape);

    switch (placing_) {
      case Placing::kRandom:
        policy.place = [&](LayerId layer, ArrayView<const std::int64_t, 2>) {
          Random random = random_of(input.options.seed, layer);
          return for_the_step(experts_at(finemoe::random_placement(shape, random), input.home.row(layer)));
        };
        break;
      case Placing::kSymmetric:
        policy.place = [&](LayerId layer, ArrayView<const std::int64_t, 2>) {
          return for_the_step(experts_at(symmetric, input.home.row(layer)));
        };
        break;
      case Placing::kAdaptive:
        policy.place = [&](LayerId layer, ArrayView<const std::int64_t, 2> load) {
          return adapt(input, symmetric, layer, load);
        };
        return plan_freely(policy, input, pool);
    }
    policy.residency = Residency::kResident;
    if (is_even && reason) return Skipped{*reason};
    return plan_freely(policy, input, pool);
  }

  std::vector<Option> options() override {
    std::vector<Option> options{
        word_option({.name = "solver", .help = "Solver of LP 1. lp: CLP. exact: our exact assignment", .initial = "lp"},
                    {"lp", "exact"}, [this](std::size_t index) { solve(/*exactly=*/index == 1); }),
        weight_option({.name = "alpha_ranks", .help = "Weight in LP 4 of traffic between ranks"},
                      &finemoe::CommunicationWeights::ranks),
        weight_option({.name = "alpha_nodes", .help = "Weight in LP 4 of traffic between nodes"},
                      &finemoe::CommunicationWeights::nodes),
        number_option({.name = "scheduled_fraction", .help = "Fraction of the tokens that is scheduled"},
                      options_.scheduler.scheduled_fraction, {.least = 0, .most = 1}),
        integer_option({.name = "overlap", .help = "1: scheduling overlaps with sorting of rows (dispatch row)"},
                       options_.overlap)};
    if (placing_ != Placing::kAdaptive) return options;
    finemoe::ReplacementOptions& o = options_.replacement;
    options.push_back(number_option(
        {.name = "threshold", .help = "Predicted largest rank load ÷ mean above which the placement is replaced"},
        o.threshold, {.least = 1, .most = 1e9}));
    options.push_back(integer_option({.name = "interval", .help = "Micro-steps between checks of the placement"},
                                     o.interval, {1, kUnlimited}));
    options.push_back(
        integer_option({.name = "window", .help = "Micro-steps in the moving average used for prediction"}, o.window,
                       {1, kUnlimited}));
    options.push_back(integer_option({.name = "samples", .help = "Number of random placements; the best one is used"},
                                     o.num_samples, {1, 1 << 20}));
    return options;
  }
  std::unique_ptr<Policy> copy() const override { return std::make_unique<FineMoe>(*this); }

 private:
  using Solver = finemoe::Solver;

  void solve(bool exactly) {
    Solver& solver = options_.scheduler.solver;
    if (exactly && solver == Solver::kCommunicationAware) reject_weights_with_exact_solver();
    if (exactly) solver = Solver::kExact;
    if (!exactly && solver == Solver::kExact) solver = Solver::kReplicaLoads;
  }

  // Setting either weight selects LP 4. The other weight is 0 unless it is set.
  Option weight_option(Option option, double finemoe::CommunicationWeights::*weight) {
    finemoe::SchedulerOptions& scheduler = options_.scheduler;
    option = number_option(std::move(option), scheduler.weights.*weight, {.least = 0, .most = 1e9});
    option.initial.clear();
    option.set = [&scheduler, set = option.set](const std::string& text) {
      if (scheduler.solver == Solver::kExact) reject_weights_with_exact_solver();
      if (scheduler.solver != Solver::kCommunicationAware) scheduler.weights = {.ranks = 0, .nodes = 0};
      scheduler.solver = Solver::kCommunicationAware;
      set(text);
    };
    return option;
  }

  [[noreturn]] static void reject_weights_with_exact_solver() {
    throw InputError({.field = "solver"}, "exact solves LP 1, which has no alpha_… weights");
  }

  // Our choice, between figure 11's times for stable loads and for new orders (lab/experiments/finemoe_figure_11.py).
  double seconds_per_slot() const {
    if (options_.scheduler.scheduled_fraction <= 0) return 0;
    switch (options_.scheduler.solver) {
      case finemoe::Solver::kReplicaLoads:
        return 1e-6;
      case finemoe::Solver::kCommunicationAware:
        return 4e-6;
      case finemoe::Solver::kExact:
        return 0.06e-6;
    }
    return 0;
  }

  using SymmetricShape = finemoe::SymmetricShape;

  SplitTokens schedule(const PolicyInput& input, LayerId layer) const {
    auto scheduler = std::make_shared<finemoe::TokenScheduler>(input.load.topology(), options_.scheduler);
    return [&load = input.load, layer, scheduler](MicroStepId m, const planner::ReplicaGraph& graph,
                                                  std::span<const std::int64_t>, planner::Assignment& assignment) {
      Array<std::int64_t, 2> by_source({load.load.extent(2), load.load.extent(3)});
      std::ranges::transform(load.load.view()[m][layer].flat(), by_source.flat().begin(),
                             [](Tokens tokens) { return tokens.value; });
      scheduler->schedule(graph, by_source, assignment);
    };
  }

  Array<ExpertId, 3> adapt(const PolicyInput& input, const Array<RankId, 3>& symmetric, LayerId layer,
                           ArrayView<const std::int64_t, 2> load) const {
    const finemoe::AsymmetricShape shape{
        .num_ranks = input.load.num_ranks(),
        .slots_per_rank = input.load.num_experts() / input.load.num_ranks() + input.options.guest_slots};
    Array<ExpertId, 2> initial;
    if (const StepPlan* former = former_plan(input, name_); former != nullptr) {
      initial = last_placement(*former, layer);
    } else if (!symmetric.empty()) {
      initial = experts_at(symmetric, input.home.row(layer));
    }
    const std::vector<std::int64_t> predicted =
        sum_over_micro_steps(input.previous_load ? layer_load(*input.previous_load, layer).view() : load);
    Random random = random_of(input.options.seed, layer);
    return finemoe::replace_adaptively({.load = load, .predicted_load = predicted, .initial = initial, .shape = shape},
                                       options_.replacement, random);
  }

  std::string_view name_;
  std::string_view summary_;
  Placing placing_;
  FineMoeOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_finemoe_random(const FineMoeOptions& options) {
  return std::make_unique<FineMoe>("finemoe-random", "FineMoE, replicas shuffled over the ranks, tokens split by LP",
                                   Placing::kRandom, options);
}

std::unique_ptr<Policy> make_finemoe_symmetric(const FineMoeOptions& options) {
  return std::make_unique<FineMoe>("finemoe-symmetric", "FineMoE without replacement: Cayley graph, tokens split by LP",
                                   Placing::kSymmetric, options);
}

std::unique_ptr<Policy> make_finemoe(const FineMoeOptions& options) {
  return std::make_unique<FineMoe>("finemoe", "FineMoE: asymmetric placement by expected load, tokens split by LP",
                                   Placing::kAdaptive, options);
}

}  // namespace foremoe
