#include "foremoe/policy/systems/foremoe_review/base_placement.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

namespace foremoe::review {

namespace {

// State changed by relocation and replication. Loads are doubled, so that half loads are integers.
class Base {
 public:
  Base(std::span<const std::int64_t> load, std::vector<int> host, const BaseShape& shape)
      : shape_(shape), twice_load_(load.size()), rank_load_(shape.num_ranks), num_held_(shape.num_ranks) {
    std::ranges::transform(load, twice_load_.begin(), [](std::int64_t tokens) { return 2 * tokens; });
    placement_ = {.host = std::move(host), .replica = std::vector<int>(load.size(), -1)};
    for (std::size_t e = 0; e < load.size(); ++e) {
      rank_load_[placement_.host[e]] += twice_load_[e];
      ++num_held_[placement_.host[e]];
    }
    ideal_ = static_cast<double>(std::accumulate(rank_load_.begin(), rank_load_.end(), std::int64_t{0})) /
             static_cast<double>(shape.num_ranks);
  }

  void relocate() {
    std::vector<int> order(twice_load_.size());
    std::iota(order.begin(), order.end(), 0);
    std::vector<double> distance;  // [expert], between its host's load and ideal
    for (const int host : placement_.host) distance.push_back(std::abs(load(host) - ideal_));
    std::ranges::stable_sort(order, [&](int a, int b) { return distance[a] > distance[b]; });
    for (const int e : order) {
      const int host = placement_.host[e];
      const int to = least_loaded_with_room(host);
      if (to < 0 || rank_load_[to] + twice_load_[e] >= rank_load_[host]) continue;
      placement_.host[e] = to;
      move(host, to, twice_load_[e]);
      --num_held_[host];
    }
  }

  void replicate(double epsilon) {
    std::vector<int> overloaded;
    for (int r = 0; r < shape_.num_ranks; ++r) {
      if (load(r) > (1 + epsilon) * ideal_) overloaded.push_back(r);
    }
    std::ranges::stable_sort(overloaded, [&](int a, int b) { return rank_load_[a] > rank_load_[b]; });
    for (const int from : overloaded) {
      const int e = largest_hosted(from);
      const int to = least_loaded_with_room(from);
      if (e < 0 || to < 0 || load(to) >= (1 - epsilon) * ideal_) continue;
      placement_.replica[e] = to;
      move(from, to, twice_load_[e] / 2);
    }
  }

  BasePlacement result() && { return std::move(placement_); }

 private:
  double load(int rank) const { return static_cast<double>(rank_load_[rank]); }

  void move(int from, int to, std::int64_t twice_tokens) {
    rank_load_[from] -= twice_tokens;
    rank_load_[to] += twice_tokens;
    ++num_held_[to];
  }

  int least_loaded_with_room(int other_than) const {
    int least = -1;
    for (int r = 0; r < shape_.num_ranks; ++r) {
      if (r == other_than || num_held_[r] == shape_.slots_per_rank) continue;
      if (least < 0 || rank_load_[r] < rank_load_[least]) least = r;
    }
    return least;
  }

  int largest_hosted(int rank) const {
    int largest = -1;
    for (std::size_t e = 0; e < twice_load_.size(); ++e) {
      if (placement_.host[e] != rank) continue;
      if (largest < 0 || twice_load_[e] > twice_load_[largest]) largest = static_cast<int>(e);
    }
    return largest;
  }

  BaseShape shape_;
  BasePlacement placement_;
  std::vector<std::int64_t> twice_load_;  // [expert]
  std::vector<std::int64_t> rank_load_;   // [rank], doubled
  std::vector<int> num_held_;             // [rank], hosts and replicas
  double ideal_ = 0;                      // rank load, doubled
};

}  // namespace

BasePlacement place_base(std::span<const std::int64_t> load, std::vector<int> host, const BaseShape& shape,
                         double epsilon) {
  Base base(load, std::move(host), shape);
  base.relocate();
  base.replicate(epsilon);
  return std::move(base).result();
}

std::vector<int> hosts_of(const StepPlan& former, LayerId layer) {
  Array<int, 2> num_events_held({former.home.extent(1), former.slot_expert.extent(2)});  // [expert][rank]
  for (int t = 0; t < former.num_events(); ++t) {
    for (int r = 0; r < former.num_ranks(); ++r) {
      for (const ExpertId e : former.slot_expert.row(t, layer, r)) {
        if (e != kNoExpert) ++num_events_held(e, r);
      }
    }
  }
  std::vector<int> host;
  std::vector<int> num_hosted(former.num_ranks());
  for (int e = 0; e < former.num_experts(); ++e) {
    const auto preference = [&](int r) {
      return std::tuple{num_hosted[r] < former.num_slots(), num_events_held(e, r), former.home(layer, e) == RankId{r}};
    };
    int best = 0;
    for (int r = 1; r < former.num_ranks(); ++r) {
      if (preference(r) > preference(best)) best = r;
    }
    ++num_hosted[best];
    host.push_back(best);
  }
  return host;
}

}  // namespace foremoe::review
