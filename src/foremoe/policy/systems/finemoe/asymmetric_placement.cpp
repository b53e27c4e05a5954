#include "foremoe/policy/systems/finemoe/asymmetric_placement.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <numeric>
#include <queue>

#include "foremoe/planner/token_assignment.h"

namespace foremoe::finemoe {

namespace {

// Returns whether expert a has more tokens per replica than b. Ties go to the lower id.
bool denser(std::span<const std::int64_t> load, std::span<const int> counts, int a, int b) {
  const auto of_a = static_cast<long double>(load[a]) * counts[b];  // exact: 64 bits of mantissa
  const auto of_b = static_cast<long double>(load[b]) * counts[a];
  return of_a != of_b ? of_a > of_b : a < b;
}

template <class T>
void shuffle(std::span<T> items, Random& random) {
  for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random.below(i)]);
}

// Experts grouped by local index. An expert of experts_[i] has counts_ replicas, all at index i.
class Indices {
 public:
  Indices(std::span<const std::int64_t> load, std::span<const int> counts, const AsymmetricShape& shape)
      : load_(load),
        counts_(counts.begin(), counts.end()),
        num_ranks_(shape.num_ranks),
        room_(shape.slots_per_rank, shape.num_ranks),
        experts_(shape.slots_per_rank) {}

  void fill(Random& random) {
    std::vector<int> order(counts_.size());
    std::iota(order.begin(), order.end(), 0);
    shuffle(std::span(order), random);
    std::ranges::stable_sort(order, std::greater<>{}, [&](int e) { return counts_[e]; });
    for (const int e : order) {
      const std::size_t i = index_for(counts_[e], random);
      counts_[e] = std::min(counts_[e], room_[i]);
      room_[i] -= counts_[e];
      experts_[i].push_back(e);
    }
    for (std::size_t i = 0; i < room_.size(); ++i) {
      while (room_[i] > 0 && !experts_[i].empty()) {
        const int e =
            *std::ranges::min_element(experts_[i], [&](int a, int b) { return denser(load_, counts_, a, b); });
        ++counts_[e];
        --room_[i];
      }
    }
  }

  void deal(Random& random, Array<ExpertId, 2>& placement) const {
    std::vector<int> ranks(num_ranks_);
    std::iota(ranks.begin(), ranks.end(), 0);
    for (std::size_t i = 0; i < experts_.size(); ++i) {
      shuffle(std::span(ranks), random);
      auto rank = ranks.begin();
      for (const int e : experts_[i]) {
        for (int n = 0; n < counts_[e]; ++n) placement(*rank++, i) = ExpertId{e};
      }
    }
  }

 private:
  std::size_t index_for(int count, Random& random) const {
    std::vector<std::size_t> with_room;
    for (std::size_t i = 0; i < room_.size(); ++i) {
      if (room_[i] >= count) with_room.push_back(i);
    }
    if (!with_room.empty()) return with_room[random.below(with_room.size())];
    return static_cast<std::size_t>(std::ranges::max_element(room_) - room_.begin());
  }

  std::span<const std::int64_t> load_;
  std::vector<int> counts_;  // [expert]
  int num_ranks_;
  std::vector<int> room_;                  // [local index], free ranks
  std::vector<std::vector<int>> experts_;  // [local index]
};

planner::ReplicaGraph graph_of(ArrayView<const ExpertId, 2> placement, std::size_t num_experts) {
  const auto slots = static_cast<int>(placement.extent(1));
  planner::ReplicaGraph graph(static_cast<int>(placement.extent(0)), slots, static_cast<int>(num_experts));
  for (int s = 0; s < graph.num_slots(); ++s) {
    const ExpertId e = placement.flat()[s];
    if (e != kNoExpert) graph.put(s, e.value);
  }
  return graph;
}

std::int64_t ceil_mean(std::span<const std::int64_t> load, std::size_t num_ranks) {
  const auto ranks = static_cast<std::int64_t>(num_ranks);
  return (std::accumulate(load.begin(), load.end(), std::int64_t{0}) + ranks - 1) / ranks;
}

}  // namespace

