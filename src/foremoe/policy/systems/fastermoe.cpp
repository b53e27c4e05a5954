#include "foremoe/policy/systems/fastermoe.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

namespace foremoe {

namespace {

constexpr double kNvlinkBytesPerSecond = 450e9;
constexpr double kNetworkBytesPerSecond = 50e9;

// Shadows experts one after another and updates rank loads.
class Shadowing {
 public:
  Shadowing(const LayerLoad& load, const FasterMoeSeconds& seconds) : load_(load), seconds_(seconds) {
    count_at_home(load, rank_load_);
    list_at_home(load, left_on_);
    for (auto& experts : left_on_) {
      std::ranges::stable_sort(experts, std::greater{}, [&](ExpertId e) { return load.of_expert[e.index()]; });
    }
  }

  std::vector<ExpertId> one_by_one() {
    return while_it_pays([&] { shadow_next(busiest_with_experts(), 1); });
  }

  std::vector<ExpertId> whole_ranks() {
    std::vector<int> order(rank_load_.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::greater{}, [&](int r) { return rank_load_[r]; });
    return while_it_pays([&, next = order.begin()]() mutable {
      if (next + 1 == order.end()) return;
      shadow_next(*next, left_on_[*next].size());
      ++next;
    });
  }

 private:
  // Calls `add` until the estimate rises. Each call shadows further experts if experts and slots are left.
  template <class Add>
  std::vector<ExpertId> while_it_pays(Add add) {
    const double without = busiest() * (3 * seconds_.compute + 4 * seconds_.send);
    double least = std::numeric_limits<double>::infinity();
    std::size_t chosen = 0;
    while (true) {
      add();
      if (shadows_.size() == chosen) break;
      const double broadcasts = static_cast<double>(shadows_.size()) * seconds_.broadcast;
      const double with = busiest() * 3 * seconds_.compute + 2 * broadcasts;
      if (with > least) break;
      least = with;
      chosen = shadows_.size();
    }
    shadows_.resize(least < without ? chosen : 0);
    return shadows_;
  }

  // Shadows the most loaded remaining experts of the rank: at most `count`, and at most one per free slot.
  void shadow_next(int rank, std::size_t count) {
    const auto free_slots = static_cast<std::size_t>(load_.guest_slots) - shadows_.size();
    std::vector<ExpertId>& experts = left_on_[rank];
    count = std::min({count, free_slots, experts.size()});
    for (std::size_t i = 0; i < count; ++i) {
      rank_load_[rank] -= load_.of_expert[experts[i].index()];
      for (int r = 0; r < load_.topology.num_ranks; ++r) rank_load_[r] += load_.by_source(r, experts[i]).value;
      shadows_.push_back(experts[i]);
    }
    experts.erase(experts.begin(), experts.begin() + static_cast<std::ptrdiff_t>(count));
  }

  double busiest() const { return static_cast<double>(std::ranges::max(rank_load_)); }

  // Returns the most loaded rank with remaining experts, or rank 0 if there is none.
  int busiest_with_experts() const {
    int best = 0;
    for (int r = 1; r < load_.topology.num_ranks; ++r) {
      if (!left_on_[r].empty() && (left_on_[best].empty() || rank_load_[r] > rank_load_[best])) best = r;
    }
    return best;
  }

  const LayerLoad& load_;
  FasterMoeSeconds seconds_;
  std::vector<std::int64_t> rank_load_;         // [rank], tokens
  std::vector<std::vector<ExpertId>> left_on_;  // [rank], experts not shadowed, most loaded first
  std::vector<ExpertId> shadows_;
};

// Rule `expert`, as in the authors' later code.
std::vector<ExpertId> most_loaded_experts(const LayerLoad& load, const FasterMoeSeconds& of) {
  std::vector<ExpertId> by_load;
  for (std::size_t e = 0; e < load.of_expert.size(); ++e) by_load.emplace_back(e);
  std::ranges::stable_sort(by_load, std::greater{}, [&](ExpertId e) { return load.of_expert[e.index()]; });
  const auto seconds = [&](int num_shadows) {
    const auto largest_left = static_cast<double>(load.of_expert[by_load[num_shadows].index()]);
    return largest_left * (3 * of.compute + 4 * of.send) + num_shadows * of.broadcast;
  };
  int num_shadows = 0;
  while (num_shadows < load.guest_slots && num_shadows + 1 < std::ssize(by_load) &&
         seconds(num_shadows + 1) < seconds(num_shadows)) {
    ++num_shadows;
  }
  by_load.resize(num_shadows);
  return by_load;
}

class FasterMoe final : public Policy {
 public:
  explicit FasterMoe(const FasterMoeOptions& options) : options_(options) {}

