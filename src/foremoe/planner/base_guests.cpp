#include "foremoe/planner/base_guests.h"

#include <algorithm>
#include <numeric>

namespace foremoe::planner {

namespace {

constexpr float kCopyWorth = 15;       // number of guests that cost as much as one mean rank load above the targets
constexpr float kLeastPromise = 0.1F;  // minimum gain of a guest, summed over micro-steps, in mean rank loads
constexpr float kSquareWeight = 1;     // weight of a micro-step's squared imbalance relative to its imbalance
constexpr double kPerfect = 3e-4F;     // imbalance treated as 0
constexpr float kLeastRoom = 0.02F;    // room assumed for a full rank, which may pass tokens on; in mean rank loads
constexpr float kLeastGain = 1e-5F;    // minimum gain of a change, so that rounding errors decide nothing
constexpr int kTrials = 8;             // experts tried per slot
constexpr int kRanksPerGuest = 64;     // ranks per guest added between two scorings

constexpr int kSmallGroup = 16;               // up to this many ranks, planning is so fast that sweeps always pay off
constexpr std::int64_t kRowsThatHide = 8192;  // rows per rank and micro-step

}  // namespace

bool copies_hide(const LayerProblem& problem) {
  if (problem.guest_slots < 2 || problem.num_ranks() <= kSmallGroup) return false;
  std::int64_t rows = 0;
  for (int m = 0; m < problem.num_micro_steps; ++m) {
    const auto load = problem.load(m);
    rows = std::accumulate(load.begin(), load.end(), rows);
  }
  return rows >= kRowsThatHide * problem.num_ranks() * problem.num_micro_steps;
}

BaseGuests::BaseGuests(const LayerProblem& problem, BaseGoal goal, LocalGuests local)
    : problem_(problem),
      goal_(goal),
      local_(std::move(local)),
      per_guest_(goal == BaseGoal::kFinal ? 0.0F : 1.0F / kCopyWorth),
      now_(problem.num_micro_steps),
      without_(problem.num_micro_steps),
      least_level_(problem.num_micro_steps),
      trial_cost_(problem.num_micro_steps) {}

// Cost of a new guest, less the worth of the tokens that no longer leave their node.
float BaseGuests::guest_cost(const ReplicaGraph& graph, int expert, int rank) const {
  return goal_ == BaseGoal::kFinal ? per_guest_ : per_guest_ - local_.tokens(graph, expert, rank);
}

// Largest rank load of m that counts as perfect. The search does not try to lower it.
std::int64_t BaseGuests::perfect_level(int m) const {
  return static_cast<std::int64_t>(static_cast<double>(problem_.lower_bound[m]) * (1 + kPerfect));
}

// Cost of a largest rank load, for kFinal.
float BaseGuests::cost_at(int m, std::int64_t level) const {
  if (level <= perfect_level(m)) return 0;
  const float over = static_cast<float>(level - problem_.lower_bound[m]) * problem_.per_mean[m];
  return over + kSquareWeight * over * over;
}

// Solves micro-step m from an assignment of all tokens. `bound` is a lower bound on the level.
void BaseGuests::solve(const ReplicaGraph& graph, int m, std::int64_t bound, MicroStep& s) {
  s.in_tight.assign(problem_.num_ranks(), 0);
  if (goal_ == BaseGoal::kFinal) {
    s.level = assign_tokens(graph, std::max(bound, perfect_level(m)), s.assignment, search_, &s.tight);
    s.cost = cost_at(m, s.level);
    if (s.cost == 0) {
      s.tight.clear();
    } else if (s.tight.empty()) {  // `bound` was attained at once, so no closed set is known yet
      search_.relieve(graph, s.level - 1, s.assignment);
      s.tight.assign(search_.closed_set().begin(), search_.closed_set().end());
    }
  } else {
    s.level = problem_.target[m];
    const std::int64_t excess = search_.relieve(graph, s.level, s.assignment);
    s.cost = static_cast<float>(excess) * problem_.per_mean[m];
    s.tight.clear();
    if (excess > 0) s.tight.assign(search_.closed_set().begin(), search_.closed_set().end());
  }
  for (const int r : s.tight) s.in_tight[r] = 1;
}

// Marks in reached_ all ranks that tokens can reach from the ranks in queue_, which are already marked. In any
// assignment, the reached ranks together serve all tokens that they serve now.
void BaseGuests::reach(const ReplicaGraph& graph, const Assignment& a) {
  for (std::size_t head = 0; head < queue_.size(); ++head) {
    for (const int s : graph.shared_slots(queue_[head])) {
      if (a.quota[s] == 0) continue;
      for (int t = graph.first_holder(graph.expert_in(s)); t >= 0; t = graph.next_holder(t)) {
        const int to = graph.rank_of(t);
        if (reached_[to]) continue;
        reached_[to] = 1;
        queue_.push_back(to);
      }
    }
  }
}

std::int64_t BaseGuests::density_of_reached(const Assignment& a) const {
  std::int64_t load = 0;
  for (const int r : queue_) load += a.rank_load[r];
  return (load + std::ssize(queue_) - 1) / std::ssize(queue_);
}

// Returns the minimum number of tokens above the level. Uses the algorithm that starts from fewer ranks.
std::int64_t BaseGuests::relieve(const ReplicaGraph& graph, std::int64_t level, Assignment& a) {
  const auto above = std::ranges::count_if(a.rank_load, [&](std::int64_t load) { return load > level; });
  const auto with_room = std::ranges::count_if(a.rank_load, [&](std::int64_t load) { return load < level; });
  return above > with_room ? flow_.relieve(graph, level, a) : search_.relieve(graph, level, a);
}

// Returns the cost that solve() would compute, but starts from the assignment in `s`.
float BaseGuests::exact_cost(const ReplicaGraph& graph, int m, const MicroStep& s) {
  scratch_ = s.assignment;
  if (goal_ == BaseGoal::kReplaceable) {
    return static_cast<float>(search_.relieve(graph, s.level, scratch_)) * problem_.per_mean[m];
  }
  std::int64_t level = std::max(perfect_level(m), least_level_[m]);
  while (relieve(graph, level, scratch_) > 0) {
    // The set reached from the busiest rank alone is often denser than the set reached from all ranks above the level.
    const auto busiest = std::max_element(scratch_.rank_load.begin(), scratch_.rank_load.end());
    reached_.assign(problem_.num_ranks(), 0);
    queue_.assign(1, static_cast<int>(busiest - scratch_.rank_load.begin()));
    reached_[queue_.front()] = 1;
    reach(graph, scratch_);
    level = density_of_reached(scratch_);
  }
  return cost_at(m, level);
}

// For kFinal: a lower bound on the cost of m after any one expert is added to `rank`. For kReplaceable: 0.
float BaseGuests::least_cost(const ReplicaGraph& graph, int m, int rank, const MicroStep& s) {
  if (goal_ == BaseGoal::kReplaceable) return 0;
  reached_ = s.in_tight;
  reached_[rank] = 1;
  queue_.assign(s.tight.begin(), s.tight.end());
  queue_.push_back(rank);
  reach(graph, s.assignment);
  least_level_[m] = density_of_reached(s.assignment);
  return cost_at(m, least_level_[m]);
}

// Load that a copy of the expert in `slot`, inside the closed set, could move out of the set, in mean rank loads.
float BaseGuests::promise(const MicroStep& s, int m, const ReplicaGraph& graph, int slot) const {
  const std::int64_t over = s.assignment.rank_load[graph.rank_of(slot)] - s.level;
  const auto carried = static_cast<float>(s.assignment.quota[slot]) * problem_.per_mean[m];
  if (goal_ == BaseGoal::kFinal) return carried;
  if (over > 0) return std::min(carried, static_cast<float>(over) * problem_.per_mean[m]);
  return 0.5F * std::min(carried, s.cost);  // through other ranks
}

// Adds the guest with the largest expected gain to a free slot. In large groups, adds several guests of different
// experts on different ranks. Returns false if no gain is expected.
bool BaseGuests::grow(ReplicaGraph& graph) {
  const int ranks = problem_.num_ranks();
  score_.assign(static_cast<std::size_t>(problem_.num_experts) * ranks, 0.0F);
  std::vector<float> room(ranks);
  std::vector<int> free_slot(ranks, -1);
  for (int r = 0; r < ranks; ++r) {
    for (int s = graph.first_slot(r) + problem_.homes_per_rank(); s < graph.first_slot(r) + graph.slots_per_rank();
         ++s) {
      if (graph.expert_in(s) < 0 && free_slot[r] < 0) free_slot[r] = s;
    }
  }
  for (int m = 0; m < problem_.num_micro_steps; ++m) {
    const MicroStep& state = now_[m];
    if (state.tight.empty()) continue;
    const float weight = goal_ == BaseGoal::kFinal
                             ? (1 + 2 * kSquareWeight * state.cost) / static_cast<float>(state.tight.size())
                             : 1.0F;
    for (int r = 0; r < ranks; ++r) {
      const bool open = free_slot[r] >= 0 && !state.in_tight[r];
      room[r] = open ? weight *
                           static_cast<float>(std::max<std::int64_t>(0, state.level - state.assignment.rank_load[r])) *
                           problem_.per_mean[m]
                     : 0;
    }
    for (const int r : state.tight) {
      for (int s = graph.first_slot(r); s < graph.first_slot(r) + graph.slots_per_rank(); ++s) {
        if (graph.expert_in(s) < 0 || state.assignment.quota[s] <= 0) continue;
        const float most = weight * promise(state, m, graph, s);
        float* row = &score_[static_cast<std::size_t>(graph.expert_in(s)) * ranks];
        for (int to = 0; to < ranks; ++to) row[to] += std::min(most, room[to]);
      }
    }
  }
  struct Choice {
    float score;
    int expert;
    int rank;
  };
  std::vector<Choice> best;  // [rank]
  for (int r = 0; r < ranks; ++r) best.push_back({.score = 0, .expert = -1, .rank = r});
  for (int e = 0; e < problem_.num_experts; ++e) {
    const float* row = &score_[static_cast<std::size_t>(e) * ranks];
    for (int r = 0; r < ranks; ++r) {
      if (row[r] > best[r].score && graph.find(e, r) < 0) best[r] = {.score = row[r], .expert = e, .rank = r};
    }
  }
  std::ranges::sort(best, [](const Choice& x, const Choice& y) {
    if (x.score != y.score) return x.score > y.score;
    return x.expert != y.expert ? x.expert < y.expert : x.rank < y.rank;
  });
  const float least = goal_ == BaseGoal::kFinal ? 0.0F : kLeastPromise;
  const int most = std::max(1, ranks / kRanksPerGuest);
  std::vector<Choice> added;
  for (const Choice& c : best) {
    if (c.score <= least || std::ssize(added) == most) break;
    if (std::ranges::any_of(added, [&](const Choice& other) { return other.expert == c.expert; })) continue;
    graph.put(free_slot[c.rank], c.expert);
    added.push_back(c);
  }
  for (int m = 0; m < problem_.num_micro_steps; ++m) {
    const MicroStep& state = now_[m];
    if (state.tight.empty() ||
        std::ranges::all_of(added, [&](const Choice& c) { return state.in_tight[c.rank] != 0; })) {
      continue;
    }
    solve(graph, m, goal_ == BaseGoal::kFinal ? problem_.lower_bound[m] : 0, now_[m]);
  }
  return !added.empty();
}

// Replaces a slot's guest by the best expert, or empties the slot if none helps. Returns whether the slot changed.
bool BaseGuests::revise(ReplicaGraph& graph, int slot) {
  const int old = graph.expert_in(slot);
  const int rank = graph.rank_of(slot);
  const int micro_steps = problem_.num_micro_steps;
  float cost_now = 0;
  float cost_without = 0;
  score_.assign(problem_.num_experts, 0.0F);
  std::vector<char> moved(micro_steps, 0);
  if (old >= 0) {
    for (int m = 0; m < micro_steps; ++m) {
      if (now_[m].assignment.quota[slot] == 0) continue;
      moved[m] = 1;
      without_[m] = now_[m];
      release(problem_, graph, slot, without_[m].assignment);
    }
    graph.drop(slot);
  }
  const auto state = [&](int m) -> const MicroStep& { return moved[m] ? without_[m] : now_[m]; };
  for (int m = 0; m < micro_steps; ++m) {
    cost_now += now_[m].cost;
    if (moved[m]) solve(graph, m, goal_ == BaseGoal::kFinal ? now_[m].level : 0, without_[m]);
    const MicroStep& s = state(m);
    cost_without += s.cost;
    if (s.tight.empty() || s.in_tight[rank]) continue;
    const float weight =
        goal_ == BaseGoal::kFinal ? (1 + 2 * kSquareWeight * s.cost) / static_cast<float>(s.tight.size()) : 1.0F;
    const float room =
        std::max(kLeastRoom, static_cast<float>(s.level - s.assignment.rank_load[rank]) * problem_.per_mean[m]);
    for (const int r : s.tight) {
      for (int q = graph.first_slot(r); q < graph.first_slot(r) + graph.slots_per_rank(); ++q) {
        if (graph.expert_in(q) >= 0 && s.assignment.quota[q] > 0)
          score_[graph.expert_in(q)] += weight * std::min(room, promise(s, m, graph, q));
      }
    }
  }
  if (local_.count()) {
    for (int e = 0; e < problem_.num_experts; ++e) score_[e] += per_guest_ - guest_cost(graph, e, rank);
  }
  order_.resize(problem_.num_experts);
  std::iota(order_.begin(), order_.end(), 0);
  const int trials = std::min(kTrials, problem_.num_experts);
  std::partial_sort(order_.begin(), order_.begin() + trials, order_.end(),
                    [&](int x, int y) { return score_[x] > score_[y] || (score_[x] == score_[y] && x < y); });
  least_.assign(micro_steps, -1.0F);
  const float cost_to_beat = cost_now + (old >= 0 ? guest_cost(graph, old, rank) : 0.0F);
  float best_cost = std::min(cost_without, cost_to_beat);
  int best = -1;
  for (int i = 0; i < trials; ++i) {
    const int e = order_[i];
    if (score_[e] <= 0 || e == old || graph.find(e, rank) >= 0) continue;
    helped_.clear();
    const float of_guest = guest_cost(graph, e, rank);
    float bound = cost_without + of_guest;
    for (int m = 0; m < micro_steps; ++m) {
      const MicroStep& s = state(m);
      if (s.tight.empty() || s.in_tight[rank] || !s.in_tight[problem_.home[e]]) continue;
      if (least_[m] < 0) least_[m] = least_cost(graph, m, rank, s);
      helped_.push_back(m);
      bound += least_[m] - s.cost;
    }
    if (bound >= best_cost) continue;
    graph.put(slot, e);
    by_promise_ = helped_;
    std::sort(by_promise_.begin(), by_promise_.end(),
              [&](int x, int y) { return state(x).cost - least_[x] > state(y).cost - least_[y]; });
    for (const int m : by_promise_) {
      trial_cost_[m] = exact_cost(graph, m, state(m));
      bound += trial_cost_[m] - least_[m];
      if (bound >= best_cost) break;
    }
    graph.drop(slot);
    if (bound >= best_cost) continue;
    float cost = cost_without + of_guest;
    for (const int m : helped_) cost += trial_cost_[m] - state(m).cost;
    if (cost >= best_cost - kLeastGain) continue;
    best_cost = cost;
    best = e;
    std::swap(best_helped_, helped_);
  }
  if (best_cost >= cost_to_beat - kLeastGain) {
    if (old >= 0) graph.put(slot, old);
    return false;
  }
  for (int m = 0; m < micro_steps; ++m) {
    if (moved[m]) std::swap(now_[m], without_[m]);
  }
  if (best >= 0) {
    graph.put(slot, best);
    for (const int m : best_helped_) solve(graph, m, goal_ == BaseGoal::kFinal ? problem_.lower_bound[m] : 0, now_[m]);
  }
  return true;
}

void BaseGuests::grow_all(ReplicaGraph& graph) {
  num_sweeps_ = 0;
  may_change_ = problem_.guest_slots > 0 && problem_.num_micro_steps > 0;
  if (!may_change_) return;
  if (goal_ == BaseGoal::kReplaceable) local_.add(per_guest_, graph);
  for (int m = 0; m < problem_.num_micro_steps; ++m) {
    serve_at_homes(problem_, m, now_[m].assignment);
    solve(graph, m, goal_ == BaseGoal::kFinal ? problem_.lower_bound[m] : 0, now_[m]);
  }
  while (grow(graph)) {
  }
}

void BaseGuests::sweep(ReplicaGraph& graph) {
  // A rank never needs more guests than there are experts with other homes.
  const int last = std::min(graph.slots_per_rank(), problem_.num_experts);
  bool changed = false;
  for (int g = problem_.homes_per_rank(); g < last; ++g) {
    for (int r = 0; r < problem_.num_ranks(); ++r) {
      if (revise(graph, graph.first_slot(r) + g)) changed = true;
    }
  }
  may_change_ = changed && ++num_sweeps_ < kMostSweeps;
}

void BaseGuests::choose(ReplicaGraph& graph, bool sweeps) {
  grow_all(graph);
  while (sweeps && may_change_) sweep(graph);
  if (goal_ == BaseGoal::kFinal) local_.add(per_guest_, graph);
}

}  // namespace foremoe::planner
