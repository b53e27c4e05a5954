#include "foremoe/planner/replication.h"
#include "foremoe/planner/relocation.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace foremoe::planner {

static double env(const char* n, double d) {
  const char* v = getenv(n);
  return v ? atof(v) : d;
}
static const int kMaxSources = env("NE", 48);
static const int kShortList = env("TOPK", 8);
static const int kLongList = env("KMAX", 64);
static const int kWindow = env("WIN", 3);
static const float kFuture = env("LAM", 0.08);
static const float kDecay = env("DEC", 0.8);
static const float kUnchanged = env("FB", 0.05);
static const float kBonusShare = env("BS", 1);
static const float kCap = env("CAP", 100);
static const int kReloc = env("RELOC", 0);
static const int kPrune = env("PR", 1);
static const int kRearrange = env("RE", 1);
static const int kRearrangeList = env("REL", 8);
static const float kFloor = env("FL", 0.3);
static const float kKeepPromise = env("KP", 0.7);
static const double kRaise = env("RAISE", 0.25);
static const int kLevels = env("LEV", 8);

Replication::Replication(const LayerProblem& problem, const PlannerOptions& options)
    : problem_(problem),
      ledger_(problem, options),
      saved_ledger_(problem, options),
      inside_(problem.num_ranks()),
      inflow_(problem.num_ranks()),
      outlet_(problem.num_ranks()),
      available_(problem.num_experts),
      victim_(problem.num_ranks()),
      capacity_(problem.num_ranks()),
      penalty_(problem.num_ranks()),
      queue_(problem.num_ranks()),
      state_(problem.num_ranks()) {}

float Replication::future(int m, int expert, int rank) const {
  float value = 0;
  float weight = kFuture;
  const int last = std::min(m + kWindow, problem_.num_micro_steps - 1);
  for (int i = m + 1; i <= last; ++i, weight *= kDecay) {
    value += weight * std::min(problem_.surplus(i, expert), problem_.room(i, rank));
  }
  return value;
}

int Replication::balance(int m, ReplicaGraph& graph, Assignment& a) {
  ledger_.begin(graph);
  serve_at_homes(problem_, m, a);
  if (kReloc) {
    static thread_local std::vector<char> rests;
    rests.assign(problem_.num_experts, 0);
    if (relieve(graph, problem_.target[m], a, workspace_) > 0) relocate_experts(problem_, m, ledger_, graph, a, rests);
    serve_at_homes(problem_, m, a);
  }
  std::int64_t target = problem_.target[m];
  for (int level = 0;; ++level) {
    std::int64_t excess = relieve(graph, target, a, workspace_);
    while (excess > 0 && (improve(m, target, excess, 0, graph, a) || improve(m, target, excess, 1, graph, a))) {
    }
    if (excess == 0 || level == kLevels) break;
    const std::int64_t reached = assign_tokens(graph, target, a, workspace_);
    target += std::max<std::int64_t>(1, static_cast<std::int64_t>(kRaise * static_cast<double>(reached - target)));
    serve_at_homes(problem_, m, a);
  }
  if (kPrune) prune(m, target, graph, a);
  return ledger_.num_copies(graph);
}

// Takes back copies that the others have made needless, those that serve least first.
void Replication::prune(int m, std::int64_t target, ReplicaGraph& graph, Assignment& a) {
  std::vector<int> slots;
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (ledger_.is_copy(graph, s)) slots.push_back(s);
  }
  std::sort(slots.begin(), slots.end(),
            [&](int x, int y) { return a.quota[x] < a.quota[y] || (a.quota[x] == a.quota[y] && x < y); });
  for (const int s : slots) {
    const int e = graph.expert_in(s);
    const int before = ledger_.found(s);
    if (before >= 0 && graph.find(before, graph.rank_of(s)) >= 0) continue;
    trial_.quota = a.quota;
    trial_.rank_load = a.rank_load;
    release(problem_, graph, s, trial_);
    ledger_.replace(graph, s, before);
    if (relieve(graph, target, trial_, trial_workspace_) == 0) {
      std::swap(a, trial_);
      continue;
    }
    // Perhaps the other copies of this micro-step can be others.
    saved_graph_ = graph;
    saved_ledger_.restore(ledger_);
    Assignment b = trial_;
    std::int64_t excess = relieve(graph, target, b, workspace_);
    int rounds = 0;
    while (excess > 0 && rounds++ < kRearrange && improve(m, target, excess, 2, graph, b)) {
    }
    if (excess == 0) {
      std::swap(a, b);
      continue;
    }
    graph = saved_graph_;
    ledger_.restore(saved_ledger_);
    ledger_.replace(graph, s, e);
  }
}

