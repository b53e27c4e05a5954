#include "foremoe/planner/guest_search.h"

#include <algorithm>

namespace foremoe::planner {

namespace {

constexpr int kMaxSources = 64;         // number of experts considered
constexpr int kWindow = 3;              // number of later micro-steps considered
constexpr float kFutureWeight = 0.08F;  // weight of the next micro-step relative to the present one
constexpr float kFutureDecay = 0.8F;    // decay of that weight per further micro-step
constexpr float kCopiedBonus = 0.1F;    // bonus for a slot filled in this micro-step; at most the excess
constexpr float kLeastScore = -0.3F;    // minimum of carried minus lost load; below 0, since both are estimates
constexpr float kLocality = 0.1F;       // weight of tokens that would stay on their node, relative to carried tokens
constexpr float kDisturbance = 0.6F;    // relative perturbation of a variant's scores

// Uniform in [−0.5, 0.5); depends only on its arguments.
float disturbance(std::uint64_t seed, int variant, int expert, int rank) {
  std::uint64_t x = seed + (static_cast<std::uint64_t>(variant) << 40) + (static_cast<std::uint64_t>(expert) << 20) +
                    static_cast<std::uint64_t>(rank);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return static_cast<float>((x >> 40) & 0xffff) / 65536.0F - 0.5F;
}

bool before(const Candidate& x, const Candidate& y) {
  if (x.score != y.score) return x.score > y.score;
  return x.expert != y.expert ? x.expert < y.expert : x.rank < y.rank;
}

}  // namespace

GuestSearch::GuestSearch(const LayerProblem& problem, bool looks_ahead, std::uint64_t seed)
    : problem_(problem),
      seed_(seed),
      window_(looks_ahead ? kWindow : 0),
      inside_(problem.num_ranks()),
      seen_(problem.num_ranks()),
      inflow_(problem.num_ranks()),
      outlet_(problem.num_ranks()),
      available_(problem.num_experts),
      slot_(problem.num_ranks(), -1),
      capacity_(problem.num_ranks()),
      loss_(problem.num_ranks()),
      queue_(problem.num_ranks()),
      sink_capacity_(problem.num_ranks()),
      sink_loss_(problem.num_ranks()),
      sink_room_({kWindow, static_cast<std::size_t>(problem.num_ranks())}),
      carried_(problem.num_ranks()),
      score_(problem.num_ranks()),
      worth_(problem.num_ranks()) {}

float GuestSearch::future(int m, int expert, int rank) const {
  float value = 0;
  float weight = kFutureWeight;
  const int last = std::min(m + window_, problem_.num_micro_steps - 1);
  for (int i = m + 1; i <= last; ++i, weight *= kFutureDecay) {
    value += weight * std::min(problem_.surplus(i, expert), problem_.room(i, rank));
  }
  return value;
}

float GuestSearch::future_change(const Bottleneck& b, const Candidate& c) const {
  const int old = b.graph.expert_in(slot_[c.rank]);
  return future(b.m, c.expert, c.rank) - (old >= 0 ? future(b.m, old, c.rank) : 0.0F);
}

// Propagates excess along the paths inside S, in the order in which the search visited the ranks.
void GuestSearch::measure_sources(const Bottleneck& b) {
  std::fill(available_.begin(), available_.end(), 0.0F);
  std::fill(inside_.begin(), inside_.end(), 0);
  std::fill(seen_.begin(), seen_.end(), 0);
  sources_.clear();
  for (const int r : b.search.closed_set()) {
    inside_[r] = 1;
    inflow_[r] = static_cast<float>(std::max<std::int64_t>(0, b.assignment.rank_load[r] - b.target));
  }
  for (const int r : b.search.closed_set()) {
    seen_[r] = 1;
    for (int s = b.graph.first_slot(r); s < b.graph.first_slot(r + 1); ++s) {
      const int e = b.graph.expert_in(s);
      if (e < 0 || b.assignment.quota[s] == 0) continue;
      const float carried = std::min(inflow_[r], static_cast<float>(b.assignment.quota[s]));
      if (available_[e] == 0) sources_.push_back(e);
      available_[e] += carried;
      if (b.graph.num_holders(e) < 2) continue;
      for (int t = b.graph.first_holder(e); t >= 0; t = b.graph.next_holder(t)) {
        if (!seen_[b.graph.rank_of(t)]) inflow_[b.graph.rank_of(t)] += carried;
      }
    }
  }
  std::sort(sources_.begin(), sources_.end(),
            [&](int x, int y) { return available_[x] > available_[y] || (available_[x] == available_[y] && x < y); });
  if (sources_.size() > kMaxSources) sources_.resize(kMaxSources);
}

// Propagates room along reversed paths outside S, from the ranks below the target, those with most room first.
void GuestSearch::measure_sinks(const Bottleneck& b) {
  enum : char { kUnseen, kQueued, kDone };
  std::fill(seen_.begin(), seen_.end(), kUnseen);
  int tail = 0;
  for (int r = 0; r < b.graph.num_ranks(); ++r) {
    outlet_[r] = 0;
    if (inside_[r] || b.assignment.rank_load[r] >= b.target) continue;
    outlet_[r] = static_cast<float>(b.target - b.assignment.rank_load[r]);
    queue_[tail++] = r;
    seen_[r] = kQueued;
  }
  std::sort(queue_.begin(), queue_.begin() + tail,
            [&](int x, int y) { return outlet_[x] > outlet_[y] || (outlet_[x] == outlet_[y] && x < y); });
  for (int head = 0; head < tail; ++head) {
    const int to = queue_[head];
    seen_[to] = kDone;
    for (int t = b.graph.first_slot(to); t < b.graph.first_slot(to + 1); ++t) {
      const int e = b.graph.expert_in(t);
      if (e < 0 || b.graph.num_holders(e) < 2) continue;
      for (int s = b.graph.first_holder(e); s >= 0; s = b.graph.next_holder(s)) {
        const int from = b.graph.rank_of(s);
        if (b.assignment.quota[s] == 0 || inside_[from] || seen_[from] == kDone) continue;
        outlet_[from] += std::min(outlet_[to], static_cast<float>(b.assignment.quota[s]));
        if (seen_[from] == kUnseen) {
          seen_[from] = kQueued;
          queue_[tail++] = from;
        }
      }
    }
  }
}

// Chooses on every rank outside S the guest slot that is cheapest to refill.
void GuestSearch::choose_slots(const Bottleneck& b, GuestSlotsToUse slots) {
  const float per_mean = problem_.per_mean[b.m];
  const float bonus = std::min(kCopiedBonus, static_cast<float>(b.excess) * per_mean);
  sinks_.clear();
  for (int r = 0; r < b.graph.num_ranks(); ++r) {
    slot_[r] = -1;
    if (inside_[r]) continue;
    for (int s = b.graph.first_slot(r + 1) - problem_.guest_slots; s < b.graph.first_slot(r + 1); ++s) {
      const int old = b.graph.expert_in(s);
      const bool copied = b.ledger.is_copy(b.graph, s);
      if (slots == GuestSlotsToUse::kEmpty && old >= 0) continue;
      if (slots == GuestSlotsToUse::kCopied && !copied) continue;
      float loss = 0;
      float carried = 0;
      if (old >= 0) {
        carried = static_cast<float>(b.assignment.quota[s]);
        const int home = problem_.home[old];
        const float absorbed = inside_[home] ? 0.0F : 0.5F * outlet_[home];
        loss = std::max(0.0F, carried - absorbed) * per_mean + future(b.m, old, r) - (copied ? bonus : 0.0F);
      }
      if (slot_[r] >= 0 && loss >= loss_[r]) continue;
      slot_[r] = s;
      loss_[r] = loss;
      capacity_[r] = (outlet_[r] + carried) * per_mean;
    }
    if (slot_[r] >= 0) sinks_.push_back(r);
  }
}

// Scores all pairs of a source and a sink. The innermost loops run over plain arrays of the sinks.
void GuestSearch::score_pairs(const Bottleneck& b, int variant) {
  const float per_mean = problem_.per_mean[b.m];
  const std::size_t num_sinks = sinks_.size();
  const int ahead = std::clamp(problem_.num_micro_steps - 1 - b.m, 0, window_);
  for (std::size_t i = 0; i < num_sinks; ++i) {
    const int r = sinks_[i];
    sink_capacity_[i] = capacity_[r];
    sink_loss_[i] = loss_[r];
    for (int k = 0; k < ahead; ++k) sink_room_(k, i) = problem_.room(b.m + 1 + k, r);
  }
  const bool many_nodes = problem_.topology.num_nodes() > 1;
  pairs_.clear();
  for (const int e : sources_) {
    const float available = available_[e] * per_mean;
    for (std::size_t i = 0; i < num_sinks; ++i) {
      carried_[i] = std::min(available, sink_capacity_[i]);
      score_[i] = carried_[i] - sink_loss_[i];
      worth_[i] = 0;
    }
    float weight = kFutureWeight;
    for (int k = 0; k < ahead; ++k, weight *= kFutureDecay) {
      const float surplus = problem_.surplus(b.m + 1 + k, e);
      if (surplus == 0) continue;
      const float* room = &sink_room_(k, 0);
      for (std::size_t i = 0; i < num_sinks; ++i) worth_[i] += weight * std::min(surplus, room[i]);
    }
    for (std::size_t i = 0; i < num_sinks; ++i) {
      if (score_[i] < kLeastScore) continue;
      float score = score_[i] + worth_[i];
      if (many_nodes) {
        const auto sent = problem_.node_load(b.m, e, problem_.topology.node_of(RankId{sinks_[i]}));
        score += kLocality * std::min(carried_[i], static_cast<float>(sent) * per_mean);
      }
      if (variant > 0) score += kDisturbance * carried_[i] * disturbance(seed_, variant, e, sinks_[i]);
      pairs_.push_back({.score = score, .expert = e, .rank = sinks_[i], .gain = 0});
    }
  }
}

void GuestSearch::list(const Bottleneck& b, GuestSlotsToUse slots, int variant) {
  measure_sources(b);
  measure_sinks(b);
  choose_slots(b, slots);
  score_pairs(b, variant);
  num_sorted_ = 0;
}

std::span<Candidate> GuestSearch::best(int count) {
  const auto wanted = std::min<std::ptrdiff_t>(count, std::ssize(pairs_));
  if (wanted > num_sorted_) {
    std::partial_sort(pairs_.begin() + num_sorted_, pairs_.begin() + wanted, pairs_.end(), before);
    num_sorted_ = wanted;
  }
  return {pairs_.data(), static_cast<std::size_t>(wanted)};
}

}  // namespace foremoe::planner
