#include "foremoe/policy/systems/ultraep.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "foremoe/policy/placed_plan.h"

namespace foremoe {

namespace {

constexpr int kRetries = 2;                       // QUOTA_ORACLE_FAST_MAX_RETRY
constexpr int kTargetsAtOnce = 4;                 // QUOTA_SOLVER_WARPS
constexpr std::size_t kLeastForRelays = 4;        // ULTRA_EP_WEIGHT_SYNC_RELAY_MIN_REPLICAS
constexpr std::size_t kMostRelays = 8;            // ULTRA_EP_WEIGHT_SYNC_RELAY_MAX_RELAYS
constexpr std::size_t kLargestWithoutRelays = 8;  // ranks of a domain

// The search in one layer. Scratch memory is reused between micro-steps.
class QuotaSearch {
 public:
  explicit QuotaSearch(const UltraEpOptions& options) : options_(options) {}

  void choose(const LayerLoad& load, std::vector<Share>& shares) {
    load_ = load;
    sort_experts();
    const int num_ranks = load.topology.num_ranks;
    const int domain_size = options_.whole_group ? num_ranks : load.topology.ranks_per_node;
    for (int first = 0; first < num_ranks; first += domain_size) {
      search(first, std::min(first + domain_size, num_ranks));
      shares.insert(shares.end(), exports_.begin(), exports_.end());
    }
  }

 private:
  void sort_experts() {
    count_at_home(load_, rank_load_);
    list_at_home(load_, experts_of_);
    for (auto& experts : experts_of_) {
      std::ranges::stable_sort(experts, std::greater{}, [&](ExpertId e) { return load_.of_expert[e.index()]; });
    }
  }

  // Stores the exports of the accepted attempt in exports_.
  void search(int first, int end) {
    first_ = first;
    end_ = end;
    order_.resize(end - first);
    std::iota(order_.begin(), order_.end(), first);
    std::ranges::stable_sort(order_, std::greater{}, [&](int r) { return rank_load_[r]; });
    const std::int64_t total = std::accumulate(rank_load_.begin() + first, rank_load_.begin() + end, std::int64_t{0});
    const std::int64_t mean = (total + end - first - 1) / (end - first);  // rounded up
    const std::int64_t largest = rank_load_[order_.front()];

    auto target = static_cast<std::int64_t>(std::ceil(static_cast<double>(mean) * (1 + options_.tolerance)));
    const std::int64_t step = std::max<std::int64_t>(1, (largest + 99) / 100);
    minimum_.reset();
    for (int i = 0; i <= kRetries; ++i) {
      if (attempt(target)) return;
      target = std::min(largest, target + step);
    }
    minimum_ = options_.min_tokens_per_replica;
    if (attempt(mean)) return;
    std::int64_t low = mean + 1;
    std::int64_t high = largest;  // always feasible
    while (low < high) {
      const std::int64_t base = low;
      const std::int64_t range = high - low;
      for (int i = 0; i < kTargetsAtOnce && low < high; ++i) {
        target = range <= kTargetsAtOnce ? base + i : base + range * (i + 1) / (kTargetsAtOnce + 1);
        if (attempt(target)) {
          high = target;
          break;
        }
        low = target + 1;
      }
    }
    attempt(high);
  }

  bool attempt(std::int64_t target) {
    exports_.clear();
    room_.assign(rank_load_.size(), 0);
    for (int r = first_; r < end_; ++r) room_[r] = target - rank_load_[r];
    free_slots_.assign(rank_load_.size(), load_.guest_slots);
    last_guest_.assign(rank_load_.size(), kNoExpert);
    return std::ranges::all_of(order_, [&](int r) { return relieve(r); });
  }

  // Exports from the rank. Returns whether the rank is no longer above the target.
  bool relieve(int rank) {
    std::int64_t excess = -room_[rank];
    for (const ExpertId e : experts_of_[rank]) {
      std::int64_t available = load_.of_expert[e.index()] - (options_.keep_a_token_at_home ? 1 : 0);
      while (excess > 0 && available > 0) {
        const auto [to, num_receivers] = receivers(e);
        if (num_receivers == 0) break;
        const std::int64_t tokens = std::min({excess, room_[to], available});
        const std::int64_t even_part = (excess + num_receivers - 1) / num_receivers;
        if (tokens < minimum_.value_or(even_part)) break;  // no other rank can take more
        exports_.push_back({e, RankId{to}, tokens});
        last_guest_[to] = e;
        --free_slots_[to];
        room_[to] -= tokens;
        excess -= tokens;
        available -= tokens;
      }
      if (excess <= 0) return true;
    }
    return excess <= 0;
  }

  struct Receivers {
    int roomiest = -1;
    int count = 0;
  };