// Excess that can reach the ranks of S, in the order of the visit; what each expert there could carry away.
void Replication::measure_sources(int, std::int64_t target, std::int64_t excess, const ReplicaGraph& graph,
                                  const Assignment& a) {
  (void)excess;
  std::fill(available_.begin(), available_.end(), 0.0F);
  std::fill(inside_.begin(), inside_.end(), 0);
  sources_.clear();
  for (const int r : workspace_.closed_set()) {
    inside_[r] = 1;
    inflow_[r] = static_cast<float>(std::max<std::int64_t>(0, a.rank_load[r] - target));
  }
  std::fill(state_.begin(), state_.end(), 0);
  for (const int r : workspace_.closed_set()) {
    state_[r] = 1;
    for (int s = graph.first_slot(r); s < graph.first_slot(r) + graph.slots_per_rank(); ++s) {
      const int e = graph.expert_in(s);
      if (e < 0 || a.quota[s] <= 0) continue;
      const float carried = std::min(inflow_[r], static_cast<float>(a.quota[s]));
      if (available_[e] == 0) sources_.push_back(e);
      available_[e] += carried;
      if (graph.num_holders(e) < 2) continue;
      for (int t = graph.first_holder(e); t >= 0; t = graph.next_holder(t)) {
        const int to = graph.rank_of(t);
        if (!state_[to]) inflow_[to] += carried;
      }
    }
  }
  std::sort(sources_.begin(), sources_.end(), [&](int a_, int b_) {
    return available_[a_] > available_[b_] || (available_[a_] == available_[b_] && a_ < b_);
  });
  if (static_cast<int>(sources_.size()) > kMaxSources) sources_.resize(kMaxSources);
}

// Room that can be reached from the ranks outside S, against the arrows.
void Replication::measure_sinks(int, std::int64_t target, const ReplicaGraph& graph, const Assignment& a) {
  int tail = 0;
  std::fill(state_.begin(), state_.end(), 0);
  for (int r = 0; r < graph.num_ranks(); ++r) {
    outlet_[r] = 0;
    if (inside_[r] || a.rank_load[r] >= target) continue;
    outlet_[r] = static_cast<float>(target - a.rank_load[r]);
    queue_[tail++] = r;
    state_[r] = 1;
  }
  std::sort(queue_.begin(), queue_.begin() + tail,
            [&](int x, int y) { return outlet_[x] > outlet_[y] || (outlet_[x] == outlet_[y] && x < y); });
  for (int head = 0; head < tail; ++head) {
    const int to = queue_[head];
    state_[to] = 2;
    for (int t = graph.first_slot(to); t < graph.first_slot(to) + graph.slots_per_rank(); ++t) {
      const int e = graph.expert_in(t);
      if (e < 0 || graph.num_holders(e) < 2) continue;
      for (int s = graph.first_holder(e); s >= 0; s = graph.next_holder(s)) {
        const int from = graph.rank_of(s);
        if (from == to || a.quota[s] <= 0 || inside_[from] || state_[from] == 2) continue;
        outlet_[from] += std::min(outlet_[to], static_cast<float>(a.quota[s]));
        if (state_[from] == 0) {
          state_[from] = 1;
          queue_[tail++] = from;
        }
      }
    }
  }
}

void Replication::choose_victims(int m, std::int64_t excess, int mode, const ReplicaGraph& graph, const Assignment& a) {
  sinks_.clear();
  const float per_mean = problem_.per_mean[m];
  const float bonus = std::min(kUnchanged, kBonusShare * static_cast<float>(excess) * per_mean);
  for (int r = 0; r < graph.num_ranks(); ++r) {
    if (inside_[r]) continue;
    victim_[r] = -1;
    const int end = graph.first_slot(r) + graph.slots_per_rank();
    for (int s = end - problem_.guest_slots; s < end; ++s) {
      const int old = graph.expert_in(s);
      if (mode == 1 && old >= 0) continue;
      const bool copied = ledger_.is_copy(graph, s);
      if (mode == 2 && !copied) continue;
      float lost = 0;
      float carried = 0;
      if (old >= 0) {
        carried = static_cast<float>(a.quota[s]);
        const int home = problem_.home[old];
        const float absorbed = inside_[home] ? 0.0F : 0.5F * outlet_[home];
        lost = std::max(0.0F, carried - absorbed) * per_mean + future(m, old, r);
      }
      if (copied) lost -= bonus;
      if (victim_[r] >= 0 && lost >= penalty_[r]) continue;
      victim_[r] = s;
      penalty_[r] = lost;
      capacity_[r] = (outlet_[r] + carried) * per_mean;
    }
    if (victim_[r] >= 0) sinks_.push_back(r);
  }
}