  std::string_view name() const override { return "fastermoe"; }
  std::string_view summary() const override {
    return "FasterMoE: experts of the busiest ranks on every rank while its time model predicts a gain";
  }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }
  // FasterMoE uses the gate's counts of this micro-step. The decision time is unpublished and not charged.
  OnlineWork online() const override {
    return {.copies_after_router = true,
            .gathers_loads = true,
            .own_experts_first = true,
            .keeps_guests = true,
            .sources = send_in_ring,
            .gradients_go_to_sources = true};
  }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const auto shadow = [this](const LayerLoad& of, std::vector<Share>& shares) {
      for (const ExpertId e : fastermoe_shadows(of, options_)) {
        for (int r = 0; r < of.topology.num_ranks; ++r) {
          const std::int64_t own = of.by_source(r, e).value;
          if (RankId{r} != of.home[e.index()] && own > 0) shares.push_back({e, RankId{r}, own});
        }
      }
    };
    return plan_fetched({.name = name(), .of_layer = [&](LayerId) { return shadow; }}, input, pool);
  }

  std::vector<Option> options() override {
    FasterMoeOptions& o = options_;
    const NumberRange positive{.most = 1e18, .above = true};
    return {
        word_option(
            {.name = "rule", .help = "Selection of the next expert to shadow"}, o.rule,
            {{"worker", FasterMoeRule::kWorker}, {"whole", FasterMoeRule::kWhole}, {"expert", FasterMoeRule::kExpert}}),
        number_option({.name = "intermediate", .help = "Time model: intermediate size of an expert"}, o.intermediate,
                      positive),
        number_option({.name = "bytes_per_second",
                       .help = "Time model: bandwidth of a rank's link; not given: 450e9 on one node, else 50e9"},
                      o.bytes_per_second, positive),
        number_option({.name = "flops_per_second", .help = "Time model: rate of matrix products"}, o.flops_per_second,
                      positive)};
  }
  std::unique_ptr<Policy> copy() const override { return std::make_unique<FasterMoe>(*this); }

 private:
  FasterMoeOptions options_;
};

}  // namespace

void send_in_ring(const CopiesOfExpert& copies, std::span<int> sent) {
  const int num_ranks = static_cast<int>(sent.size());
  const auto behind_home = [&](RankId rank) { return (rank.value - copies.home.value + num_ranks) % num_ranks; };
  std::vector<std::size_t> ring(copies.ranks.size());
  std::iota(ring.begin(), ring.end(), 0);
  std::ranges::sort(ring, {}, [&](std::size_t i) { return behind_home(copies.ranks[i]); });
  for (std::size_t i = 1; i < ring.size(); ++i) copies.sources[ring[i]] = copies.ranks[ring[i - 1]];
}

FasterMoeSeconds fastermoe_seconds(const FasterMoeOptions& options, Topology topology) {
  const bool one_node = topology.num_ranks <= topology.ranks_per_node;
  const double rate = options.bytes_per_second.value_or(one_node ? kNvlinkBytesPerSecond : kNetworkBytesPerSecond);
  const double weights = options.matrices * options.hidden * options.intermediate;
  return {.compute = 2 * weights / options.flops_per_second,
          .send = options.hidden * options.bytes_per_value / rate,
          .broadcast = weights * options.bytes_per_value / rate};
}

std::vector<ExpertId> fastermoe_shadows(const LayerLoad& load, const FasterMoeOptions& options) {
  const FasterMoeSeconds seconds = fastermoe_seconds(options, load.topology);
  switch (options.rule) {
    case FasterMoeRule::kWorker:
      return Shadowing(load, seconds).one_by_one();
    case FasterMoeRule::kWhole:
      return Shadowing(load, seconds).whole_ranks();
    case FasterMoeRule::kExpert:
      return most_loaded_experts(load, seconds);
  }
  return {};
}

std::unique_ptr<Policy> make_fastermoe(const FasterMoeOptions& options) { return std::make_unique<FasterMoe>(options); }

}  // namespace foremoe