  // Returns the ranks below the target that have a free slot and not the expert. An expert's exports are consecutive,
  // so comparing a rank's last guest suffices.
  Receivers receivers(ExpertId e) const {
    Receivers found;
    for (int r = first_; r < end_; ++r) {
      if (room_[r] <= 0 || free_slots_[r] == 0 || last_guest_[r] == e) continue;
      if (found.count++ == 0 || room_[r] > room_[found.roomiest]) found.roomiest = r;
    }
    return found;
  }

  UltraEpOptions options_;
  LayerLoad load_{};
  std::optional<std::int64_t> minimum_;            // tokens of an export; null: excess ÷ receivers
  std::vector<std::int64_t> rank_load_;            // [rank], tokens at homes
  std::vector<std::vector<ExpertId>> experts_of_;  // [rank], home experts, largest load first
  int first_ = 0;                                  // the domain's ranks are first_ to end_ − 1
  int end_ = 0;
  std::vector<int> order_;            // ranks of the domain, largest load first
  std::vector<std::int64_t> room_;    // [rank], target minus load; negative for senders
  std::vector<int> free_slots_;       // [rank]
  std::vector<ExpertId> last_guest_;  // [rank]
  std::vector<Share> exports_;        // of the last attempt
};

class UltraEp final : public Policy {
 public:
  explicit UltraEp(const UltraEpOptions& options) : options_(options) {}

  std::string_view name() const override { return "ultraep"; }
  std::string_view summary() const override {
    return "UltraEP: after every router, searches for the smallest load that quotas exported inside nodes can reach";
  }
  bool plans_ahead(const PolicyInput& /*input*/) const override { return false; }
  OnlineWork online() const override {
    return {.copies_after_router = true,
            .prefetches_in_backward = true,
            .gathers_loads = true,
            .planning_seconds = options_.planning_us * 1e-6,
            .sources = options_.whole_group ? send_by_relays_of_group : send_by_relays};
  }

  PolicyResult plan(const PolicyInput& input, ThreadPool& pool) const override {
    const auto of_layer = [&](LayerId) {
      return [search = QuotaSearch(options_)](const LayerLoad& load, std::vector<Share>& shares) mutable {
        search.choose(load, shares);
      };
    };
    return plan_fetched({.name = name(), .of_layer = of_layer}, input, pool);
  }

  std::vector<Option> options() override {
    return {integer_option({.name = "min_tokens_per_replica",
                            .help = "Smallest number of tokens of a replica if the first three targets fail"},
                           options_.min_tokens_per_replica, {1, std::int64_t{1} << 40}),
            integer_option({.name = "whole_group", .help = "1: as if NVLink joined all nodes, so replicas leave them"},
                           options_.whole_group),
            number_option({.name = "planning_us", .help = "Planning time per layer and micro-step in microseconds"},
                          options_.planning_us, {0, 1e6})};
  }
  std::unique_ptr<Policy> copy() const override { return std::make_unique<UltraEp>(*this); }

 private:
  UltraEpOptions options_;
};

void send_in_domain(const CopiesOfExpert& copies, std::span<int> sent, std::size_t domain_size) {
  const std::size_t num_copies = copies.ranks.size();
  int& by_home = sent[copies.home.index()];
  if (num_copies < kLeastForRelays || domain_size <= kLargestWithoutRelays) {
    by_home += static_cast<int>(num_copies);
    return;
  }
  std::size_t num_relays = 1;
  while (num_relays < kMostRelays && (num_relays + 1) * (num_relays + 1) <= num_copies) ++num_relays;
  by_home += static_cast<int>(num_relays);

  const auto sends = [&](RankId rank) { return std::pair(sent[rank.index()], rank); };
  std::vector<RankId> relays(copies.ranks.begin(), copies.ranks.end());
  std::ranges::sort(relays, {}, sends);
  relays.resize(num_relays);
  std::size_t num_leaves = 0;
  for (std::size_t i = 0; i < num_copies; ++i) {
    if (std::ranges::find(relays, copies.ranks[i]) != relays.end()) continue;
    RankId& source = copies.sources[i];
    source = num_leaves < num_relays ? relays[num_leaves] : *std::ranges::min_element(relays, {}, sends);
    ++sent[source.index()];
    ++num_leaves;
  }
}

}  // namespace

void send_by_relays(const CopiesOfExpert& copies, std::span<int> sent) {
  send_in_domain(copies, sent, std::min<std::size_t>(copies.ranks_per_node, sent.size()));
}

void send_by_relays_of_group(const CopiesOfExpert& copies, std::span<int> sent) {
  send_in_domain(copies, sent, sent.size());
}

std::unique_ptr<Policy> make_ultraep(const UltraEpOptions& options) { return std::make_unique<UltraEp>(options); }

}  // namespace foremoe