std::vector<int> replica_counts(std::span<const std::int64_t> expert_load, const AsymmetricShape& shape) {
  std::vector<int> counts(expert_load.size(), 1);
  const auto later = [&](int a, int b) { return denser(expert_load, counts, b, a); };
  std::priority_queue<int, std::vector<int>, decltype(later)> heap(later);  // experts with fewer than R replicas
  if (shape.num_ranks > 1) {
    for (int e = 0; e < std::ssize(counts); ++e) heap.push(e);
  }
  const int num_replicas = shape.num_ranks * shape.slots_per_rank;
  for (int n = static_cast<int>(counts.size()); n < num_replicas && !heap.empty(); ++n) {
    const int e = heap.top();
    heap.pop();
    if (++counts[e] < shape.num_ranks) heap.push(e);
  }
  return counts;
}

Array<ExpertId, 2> draw_placement(std::span<const std::int64_t> expert_load, std::span<const int> counts,
                                  const AsymmetricShape& shape, Random& random) {
  Array<ExpertId, 2> placement(
      {static_cast<std::size_t>(shape.num_ranks), static_cast<std::size_t>(shape.slots_per_rank)}, kNoExpert);
  Indices indices(expert_load, counts, shape);
  indices.fill(random);
  indices.deal(random, placement);
  return placement;
}

std::int64_t largest_density(ArrayView<const ExpertId, 2> placement, std::span<const std::int64_t> expert_load) {
  const planner::ReplicaGraph graph = graph_of(placement, expert_load.size());
  planner::Assignment assignment;
  planner::AssignmentSearch search;
  planner::water_fill(graph, expert_load, assignment);
  return planner::assign_tokens(graph, ceil_mean(expert_load, placement.extent(0)), assignment, search);
}

Array<ExpertId, 2> asymmetric_placement(std::span<const std::int64_t> expert_load, const AsymmetricShape& shape,
                                        Random& random, int num_samples) {
  assert(num_samples > 0);
  const std::vector<int> counts = replica_counts(expert_load, shape);
  const std::int64_t least = ceil_mean(expert_load, static_cast<std::size_t>(shape.num_ranks));
  Array<ExpertId, 2> best;
  std::int64_t best_density = std::numeric_limits<std::int64_t>::max();
  for (int n = 0; n < num_samples && best_density > least; ++n) {
    Array<ExpertId, 2> placement = draw_placement(expert_load, counts, shape, random);
    const std::int64_t density = largest_density(placement, expert_load);
    if (density >= best_density) continue;
    best_density = density;
    best = std::move(placement);
  }
  return best;
}

bool needs_replacement(ArrayView<const ExpertId, 2> placement, std::span<const std::int64_t> predicted_load,
                       double threshold) {
  const auto total =
      static_cast<double>(std::accumulate(predicted_load.begin(), predicted_load.end(), std::int64_t{0}));
  const double mean = total / static_cast<double>(placement.extent(0));
  return static_cast<double>(largest_density(placement, predicted_load)) > std::ceil(threshold * mean);
}

Array<ExpertId, 3> replace_adaptively(const ReplacementProblem& problem, const ReplacementOptions& options,
                                      Random& random) {
  assert(options.interval >= 1 && options.window >= 1);
  const std::size_t num_micro_steps = problem.load.extent(0);
  Array<ExpertId, 3> placements({num_micro_steps, static_cast<std::size_t>(problem.shape.num_ranks),
                                 static_cast<std::size_t>(problem.shape.slots_per_rank)});
  Array<ExpertId, 2> current({placements.extent(1), placements.extent(2)});
  std::ranges::copy(problem.initial.flat(), current.flat().begin());
  std::vector<std::int64_t> predicted(problem.predicted_load.begin(), problem.predicted_load.end());
  for (std::size_t m = 0; m < num_micro_steps; ++m) {
    if (m > 0 && m % static_cast<std::size_t>(options.interval) == 0) {
      std::ranges::fill(predicted, 0);  // sums replace averages: the unit does not matter
      for (std::size_t seen = m - std::min(m, static_cast<std::size_t>(options.window)); seen < m; ++seen) {
        std::ranges::transform(predicted, problem.load.row(seen), predicted.begin(), std::plus<>{});
      }
    }
    const bool is_time = m % static_cast<std::size_t>(options.interval) == 0;
    const bool is_placed = m > 0 || problem.initial.size() > 0;
    if (is_time && !(is_placed && !needs_replacement(current, predicted, options.threshold))) {
      current = asymmetric_placement(predicted, problem.shape, random, options.num_samples);
    }
    std::ranges::copy(current.flat(), placements.view()[m].flat().begin());
  }
  return placements;
}

}  // namespace foremoe::finemoe
