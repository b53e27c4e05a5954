#include "foremoe/planner/replication.h"

#include <algorithm>

namespace foremoe::planner {

namespace {

constexpr float kKeepsPromise = 0.85F;     // part of its own gain that a further candidate must at least retain
constexpr int kUsualRanks = 64;            // larger groups have a wide search
constexpr int kRanksPerCandidate = 4;      // ranks per candidate of the wide search
constexpr int kMostCandidates = 128;       // candidates of the wide search, at most
constexpr int kLevels = 8;                 // maximum number of times that the target rises
constexpr std::int64_t kRaiseDivisor = 4;  // the target rises by 1 / this of its distance to the largest load

// Restarts help most in small groups, where they are also cheapest.
int num_variants(int num_ranks) { return std::clamp(2048 / num_ranks / num_ranks, 4, 32); }

// Copies cost more if every use repeats them (`shared`), or if both passes may need them (several in flight).
Replication::Effort effort_for(const PlannerOptions& options) {
  if (options.residency == Residency::kShared) return {.short_list = 16, .long_list = 128, .replaceable = 0};
  if (options.in_flight > 1) return {.short_list = 8, .long_list = 128, .replaceable = 0};
  return {.short_list = 8, .long_list = 48, .replaceable = 2};
}

// In large groups, the usual number of candidates per change leaves most ranks untried. It suffices for most
// micro-steps, and more candidates take longer.
Replication::Effort widened(const Replication::Effort& effort, int num_ranks) {
  if (num_ranks <= kUsualRanks) return effort;
  const int factor = std::max(1, std::min(num_ranks / kRanksPerCandidate, kMostCandidates) / effort.short_list);
  return {.short_list = factor * effort.short_list,
          .long_list = factor * effort.long_list,
          .replaceable = effort.replaceable};
}

}  // namespace

Replication::Replication(const LayerProblem& problem, const PlannerOptions& options)
    : problem_(problem),
      usual_(effort_for(options)),
      wide_(widened(usual_, problem.num_ranks())),
      effort_(usual_),
      variants_(options.residency == Residency::kShared ? num_variants(problem.num_ranks()) : 1),
      ledger_(problem, options),
      guests_(problem, options.residency != Residency::kShared, options.seed),
      taken_(problem.num_ranks()) {}

void Replication::balance(int m, ReplicaGraph& graph, Assignment& a) {
  variant_ = 0;
  if (variants_ == 1) {
    search(m, graph, a);
    return;
  }
  const ReplicaGraph found = graph;
  ReplicaGraph trial_graph;
  Assignment trial;
  Outcome best;
  for (; variant_ < variants_; ++variant_) {
    trial_graph = found;
    const Outcome outcome = search(m, trial_graph, trial);
    const bool better =
        variant_ == 0 || outcome.level < best.level || (outcome.level == best.level && outcome.copies < best.copies);
    if (!better) continue;
    best = outcome;
    std::swap(graph, trial_graph);
    std::swap(a, trial);
  }
}

Replication::Outcome Replication::search(int m, ReplicaGraph& graph, Assignment& a) {
  State state{.m = m, .target = problem_.target[m], .excess = 0, .graph = graph, .assignment = a};
  const bool can_widen = wide_.short_list > usual_.short_list;
  const ReplicaGraph found = can_widen ? graph : ReplicaGraph();
  effort_ = usual_;
  ledger_.begin(graph);
  bool balanced = reach_target(state);
  if (!balanced && can_widen) {
    effort_ = wide_;
    graph = found;
    ledger_.begin(graph);
    balanced = reach_target(state);
  }
  for (int level = 0; !balanced; ++level) {
    const std::int64_t reached = assign_tokens(graph, state.target, a, search_);
    if (level == kLevels) {
      state.target = reached;
      break;
    }
    state.target += std::max<std::int64_t>(1, (reached - state.target) / kRaiseDivisor);
    balanced = reach_target(state);
  }
  take_back(m, state.target, graph, a);
  return {.level = state.target, .copies = ledger_.num_copies(graph)};
}

// Changes guests until no rank is above the target. Returns false if no candidate helps any more.
bool Replication::reach_target(State& state) {
  serve_at_homes(problem_, state.m, state.assignment);
  state.excess = search_.relieve(state.graph, state.target, state.assignment);
  while (state.excess > 0 && (improve(state, GuestSlotsToUse::kAny) || improve(state, GuestSlotsToUse::kEmpty))) {
  }
  return state.excess == 0;
}

bool Replication::permitted(const Candidate& c, const ReplicaGraph& graph) const {
  return graph.find(c.expert, c.rank) < 0 && ledger_.permits(graph, guests_.slot_on(c.rank), c.expert);
}

// Returns the excess left with the candidate in its slot, and its assignment in `to`. Leaves the graph unchanged.
std::int64_t Replication::attempt(const Candidate& c, const State& state, Assignment& to) {
  ReplicaGraph& graph = state.graph;
  const int s = guests_.slot_on(c.rank);
  const int old = graph.expert_in(s);
  to.quota = state.assignment.quota;
  to.rank_load = state.assignment.rank_load;
  if (old >= 0) {
    release(problem_, graph, s, to);
    graph.drop(s);
  }
  graph.put(s, c.expert);
  std::int64_t excess = trial_search_.relieve_once(graph, state.target, to);
  if (excess >= state.excess) excess = trial_search_.relieve(graph, state.target, to);
  graph.drop(s);
  if (old >= 0) graph.put(s, old);
  return excess;
}

// Makes one or more changes that lower the excess. Returns false if it finds none.
bool Replication::improve(State& state, GuestSlotsToUse slots) {
  const Bottleneck bottleneck{.m = state.m,
                              .target = state.target,
                              .excess = state.excess,
                              .graph = state.graph,
                              .assignment = state.assignment,
                              .search = search_,
                              .ledger = ledger_};
  guests_.list(bottleneck, slots, variant_);
  const std::size_t longest = slots == GuestSlotsToUse::kCopied ? static_cast<std::size_t>(effort_.short_list)
                                                                : static_cast<std::size_t>(effort_.long_list);
  std::span<Candidate> list = guests_.best(effort_.short_list);
  const Candidate* best = nullptr;
  float best_score = 0;
  std::int64_t best_excess = 0;
  std::size_t tried = 0;
  for (;; ++tried) {
    if (tried == list.size()) {
      if (best != nullptr || tried >= longest) break;
      list = guests_.best(static_cast<int>(longest));
      if (tried == list.size()) break;
    }
    Candidate& c = list[tried];
    if (!permitted(c, state.graph)) continue;
    const std::int64_t left = attempt(c, state, trial_);
    c.gain = state.excess - left;
    if (c.gain <= 0) continue;
    const float score = static_cast<float>(c.gain) * problem_.per_mean[state.m] + guests_.future_change(bottleneck, c);
    if (best != nullptr && score <= best_score) continue;
    best = &c;
    best_score = score;
    best_excess = left;
    std::swap(best_, trial_);
    if (tried >= static_cast<std::size_t>(effort_.short_list)) {
      ++tried;
      break;
    }
  }
  if (best == nullptr) return false;
  const Candidate first = *best;
  ledger_.replace(state.graph, guests_.slot_on(first.rank), first.expert);
  std::swap(state.assignment, best_);
  state.excess = best_excess;
  std::fill(taken_.begin(), taken_.end(), 0);
  taken_[first.rank] = 1;
  take_others(state, list.first(tried));
  if (state.excess > 0) state.excess = search_.relieve(state.graph, state.target, state.assignment);  // finds S again
  return true;
}

// Applies further tried candidates, largest gain first, while each retains most of its own gain.
void Replication::take_others(State& state, std::span<Candidate> tried) {
  std::sort(tried.begin(), tried.end(), [](const Candidate& x, const Candidate& y) {
    if (x.gain != y.gain) return x.gain > y.gain;
    return x.expert != y.expert ? x.expert < y.expert : x.rank < y.rank;
  });
  for (const Candidate& c : tried) {
    if (state.excess == 0 || c.gain * 2 < tried.front().gain || c.gain <= 0) break;
    const int slot = guests_.slot_on(c.rank);
    if (taken_[c.rank] != 0 || ledger_.is_copy(state.graph, slot) || !permitted(c, state.graph)) continue;
    const std::int64_t left = attempt(c, state, trial_);
    if (static_cast<float>(state.excess - left) < kKeepsPromise * static_cast<float>(c.gain)) continue;
    ledger_.replace(state.graph, slot, c.expert);
    taken_[c.rank] = 1;
    std::swap(state.assignment, trial_);
    state.excess = left;
  }
}

// Undoes copies that are unnecessary given the others, starting with those with the fewest tokens.
void Replication::take_back(int m, std::int64_t target, ReplicaGraph& graph, Assignment& a) {
  std::vector<int> copied;
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (ledger_.is_copy(graph, s)) copied.push_back(s);
  }
  std::sort(copied.begin(), copied.end(),
            [&](int x, int y) { return a.quota[x] < a.quota[y] || (a.quota[x] == a.quota[y] && x < y); });
  ReplicaGraph graph_before;
  CopyLedger ledger_before = ledger_;
  Assignment rest;
  State without{.m = m, .target = target, .excess = 0, .graph = graph, .assignment = rest};
  for (const int s : copied) {
    const int found = ledger_.found(s);
    const std::int64_t tokens = a.quota[s];
    if (!ledger_.is_copy(graph, s) || (found >= 0 && graph.find(found, graph.rank_of(s)) >= 0)) continue;
    graph_before = graph;
    ledger_before = ledger_;
    rest = a;
    release(problem_, graph, s, rest);
    ledger_.replace(graph, s, found);
    without.excess = search_.relieve(graph, target, rest);
    if (without.excess > 0 && without.excess * effort_.replaceable < tokens) improve(without, GuestSlotsToUse::kCopied);
    if (without.excess == 0) {
      std::swap(a, rest);
    } else {
      std::swap(graph, graph_before);
      ledger_ = ledger_before;
    }
  }
}

}  // namespace foremoe::planner
