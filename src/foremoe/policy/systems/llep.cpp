#include "foremoe/policy/systems/llep.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

// Assigns the experts of one layer of one micro-step.
class Spilling {
 public:
  Spilling(const LayerLoad& load, const LlepOptions& options, std::vector<Share>& shares)
      : load_(load), options_(options), shares_(shares), first_share_(shares.size()), guests_(load.topology.num_ranks) {
    count_at_home(load, effective_);
  }

  void run() {
    const std::int64_t total = std::accumulate(effective_.begin(), effective_.end(), std::int64_t{0});
    const auto num_ranks = static_cast<std::int64_t>(effective_.size());
    const double mean = static_cast<double>(total) / static_cast<double>(num_ranks);
    if (static_cast<double>(std::ranges::max(effective_)) <= options_.imbalance_threshold * mean) return;
    const std::int64_t floor = total / num_ranks;
    const auto whole_mean = static_cast<double>(floor);
    capacity_ = std::max<std::int64_t>(static_cast<std::int64_t>(options_.capacity_factor * whole_mean), 1);

    std::vector<std::size_t> order(load_.of_expert.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order,
                             [&](std::size_t a, std::size_t b) { return load_.of_expert[a] > load_.of_expert[b]; });
    for (const std::size_t e : order) {
      // at_home counts the tokens of this home's earlier experts that it serves, and all tokens of its later experts.
      const std::int64_t tokens = load_.of_expert[e];
      std::int64_t& at_home = effective_[load_.home[e].index()];
      const std::int64_t excess = std::clamp(at_home - capacity_, std::int64_t{0}, tokens);
      at_home -= excess;
      spill(ExpertId{e}, excess);
    }
  }

  int most_guests() const { return std::ranges::max(guests_); }  // of any rank

 private:
  void spill(ExpertId expert, std::int64_t rest) {
    while (rest > 0) {
      int helper = find_helper(expert, rest);
      std::int64_t chunk = rest;
      if (helper >= 0) {
        chunk = std::min(rest, capacity_ - effective_[helper]);
      } else {
        helper = least_loaded(expert);
      }
      give(expert, helper, chunk);
      rest -= chunk;
    }
  }

  bool may_hold(ExpertId expert, int rank) const {
    return RankId{rank} != load_.home[expert.index()] &&
           (guests_[rank] < load_.guest_slots || share_of(expert, rank) != shares_.end());
  }

  // Returns the rank with the least effective load that can take a sufficient chunk, or −1 if there is none.
  int find_helper(ExpertId expert, std::int64_t rest) const {
    int best = -1;
    for (int r = 0; r < load_.topology.num_ranks; ++r) {
      const std::int64_t room = capacity_ - effective_[r];
      if (room <= 0 || (room < options_.min_chunk && rest > room)) continue;
      if ((best < 0 || effective_[r] < effective_[best]) && may_hold(expert, r)) best = r;
    }
    return best;
  }

  // Returns the least loaded rank that can hold a copy, or the home if there is none.
  int least_loaded(ExpertId expert) const {
    int best = -1;
    for (int r = 0; r < load_.topology.num_ranks; ++r) {
      if ((best < 0 || effective_[r] < effective_[best]) && may_hold(expert, r)) best = r;
    }
    return best < 0 ? load_.home[expert.index()].value : best;
  }

  void give(ExpertId expert, int rank, std::int64_t tokens) {
    effective_[rank] += tokens;
    if (RankId{rank} == load_.home[expert.index()]) return;
    if (const auto share = share_of(expert, rank); share != shares_.end()) {
      share->tokens += tokens;
      return;
    }
    ++guests_[rank];
    shares_.push_back({.expert = expert, .rank = RankId{rank}, .tokens = tokens});
  }

  std::vector<Share>::iterator share_of(ExpertId expert, int rank) const {
    return std::find_if(shares_.begin() + static_cast<std::ptrdiff_t>(first_share_), shares_.end(),
                        [&](const Share& s) { return s.expert == expert && s.rank == RankId{rank}; });
  }

  const LayerLoad& load_;
  const LlepOptions& options_;
  std::vector<Share>& shares_;
  std::size_t first_share_;              // earlier shares belong to the caller
  std::vector<std::int64_t> effective_;  // [rank], tokens assigned plus those of its own unvisited experts
  std::vector<int> guests_;              // [rank]
  std::int64_t capacity_ = 0;
};

class Llep final : public Policy {
 public:
  explicit Llep(const LlepOptions& options) : options_(options) {}

  std::string_view name() const override { return "llep"; }
  std::string_view summary() const override {
    return "LLEP: homes filled to the mean, the rest spilled to the least loaded ranks";
  }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }
  OnlineWork online() const override { return {.copies_after_router = true, .gathers_loads = true}; }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const auto choose = [this](const LayerLoad& load, std::vector<Share>& shares) {
      Spilling(load, options_, shares).run();
    };
    PolicyInput with_slots = input;
    if (!options_.slot_limit) with_slots.options.guest_slots = most_guests(input, pool);
    return plan_fetched({.name = name(), .of_layer = [&](LayerId) { return choose; }}, with_slots, pool);
  }

  std::vector<Option> options() override {
    LlepOptions& o = options_;
    return {number_option({.name = "capacity_factor", .help = "Capacity of a rank ÷ mean load"}, o.capacity_factor,
                          {.least = 1}),
            integer_option({.name = "min_chunk", .help = "Smallest number of tokens in a chunk, except the last"},
                           o.min_chunk, {1, std::int64_t{1} << 40}),
            number_option(
                {.name = "imbalance_threshold", .help = "No tokens spill if ρ with experts at home is at most this"},
                o.imbalance_threshold, {}),
            integer_option(
                {.name = "slot_limit", .help = "0: ignore guest_slots and use as many as the busiest rank needs"},
                o.slot_limit)};
  }
  std::unique_ptr<Policy> copy() const override { return std::make_unique<Llep>(*this); }

 private:
  // Returns the most guests that a rank needs in any layer and micro-step without a slot limit.
  int most_guests(const PolicyInput& input, ThreadPool& pool) const {
    expect_valid(input.load, input.load.name);
    check_policy_input(input);
    const LoadTable& table = input.load;
    std::vector<int> most(table.num_layers());  // [layer]
    pool.for_each_index(most.size(), [&](std::size_t l, std::size_t) {
      std::vector<std::int64_t> of_expert(table.num_experts());
      std::vector<Share> shares;
      for (int m = 0; m < table.num_micro_steps(); ++m) {
        table.expert_loads(MicroStepId{m}, LayerId{l}, of_expert);
        const LayerLoad load{.micro_step = MicroStepId{m},
                             .layer = LayerId{l},
                             .by_source = table.load.view()[m][l],
                             .of_expert = of_expert,
                             .home = input.home.row(l),
                             .topology = table.topology(),
                             .guest_slots = table.num_experts()};
        shares.clear();
        Spilling spilling(load, options_, shares);
        spilling.run();
        most[l] = std::max(most[l], spilling.most_guests());
      }
    });
    return std::ranges::max(most);
  }

  LlepOptions options_;
};

}  // namespace

std::unique_ptr<Policy> make_llep(const LlepOptions& options) { return std::make_unique<Llep>(options); }

}  // namespace foremoe