void Replication::list_candidates(int m, std::int64_t excess, const ReplicaGraph&) {
  candidates_.clear();
  const float per_mean = problem_.per_mean[m];
  const float most = static_cast<float>(excess) * per_mean;
  (void)most;
  const int last = std::min(m + kWindow, problem_.num_micro_steps - 1);
  for (const int e : sources_) {
    const float available = available_[e] * per_mean;
    for (const int r : sinks_) {
      const float carried = std::min({available, capacity_[r], kCap * most + capacity_[r] - outlet_[r] * per_mean});
      float score = carried - penalty_[r];
      if (score < -kFloor) continue;
      float weight = kFuture;
      for (int i = m + 1; i <= last; ++i, weight *= kDecay)
        score += weight * std::min(problem_.surplus(i, e), problem_.room(i, r));
      candidates_.push_back({score, e, r, 0});
    }
  }
}

bool Replication::permitted(const Candidate& c, const ReplicaGraph& graph) const {
  return graph.find(c.expert, c.rank) < 0 && ledger_.permits(graph, victim_[c.rank], c.expert);
}

std::int64_t Replication::attempt(const Candidate& c, std::int64_t target, ReplicaGraph& graph, const Assignment& from,
                                  Assignment& to) {
  const int s = victim_[c.rank];
  const int old = graph.expert_in(s);
  to.quota = from.quota;
  to.rank_load = from.rank_load;
  if (old >= 0) {
    release(problem_, graph, s, to);
    graph.drop(s);
  }
  graph.put(s, c.expert);
  const std::int64_t excess = relieve(graph, target, to, trial_workspace_);
  graph.drop(s);
  if (old >= 0) graph.put(s, old);
  return excess;
}

bool Replication::improve(int m, std::int64_t target, std::int64_t& excess, int mode, ReplicaGraph& graph,
                          Assignment& a) {
  measure_sources(m, target, excess, graph, a);
  measure_sinks(m, target, graph, a);
  choose_victims(m, excess, mode, graph, a);
  list_candidates(m, excess, graph);
  const auto better = [](const Candidate& x, const Candidate& y) {
    if (x.score != y.score) return x.score > y.score;
    return x.expert != y.expert ? x.expert < y.expert : x.rank < y.rank;
  };
  const std::size_t longest = std::min<std::size_t>(mode == 2 ? kRearrangeList : kLongList, candidates_.size());
  std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(longest), candidates_.end(),
                    better);

  const float per_mean = problem_.per_mean[m];
  int best = -1;
  float best_score = 0;
  std::int64_t best_excess = 0;
  std::size_t tried = 0;
  for (; tried < longest && (best < 0 || tried < static_cast<std::size_t>(kShortList)); ++tried) {
    Candidate& c = candidates_[tried];
    if (!permitted(c, graph)) continue;
    const std::int64_t left = attempt(c, target, graph, a, trial_);
    c.gain = excess - left;
    if (c.gain <= 0) continue;
    const float score =
        c.score - std::min(available_[c.expert] * per_mean, capacity_[c.rank]) + penalty_[c.rank] +
        static_cast<float>(c.gain) * per_mean -
        (graph.expert_in(victim_[c.rank]) >= 0 ? future(m, graph.expert_in(victim_[c.rank]), c.rank) : 0);
    if (best >= 0 && score <= best_score) continue;
    best = static_cast<int>(tried);
    best_score = score;
    best_excess = left;
    std::swap(best_, trial_);
  }
  if (best < 0) return false;
  ledger_.replace(graph, victim_[candidates_[best].rank], candidates_[best].expert);
  std::swap(a, best_);
  excess = best_excess;
  // The others of the short list, best first, while they do most of what they did alone.
  if (kKeepPromise < 1 && excess > 0) {
    candidates_[best].gain = 0;
    std::sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(tried),
              [&](const Candidate& x, const Candidate& y) {
                if (x.gain != y.gain) return x.gain > y.gain;
                return x.expert != y.expert ? x.expert < y.expert : x.rank < y.rank;
              });
    const std::int64_t first_gain = candidates_[0].gain;
    std::fill(state_.begin(), state_.end(), 0);
    for (std::size_t i = 0; i < tried && excess > 0; ++i) {
      const Candidate& c = candidates_[i];
      if (c.gain <= 0 || c.gain * 2 < first_gain || state_[c.rank] || !permitted(c, graph)) continue;
      const int old = graph.expert_in(victim_[c.rank]);
      if (old >= 0 && ledger_.is_copy(graph, victim_[c.rank])) continue;
      const std::int64_t left = attempt(c, target, graph, a, trial_);
      if (static_cast<float>(excess - left) < kKeepPromise * static_cast<float>(c.gain)) continue;
      ledger_.replace(graph, victim_[c.rank], c.expert);
      state_[c.rank] = 1;
      std::swap(a, trial_);
      excess = left;
    }
  }
  if (excess > 0) excess = relieve(graph, target, a, workspace_);  // for its closed set
  return true;
}

}  // namespace foremoe::planner
