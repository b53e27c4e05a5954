#include "foremoe/policy/placed_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

namespace foremoe {

namespace {

// Replaces the plan's homes by the policy's. Records the option `rehome` as `free`, i.e. unlimited home moves.
void move_homes(ArrayView<const RankId, 2> home, StepPlan& plan) {
  assert(home.shape() == plan.home.shape());
  std::ranges::copy(home.flat(), plan.home.flat().begin());
  auto options = nlohmann::ordered_json::parse(plan.options);
  options["rehome"] = "free";
  plan.options = options.dump();
}

// Plans one layer, event by event.
class FetchedLayer {
 public:
  FetchedLayer(const FetchedPolicy& policy, const PolicyInput& input, LayerId layer, StepPlan& plan)
      : load_(input.load),
        layer_(layer),
        plan_(plan),
        num_homes_(plan.num_slots() - plan.guest_slots),
        choose_(policy.of_layer(layer)),
        of_expert_(plan.home.extent(1)) {}

  void plan_events() {
    std::vector<int> forward(load_.load.extent(0));  // [micro_step], event
    for (int t = 0; t < plan_.num_events(); ++t) {
      const MicroStepId m = plan_.event_micro_step[t];
      if (plan_.event_pass[t] == Pass::kForward) {
        forward[m.index()] = t;
        choose_shares(m);
      } else {
        read_shares(forward[m.index()]);
      }
      load_.expert_loads(m, layer_, of_expert_);
      fill_homes(t);
      fill_guests(t);
      assert(shares_keep_the_contract(t));
      record_loads(t);
    }
  }

 private:
  void choose_shares(MicroStepId m) {
    load_.expert_loads(m, layer_, of_expert_);
    shares_.clear();
    choose_({.micro_step = m,
             .layer = layer_,
             .by_source = load_.load.view()[m][layer_],
             .of_expert = of_expert_,
             .home = plan_.home.row(layer_),
             .topology = load_.topology(),
             .guest_slots = plan_.guest_slots},
            shares_);
    std::ranges::sort(shares_, {}, [](const Share& share) { return std::pair(share.rank, share.expert); });
  }

  // Reads the shares of a micro-step's forward event from the plan. The backward event reuses them.
  void read_shares(int forward) {
    shares_.clear();
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      for (int s = num_homes_; s < plan_.num_slots(); ++s) {
        const ExpertId e = plan_.slot_expert(forward, layer_, r, s);
        if (e != kNoExpert) shares_.push_back({e, RankId{r}, plan_.slot_tokens(forward, layer_, r, s).value});
      }
    }
    std::ranges::sort(shares_, {}, [](const Share& share) { return std::pair(share.rank, share.expert); });
  }

  void fill_homes(int t) {
    std::vector<std::int64_t> at_home(of_expert_);
    for (const Share& share : shares_) at_home[share.expert.index()] -= share.tokens;
    std::vector<int> next_slot(plan_.num_ranks());
    for (int e = 0; e < plan_.num_experts(); ++e) {
      const RankId home = plan_.home(layer_, e);
      const int slot = next_slot[home.index()]++;
      plan_.slot_expert(t, layer_, home, slot) = ExpertId{e};
      plan_.slot_tokens(t, layer_, home, slot) = Tokens{at_home[e]};
    }
  }

  // Guests that stay keep their slots. New guests take the free slots in ascending order.
  void fill_guests(int t) {
    std::vector<Share> newcomers;
    for (auto of_rank = shares_.begin(); of_rank != shares_.end();) {
      const RankId rank = of_rank->rank;
      const auto end = std::find_if(of_rank, shares_.end(), [&](const Share& share) { return share.rank != rank; });
      assert(end - of_rank <= plan_.guest_slots);
      newcomers.clear();
      for (; of_rank != end; ++of_rank) {
        const int slot = slot_before(t, *of_rank);
        if (slot < 0) {
          newcomers.push_back(*of_rank);
        } else {
          put(t, slot, *of_rank);
        }
      }
      int slot = num_homes_;
      for (const Share& share : newcomers) {
        while (plan_.slot_expert(t, layer_, rank, slot) != kNoExpert) ++slot;
        put(t, slot, share);
      }
    }
  }

