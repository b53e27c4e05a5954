#include "foremoe/policy/systems/foremoe_review.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "foremoe/core/timeline.h"
#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

using review::BasePlacement;
using review::Move;

// Base placement and moves of one layer, which determine its placements and quotas.
struct Layer {
  BasePlacement base;
  std::vector<std::vector<Move>> moves;  // [micro_step]
};

class ForeMoeReview final : public Policy {
 public:
  explicit ForeMoeReview(const ForeMoeReviewOptions& options) : options_(options) {
    assert(options.base || options.adjust);
  }

  std::string_view name() const override {
    if (!options_.adjust) return "foremoe-review-bpo";
    return options_.base ? "foremoe-review" : "foremoe-review-mda";
  }

  std::string_view summary() const override {
    if (!options_.adjust) return "ForeMoE as described in its review, base placement only";
    return options_.base
               ? "ForeMoE as described in its review: base placement on means, experts moved in every micro-step"
               : "ForeMoE as described in its review, from homes, experts moved in every micro-step";
  }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return true; }
  std::string why_cold(const PlannerOptions& options) const override {
    if (!options_.base) return Policy::why_cold(options);
    return options.guest_slots == 0 ? "there are no guest slots" : "";
  }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    std::vector<Layer> layers(input.load.load.extent(1));
    std::vector<double> base_seconds(layers.size());
    FreePolicy policy{.name = name(), .place = {}, .once_cpu_seconds = base_seconds};
    policy.place = [&](LayerId l, ArrayView<const std::int64_t, 2> load) {
      Layer& layer = layers[l.index()];
      layer = plan_layer(input, l, load, base_seconds[l.index()]);
      return placements(layer, shape_of(input));
    };
    policy.own_split = [&](LayerId l) {
      return [&layer = layers[l.index()]](MicroStepId m, const planner::ReplicaGraph& graph,
                                          std::span<const std::int64_t> load, planner::Assignment& assignment) {
        split(adjusted_parts(layer.base, layer.moves[m.index()], load), graph, assignment);
      };
    };
    return plan_freely(policy, input, pool);
  }

  std::vector<Option> options() override {
    constexpr NumberRange kBand{.least = 0, .most = 1e9};
    review::AdjustOptions& moves = options_.moves;
    std::vector<Option> options;
    if (options_.base) {
      options.push_back(
          number_option({.name = "base_epsilon", .help = "ε of BPO: ranks within ε of the mean are balanced"},
                        options_.base_epsilon, kBand));
    }
    if (options_.adjust) {
      options.push_back(number_option({.name = "epsilon", .help = "ε of MDA and its verifier"}, moves.epsilon, kBand));
      options.push_back(
          number_option({.name = "overshoot", .help = "Largest tokens of a move ÷ its rank's load above the mean"},
                        moves.overshoot, kBand));
      options.push_back(integer_option(
          {.name = "try_smaller", .help = "1: if the largest expert would over-correct, try the next one"},
          moves.try_smaller));
      options.push_back(
          integer_option({.name = "rounds", .help = "Rounds of MDA, including the first"}, moves.rounds, {1, 1 << 20}));
    }
    return options;
  }
  std::unique_ptr<Policy> copy() const override { return std::make_unique<ForeMoeReview>(*this); }

 private:
  static review::BaseShape shape_of(const PolicyInput& input) {
    const int num_ranks = input.load.num_ranks();
    return {.num_ranks = num_ranks, .slots_per_rank = input.load.num_experts() / num_ranks + input.options.guest_slots};
  }

  // base_seconds: set to the CPU seconds spent once per step.
  Layer plan_layer(const PolicyInput& input, LayerId l, ArrayView<const std::int64_t, 2> load,
                   double& base_seconds) const {
    const double begin = thread_cpu_seconds();
    const review::BaseShape shape = shape_of(input);
    std::vector<int> host;
    if (const StepPlan* former = former_plan(input, name()); options_.base && former != nullptr) {
      host = review::hosts_of(*former, l);
    } else {
      for (const RankId r : input.home.row(l)) host.push_back(r.value);
    }
    Layer layer;
    if (options_.base) {
      layer.base = review::place_base(sum_over_micro_steps(load), std::move(host), shape, options_.base_epsilon);
    } else {
      layer.base.replica.assign(host.size(), -1);
      layer.base.host = std::move(host);
    }
    base_seconds = options_.base ? thread_cpu_seconds() - begin : 0;
    layer.moves.resize(load.extent(0));
    for (std::size_t m = 0; options_.adjust && m < load.extent(0); ++m) {
      std::vector<Move> moves = review::adjust(layer.base, load.row(m), shape, options_.moves);
      if (review::is_consistent(layer.base, moves, shape)) layer.moves[m] = std::move(moves);
    }
    return layer;
  }

  // Returns [micro_step][rank][slot].
  static Array<ExpertId, 3> placements(const Layer& layer, const review::BaseShape& shape) {
    Array<ExpertId, 3> slots(
        {layer.moves.size(), static_cast<std::size_t>(shape.num_ranks), static_cast<std::size_t>(shape.slots_per_rank)},
        kNoExpert);
    for (std::size_t m = 0; m < layer.moves.size(); ++m) {
      const auto put = [&](int rank, int expert) {
        *std::ranges::find(slots.row(m, rank), kNoExpert) = ExpertId{expert};
      };
      for (int e = 0; e < std::ssize(layer.base.host); ++e) {
        put(layer.base.host[e], e);
        if (layer.base.replica[e] >= 0) put(layer.base.replica[e], e);
      }
      for (const Move& move : layer.moves[m]) put(move.to, move.expert);
    }
    return slots;
  }

  static void split(const std::vector<std::vector<review::Part>>& parts, const planner::ReplicaGraph& graph,
                    planner::Assignment& assignment) {
    assignment.quota.assign(graph.num_slots(), 0);
    assignment.rank_load.assign(graph.num_ranks(), 0);
    for (int e = 0; e < std::ssize(parts); ++e) {
      for (const review::Part& part : parts[e]) {
        assignment.quota[graph.find(e, part.rank)] = part.tokens;
        assignment.rank_load[part.rank] += part.tokens;
      }
    }
  }

  ForeMoeReviewOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_foremoe_review(const ForeMoeReviewOptions& options) {
  return std::make_unique<ForeMoeReview>(options);
}

}  // namespace foremoe
