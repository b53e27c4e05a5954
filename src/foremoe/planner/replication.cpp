#include "foremoe/planner/replication.h"

#include <algorithm>

namespace foremoe::planner {

namespace {

constexpr float kKeepsPromise = 0.85F;     // part of its own gain that a further candidate must still bring
constexpr int kLevels = 8;                 // times that the target may rise
constexpr std::int64_t kRaiseDivisor = 4;  // it rises by this part of what is missing

// Restarts pay most where the group is small, and cost least there.
int num_variants(int num_ranks) { return std::clamp(2048 / num_ranks / num_ranks, 4, 32); }

// A copy is dearer where it is made again at every use, or in both passes with other micro-steps between them.
Replication::Effort effort_for(const PlannerOptions& options) {
  if (options.residency == Residency::kShared) return {.short_list = 16, .long_list = 128, .replaceable = 0};
  if (options.in_flight > 1) return {.short_list = 8, .long_list = 128, .replaceable = 0};
  return {.short_list = 8, .long_list = 48, .replaceable = 2};
}

}  // namespace

Replication::Replication(const LayerProblem& problem, const PlannerOptions& options)
    : problem_(problem),
      effort_(effort_for(options)),
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
  ledger_.begin(graph);
  std::int64_t target = problem_.target[m];
  for (int level = 0;; ++level) {
    serve_at_homes(problem_, m, a);
    std::int64_t excess = relieve(graph, target, a, workspace_);
    while (excess > 0 && (improve(m, target, excess, GuestSlotsToUse::kAny, graph, a) ||
                          improve(m, target, excess, GuestSlotsToUse::kEmpty, graph, a))) {
    }
    if (excess == 0) break;
    const std::int64_t reached = assign_tokens(graph, target, a, workspace_);
    if (level == kLevels) {
      target = reached;
      break;
    }
    target += std::max<std::int64_t>(1, (reached - target) / kRaiseDivisor);
  }
  take_back(m, target, graph, a);
  return {.level = target, .copies = ledger_.num_copies(graph)};
}

bool Replication::permitted(const Candidate& c, const ReplicaGraph& graph) const {
  return graph.find(c.expert, c.rank) < 0 && ledger_.permits(graph, guests_.slot_on(c.rank), c.expert);
}

// The excess that would remain with the candidate in its slot; `to` becomes the assignment. `graph` ends as it was.
std::int64_t Replication::attempt(const Candidate& c, std::int64_t target, std::int64_t excess_before,
                                  ReplicaGraph& graph, const Assignment& from, Assignment& to) {
  const int s = guests_.slot_on(c.rank);
  const int old = graph.expert_in(s);
  to.quota = from.quota;
  to.rank_load = from.rank_load;
  if (old >= 0) {
    release(problem_, graph, s, to);
    graph.drop(s);
  }
  graph.put(s, c.expert);
  std::int64_t excess = relieve_once(graph, target, to, trial_workspace_);
  if (excess >= excess_before) excess = relieve(graph, target, to, trial_workspace_);
  graph.drop(s);
  if (old >= 0) graph.put(s, old);
  return excess;
}

// Makes one change, or some, that lower the excess; false when none was found.
bool Replication::improve(int m, std::int64_t target, std::int64_t& excess, GuestSlotsToUse slots, ReplicaGraph& graph,
                          Assignment& a) {
  const Bottleneck bottleneck{.m = m,
                              .target = target,
                              .excess = excess,
                              .graph = graph,
                              .assignment = a,
                              .workspace = workspace_,
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
    if (!permitted(c, graph)) continue;
    const std::int64_t left = attempt(c, target, excess, graph, a, trial_);
    c.gain = excess - left;
    if (c.gain <= 0) continue;
    const float score = static_cast<float>(c.gain) * problem_.per_mean[m] + guests_.future_change(bottleneck, c);
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
  ledger_.replace(graph, guests_.slot_on(first.rank), first.expert);
  std::swap(a, best_);
  excess = best_excess;
  std::fill(taken_.begin(), taken_.end(), 0);
  taken_[first.rank] = 1;
  take_others(target, excess, list.first(tried), graph, a);
  if (excess > 0) excess = relieve(graph, target, a, workspace_);  // for its closed set
  return true;
}

// The others of those tried, most gain first, as long as each still does most of what it did alone.
void Replication::take_others(std::int64_t target, std::int64_t& excess, std::span<Candidate> tried,
                              ReplicaGraph& graph, Assignment& a) {
  std::sort(tried.begin(), tried.end(), [](const Candidate& x, const Candidate& y) {
    if (x.gain != y.gain) return x.gain > y.gain;
    return x.expert != y.expert ? x.expert < y.expert : x.rank < y.rank;
  });
  for (const Candidate& c : tried) {
    if (excess == 0 || c.gain * 2 < tried.front().gain || c.gain <= 0) break;
    if (taken_[c.rank] != 0 || ledger_.is_copy(graph, guests_.slot_on(c.rank)) || !permitted(c, graph)) continue;
    const std::int64_t left = attempt(c, target, excess, graph, a, trial_);
    if (static_cast<float>(excess - left) < kKeepsPromise * static_cast<float>(c.gain)) continue;
    ledger_.replace(graph, guests_.slot_on(c.rank), c.expert);
    taken_[c.rank] = 1;
    std::swap(a, trial_);
    excess = left;
  }
}

// Takes back copies that the others can do without, those that serve least first.
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
  for (const int s : copied) {
    const int found = ledger_.found(s);
    const std::int64_t tokens = a.quota[s];
    if (!ledger_.is_copy(graph, s) || (found >= 0 && graph.find(found, graph.rank_of(s)) >= 0)) continue;
    graph_before = graph;
    ledger_before = ledger_;
    rest = a;
    release(problem_, graph, s, rest);
    ledger_.replace(graph, s, found);
    std::int64_t excess = relieve(graph, target, rest, workspace_);
    if (excess > 0 && excess * effort_.replaceable < tokens)
      improve(m, target, excess, GuestSlotsToUse::kCopied, graph, rest);
    if (excess == 0) {
      std::swap(a, rest);
    } else {
      std::swap(graph, graph_before);
      ledger_ = ledger_before;
    }
  }
}

}  // namespace foremoe::planner
