#include "foremoe/policy/systems/feplb.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

// Published: "Runtime: ~50 µs on single CPU core". Every device plans for itself.
constexpr double kPublishedPlanningSeconds = 50e-6;

// Greedy search for one layer. Scratch memory is reused between micro-steps.
class NodeGreedy {
 public:
  explicit NodeGreedy(const FeplbOptions& options) : options_(options) {}

  void choose(const LayerLoad& load, std::vector<Share>& shares) {
    load_ = load;
    choose_dynamic();
    free_buffers_.assign(load.topology.num_ranks, std::min(load.guest_slots, options_.max_num_dyn));
    for (int n = 0; n < load.topology.num_nodes(); ++n) {
      node_ = load.topology.ranks_of(NodeId{n});
      while (move_one(shares)) {
      }
    }
  }

 private:
  std::int64_t tokens_of(ExpertId e) const { return load_.of_expert[e.index()]; }

  // Fills dynamic_, busiest experts first.
  void choose_dynamic() {
    count_at_home(load_, rank_load_);
    list_at_home(load_, dynamic_);
    const auto by_load = [&](ExpertId e) { return tokens_of(e); };
    for (auto& experts : dynamic_) {
      const std::size_t dyn = std::min(experts.size(), static_cast<std::size_t>(options_.dyn));
      if (options_.first_experts) experts.resize(dyn);
      std::ranges::stable_sort(experts, std::greater{}, by_load);
      experts.resize(dyn);
    }
  }

  bool move_one(std::vector<Share>& shares) {
    const int from = most_loaded();
    const int to = least_loaded_with_a_buffer();
    if (to < 0) return false;
    std::vector<ExpertId>& experts = dynamic_[from];
    const auto helps = [&](ExpertId e) {
      return tokens_of(e) > options_.min_tokens && rank_load_[to] + tokens_of(e) < rank_load_[from];
    };
    const auto at = options_.try_smaller ? std::ranges::find_if(experts, helps) : experts.begin();
    if (at == experts.end() || !helps(*at)) return false;
    shares.push_back({*at, RankId{to}, tokens_of(*at)});
    rank_load_[from] -= tokens_of(*at);
    rank_load_[to] += tokens_of(*at);
    --free_buffers_[to];
    experts.erase(at);
    return true;
  }

  int most_loaded() const {
    const auto load = rank_load_.begin();
    return static_cast<int>(std::max_element(load + node_.first, load + node_.last) - load);
  }

  int least_loaded_with_a_buffer() const {
    int least = -1;
    for (int r = node_.first; r < node_.last; ++r) {
      if (free_buffers_[r] > 0 && (least < 0 || rank_load_[r] < rank_load_[least])) least = r;
    }
    return least;
  }

  FeplbOptions options_;
  LayerLoad load_{};
  std::vector<std::int64_t> rank_load_;         // [rank], tokens
  std::vector<std::vector<ExpertId>> dynamic_;  // [rank], dynamic experts not moved, busiest first
  std::vector<int> free_buffers_;               // [rank]
  RankRange node_;                              // being balanced
};

class Feplb final : public Policy {
 public:
  explicit Feplb(const FeplbOptions& options) : options_(options) {}

  std::string_view name() const override { return options_.try_smaller ? "feplb-smaller" : "feplb"; }
  std::string_view summary() const override {
    return options_.try_smaller
               ? "FEPLB, continuing with smaller experts if moving the busiest one does not help"
               : "FEPLB: after dispatch, moves whole experts from the busiest to the idlest rank of their node";
  }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }
  OnlineWork online() const override {
    return {.copies_after_router = true,
            .gathers_loads = true,
            .planning_seconds = kPublishedPlanningSeconds,
            .own_experts_first = true,
            .plans_after_dispatch = true,
            .results_return = options_.charge_return};
  }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const auto of_layer = [&](LayerId) {
      return [greedy = NodeGreedy(options_)](const LayerLoad& load, std::vector<Share>& shares) mutable {
        greedy.choose(load, shares);
      };
    };
    return plan_fetched({.name = name(), .of_layer = of_layer}, input, pool);
  }

  std::vector<Option> options() override {
    FeplbOptions& o = options_;
    return {integer_option({.name = "dyn", .help = "Dynamic experts per rank"}, o.dyn, {0, kUnlimited}),
            integer_option({.name = "min_tokens", .help = "Experts with at most this many tokens stay"}, o.min_tokens,
                           {0, std::int64_t{1} << 40}),
            integer_option({.name = "max_num_dyn", .help = "Buffers per rank"}, o.max_num_dyn, {0, kUnlimited}),
            integer_option({.name = "try_smaller", .help = "1: the greedy search continues with smaller experts"},
                           o.try_smaller),
            integer_option({.name = "first_experts", .help = "1: the experts with the lowest ids are dynamic"},
                           o.first_experts),
            integer_option({.name = "charge_return", .help = "0: returning the results of moved rows takes no time"},
                           o.charge_return)};
  }
  std::unique_ptr<Policy> copy() const override { return std::make_unique<Feplb>(*this); }

 private:
  FeplbOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_feplb(const FeplbOptions& options) { return std::make_unique<Feplb>(options); }

}  // namespace foremoe