  // Returns the guest's slot at the previous event, or −1 if the rank did not hold the guest then.
  int slot_before(int t, const Share& share) const {
    if (t == 0) return -1;
    const std::span<const ExpertId> before = std::as_const(plan_.slot_expert).row(t - 1, layer_, share.rank);
    const auto at = std::find(before.begin() + num_homes_, before.end(), share.expert);
    return at == before.end() ? -1 : static_cast<int>(at - before.begin());
  }

  void put(int t, int slot, const Share& share) {
    plan_.slot_expert(t, layer_, share.rank, slot) = share.expert;
    plan_.slot_tokens(t, layer_, share.rank, slot) = Tokens{share.tokens};
  }

  bool shares_keep_the_contract(int t) const {
    for (std::size_t i = 0; i < shares_.size(); ++i) {
      const Share& share = shares_[i];
      const bool twice = i > 0 && shares_[i - 1].rank == share.rank && shares_[i - 1].expert == share.expert;
      if (twice || share.tokens < 1 || plan_.home(layer_, share.expert) == share.rank) return false;
    }
    return std::ranges::all_of(plan_.slot_tokens.view()[t][layer_].flat(), [](Tokens n) { return n >= Tokens{0}; });
  }

  void record_loads(int t) {
    std::int64_t largest = 0;
    for (int r = 0; r < plan_.num_ranks(); ++r) {
      std::int64_t of_rank = 0;
      for (const Tokens tokens : plan_.slot_tokens.row(t, layer_, r)) of_rank += tokens.value;
      largest = std::max(largest, of_rank);
    }
    const std::int64_t total = std::accumulate(of_expert_.begin(), of_expert_.end(), std::int64_t{0});
    const MicroStepId m = plan_.event_micro_step[t];
    plan_.max_load(m, layer_) = Tokens{largest};
    plan_.lower_bound(m, layer_) = Tokens{(total + plan_.num_ranks() - 1) / plan_.num_ranks()};
  }

  const LoadTable& load_;
  LayerId layer_;
  StepPlan& plan_;  // only this layer is written
  int num_homes_;   // per rank
  ChooseShares choose_;
  std::vector<std::int64_t> of_expert_;  // [expert], tokens of the micro-step
  std::vector<Share> shares_;            // of the micro-step, sorted by rank, then by expert
};

}  // namespace

void count_at_home(const LayerLoad& load, std::vector<std::int64_t>& tokens) {
  tokens.assign(load.topology.num_ranks, 0);
  for (std::size_t e = 0; e < load.home.size(); ++e) tokens[load.home[e].index()] += load.of_expert[e];
}

void list_at_home(const LayerLoad& load, std::vector<std::vector<ExpertId>>& experts) {
  experts.resize(load.topology.num_ranks);
  for (auto& of_rank : experts) of_rank.clear();
  for (std::size_t e = 0; e < load.home.size(); ++e) experts[load.home[e].index()].emplace_back(e);
}

PolicyResult plan_fetched(const FetchedPolicy& policy, const PolicyInput& input, ThreadPool& pool) {
  expect_valid(input.load, input.load.name);
  if (input.load.num_experts() % input.load.num_ranks() != 0) {
    return Skipped{fmt::format("{} experts cannot be spread evenly over {} ranks: their number must be a multiple",
                               input.load.num_experts(), input.load.num_ranks())};
  }
  check_policy_input(input);
  StepPlan empty = empty_plan(policy.name, Residency::kShared, input);
  if (policy.home.data() != nullptr) move_homes(policy.home, empty);
  return plan_layers(std::move(empty), pool,
                     [&](LayerId l, StepPlan& plan) { FetchedLayer(policy, input, l, plan).plan_events(); });
}

}  // namespace foremoe
