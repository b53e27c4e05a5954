#include "foremoe/planner/layer_planner.h"

#include <algorithm>

#include "foremoe/core/timeline.h"
#include "foremoe/planner/base_guests.h"
#include "foremoe/planner/local_guests.h"
#include "foremoe/planner/rehoming.h"
#include "foremoe/planner/relocation.h"
#include "foremoe/planner/replication.h"

namespace foremoe::planner {

static std::vector<RankId> homes_of_layer(const PlanRequest& request, LayerId layer) {
  const auto row = request.home.row(layer);
  return {row.begin(), row.end()};
}

LayerPlanner::LayerPlanner(const PlanRequest& request, const ExecutionOrder& order, LayerId layer, PartCount* parts)
    : request_(request),
      options_(request.options),
      order_(order),
      layer_(layer),
      parts_(parts),
      problem_(make_layer_problem(request.load, layer, homes_of_layer(request, layer), request.options)),
      wanted_(problem_.num_micro_steps, WantedGuests(problem_.num_ranks())),
      rests_(problem_.num_micro_steps) {}

LayerPlanner::~LayerPlanner() = default;

constexpr std::int64_t kPlacingParts = 4;  // of choosing a micro-step's guests; its final token assignment is one part

static bool takes_warm_start(const PlanRequest& request) {
  return request.previous != nullptr && without_base_guests(request.options).empty();
}

std::int64_t LayerPlanner::parts_of_layer(const PlanRequest& request) {
  const bool places = request.options.residency != Residency::kShared;
  const std::int64_t placing = !places ? 0 : takes_warm_start(request) ? 2 * kPlacingParts : kPlacingParts;
  return (placing + 1) * request.load.num_micro_steps();
}

void LayerPlanner::count(std::int64_t parts) const {
  if (parts_ != nullptr) parts_->add(parts);
}

// Updates a rank's slots to its replicas in `graph`. Present replicas keep their slot; new replicas get the first free
// slot.
static void keep_slots(const ReplicaGraph& graph, int rank, std::span<ExpertId> slots) {
  for (ExpertId& e : slots) {
    if (e != kNoExpert && graph.find(e.value, rank) < 0) e = kNoExpert;
  }
  for (int s = graph.first_slot(rank); s < graph.first_slot(rank + 1); ++s) {
    const ExpertId e{graph.expert_in(s)};
    if (e == kNoExpert || std::find(slots.begin(), slots.end(), e) != slots.end()) continue;
    *std::find(slots.begin(), slots.end(), kNoExpert) = e;
  }
}

// Fills guest slots with the previous plan's guests that were present at the most events and are still away from home.
void LayerPlanner::start_from_previous(ReplicaGraph& graph) const {
  const StepPlan& previous = *request_.previous;
  for (int r = 0; r < problem_.num_ranks(); ++r) {
    std::vector<int> events_held(problem_.num_experts, 0);
    for (int t = 0; t < previous.num_events(); ++t) {
      for (const ExpertId e : previous.slot_expert.row(t, layer_, r)) {
        if (e != kNoExpert && problem_.home[e.value] != r) ++events_held[e.value];
      }
    }
    for (int s = graph.first_slot(r) + problem_.homes_per_rank(); s < graph.first_slot(r) + graph.slots_per_rank();
         ++s) {
      const auto longest = std::max_element(events_held.begin(), events_held.end());
      if (*longest == 0) break;
      graph.put(s, static_cast<int>(longest - events_held.begin()));
      *longest = 0;
    }
  }
}

void LayerPlanner::place_homes(StepPlan& plan) {
  if (options_.stages.base && options_.rehome > 0) set_homes(problem_, rehome(problem_, options_.rehome));
  for (int e = 0; e < problem_.num_experts; ++e) plan.home(layer_, e) = RankId{problem_.home[e]};
}

// Returns whether `resident` spends planning time on saving copies, by sweeps of B and by comparison with static
// guests. Always true unless Prefer::kBalance, since the sweeps also choose local guests.
bool LayerPlanner::saves_copies() const {
  return options_.stages.sweeps || preference(options_) != Prefer::kBalance || !copies_hide(problem_);
}

ReplicaGraph LayerPlanner::place_base(bool warm) {
  const double begin = thread_cpu_seconds();
  ReplicaGraph graph = homes_only(problem_);
  if (without_base_guests(options_).empty()) {
    if (warm) start_from_previous(graph);
    const bool is_final = options_.residency == Residency::kStatic;
    BaseGuests(problem_, is_final ? BaseGoal::kFinal : BaseGoal::kReplaceable, LocalGuests(problem_, options_))
        .choose(graph, is_final || saves_copies());
  }
  base_cpu_seconds_ += thread_cpu_seconds() - begin;
  return graph;
}

void LayerPlanner::place(StepPlan& plan) {
  const double begin = thread_cpu_seconds();
  const double base_before = base_cpu_seconds_;
  place_homes(plan);
  base_cpu_seconds_ += thread_cpu_seconds() - begin;
  if (options_.residency == Residency::kFree) {
    ReplicaGraph base = place_base(false);
    place_freely(base, plan);
  } else if (options_.residency != Residency::kShared) {
    GuestSlots guests = place_guests(place_base(false));
    if (takes_warm_start(request_)) take_warm_start(guests);
    write_slots(guests, plan);
  }
  planning_cpu_seconds_ += thread_cpu_seconds() - begin - (base_cpu_seconds_ - base_before);
}

GuestSlots LayerPlanner::place_guests(ReplicaGraph base) {
  switch (options_.residency) {
    case Residency::kStatic:
      count(kPlacingParts * problem_.num_micro_steps);  // B has chosen them
      return place_static(base);
    default:
      return place_resident(std::move(base));
  }
}

// Returns the guests in `graph`, experts ascending. If `serving` is not null, returns only guests with tokens in it.
static WantedGuests guests_in(const ReplicaGraph& graph, const LayerProblem& problem, const Assignment* serving) {
  WantedGuests wanted(problem.num_ranks());
  for (int s = 0; s < graph.num_slots(); ++s) {
    const int e = graph.expert_in(s);
    if (e < 0 || s == problem.home_slot[e]) continue;
    if (serving == nullptr || serving->quota[s] > 0) wanted[graph.rank_of(s)].push_back(e);
  }
  for (auto& guests : wanted) std::sort(guests.begin(), guests.end());
  return wanted;
}

// Number of experts copied to ranks, over all events.
static std::int64_t num_copies(const GuestSlots& guests) {
  std::int64_t copies = 0;
  for (std::size_t t = 0; t < guests.extent(0); ++t) {
    for (std::size_t r = 0; r < guests.extent(1); ++r) {
      for (const int e : guests.row(t, r)) {
        if (e < 0) continue;
        const bool stayed = t > 0 && std::ranges::find(guests.row(t - 1, r), e) != guests.row(t - 1, r).end();
        copies += stayed ? 0 : 1;
      }
    }
  }
  return copies;
}

// Uses the guests of B in every micro-step.
GuestSlots LayerPlanner::place_static(const ReplicaGraph& base) {
  const WantedGuests guests = guests_in(base, problem_, nullptr);
  std::fill(wanted_.begin(), wanted_.end(), guests);
  return pin_guests(problem_, options_, order_, guests);
}

constexpr int kVariants = 12;  // variants to try if static guests may beat the search

static std::int64_t busiest(const Assignment& a) { return *std::max_element(a.rank_load.begin(), a.rank_load.end()); }

// Returns whether `resident` must be compared with static guests, which may reach lower loads than its search. With
// these options every `static` plan is also a valid `resident` plan, and stage T finds its optimal quotas.
static bool rivals_static(const PlannerOptions& options) {
  return options.guest_slots > 0 && options.stages.replication && options.stages.tokens &&
         without_base_guests(options).empty() && preference(options) == Prefer::kBalance &&
         options.min_tokens_per_guest == 0;
}

static bool places_guests(const PlannerStages& stages) {
  return stages.base || stages.relocation || stages.replication;
}

// Each micro-step starts from the guests left by the previous one. Guests without tokens are requested only if
// tokens count as local, which they may then serve.
GuestSlots LayerPlanner::place_resident(ReplicaGraph graph) {
  Replication replication(problem_, options_);
  Assignment assignment;
  if (rivals_static(options_)) rival_.emplace(problem_, graph);
  const LocalGuests local(problem_, options_);
  for (int m = 0; m < problem_.num_micro_steps; ++m) {
    const ReplicaGraph found = graph;
    balance(m, graph, assignment, replication);
    if (places_guests(options_.stages)) local.renew(m, assignment, found, graph);
    wanted_[m] = rival_ && busiest(assignment) > problem_.target[m]
                     ? search_alternatives(m, found, graph, assignment, replication)
                     : guests_in(graph, problem_, local.count() ? nullptr : &assignment);
    count(kPlacingParts);
  }
  GuestSlots guests = retain_guests(problem_, options_, order_, wanted_);
  if (!rival_) return guests;
  if (saves_copies() && rival_->balances_with(num_copies(guests))) guests = place_static(rival_->graph());
  base_cpu_seconds_ += rival_->cpu_seconds();
  rival_.reset();
  return guests;
}

// Called if P started from `found` and missed the target of m. If static guests may reach a lower load, tries other
// variants from `found`, then a search from homes, then one from the static guests. Later micro-steps still continue
// from `graph`. Returns the guests that m needs.
WantedGuests LayerPlanner::search_alternatives(int m, const ReplicaGraph& found, const ReplicaGraph& graph,
                                               const Assignment& assignment, Replication& replication) {
  ReplicaGraph best = graph;
  Assignment best_quotas = assignment;
  if (!rival_->may_beat(m, busiest(assignment))) return guests_in(graph, problem_, &assignment);
  const std::int64_t goal = rival_->is_certain() ? std::max(problem_.target[m], rival_->level(m)) : problem_.target[m];
  ReplicaGraph other;
  Assignment quotas;
  const auto reaches_goal = [&](const ReplicaGraph& start, int variant) {
    other = start;
    replication.search_variant(variant, m, other, quotas);
    if (busiest(quotas) < busiest(best_quotas)) {
      std::swap(best, other);
      std::swap(best_quotas, quotas);
    }
    return busiest(best_quotas) <= goal;
  };
  for (int variant = 1; variant <= kVariants; ++variant) {
    if (reaches_goal(found, variant)) return guests_in(best, problem_, &best_quotas);
  }
  if (rival_->may_beat(m, busiest(best_quotas)) && !reaches_goal(homes_only(problem_), 0) &&
      rival_->beats(m, busiest(best_quotas)) && !reaches_goal(rival_->graph(), 0) &&
      busiest(best_quotas) > rival_->level(m)) {
    best = rival_->graph();
    serve_at_homes(problem_, m, best_quotas);
    AssignmentSearch().relieve(best, rival_->level(m), best_quotas);
  }
  return guests_in(best, problem_, &best_quotas);
}

// Plans again from the previous plan's guests. Keeps the new result if neither the copies nor the part of any
// micro-step's largest load above its target increases, and one of them decreases.
void LayerPlanner::take_warm_start(GuestSlots& guests) {
  const std::vector<WantedGuests> cold_wanted = wanted_;
  const GuestSlots warm = place_guests(place_base(true));
  const std::int64_t more_copies = num_copies(warm) - num_copies(guests);
  bool no_worse = more_copies <= 0;
  bool better = more_copies < 0;
  for (int m = 0; m < problem_.num_micro_steps && no_worse; ++m) {
    const std::int64_t cold_load = std::max(problem_.target[m], least_load(m, guests));
    const std::int64_t warm_load = std::max(problem_.target[m], least_load(m, warm));
    no_worse = warm_load <= cold_load;
    better |= warm_load < cold_load;
  }
  if (no_worse && better) {
    guests = warm;
  } else {
    wanted_ = cold_wanted;
  }
}

// Minimum largest rank load of m with the guests present in both of its passes.
std::int64_t LayerPlanner::least_load(int m, const GuestSlots& guests) const {
  ReplicaGraph graph = homes_only(problem_);
  for (int r = 0; r < problem_.num_ranks(); ++r) {
    const auto backward = guests.row(order_.backward[m].index(), r);
    int slot = graph.first_slot(r) + problem_.homes_per_rank();
    for (const int e : guests.row(order_.forward[m].index(), r)) {
      if (e >= 0 && std::ranges::find(backward, e) != backward.end()) graph.put(slot++, e);
    }
  }
  Assignment assignment;
  serve_at_homes(problem_, m, assignment);
  AssignmentSearch search;
  return assign_tokens(graph, problem_.lower_bound[m], assignment, search);
}

// Under `shared`, plans one micro-step from homes, independently of all others.
void LayerPlanner::lend(MicroStepId micro_step, StepPlan& plan) {
  if (options_.residency != Residency::kShared) return;
  const double begin = thread_cpu_seconds();
  const int m = micro_step.value;
  if (!lending_) lending_ = std::make_unique<Replication>(problem_, options_);
  ReplicaGraph graph = homes_only(problem_);
  Assignment assignment;
  balance(m, graph, assignment, *lending_);
  wanted_[m] = guests_in(graph, problem_, &assignment);
  for (const EventId t : {order_.forward[m], order_.backward[m]}) {
    write_homes(t, plan);
    for (int r = 0; r < problem_.num_ranks(); ++r) {
      const auto slots = plan.slot_expert.row(t, layer_, r).subspan(problem_.homes_per_rank());
      std::ranges::transform(wanted_[m][r], slots.begin(), [](int e) { return ExpertId{e}; });
    }
  }
  planning_cpu_seconds_ += thread_cpu_seconds() - begin;
}

// Runs L or P for one micro-step, if they are enabled.
void LayerPlanner::balance(int m, ReplicaGraph& graph, Assignment& assignment, Replication& replication) {
  if (options_.stages.replication) {
    replication.balance(m, graph, assignment);
    return;
  }
  serve_at_homes(problem_, m, assignment);
  if (!options_.stages.relocation) {
    AssignmentSearch().relieve(graph, problem_.target[m], assignment);
    return;
  }
  CopyLedger ledger(problem_, options_);
  ledger.begin(graph);
  rests_[m] = relocate_experts(problem_, m, ledger, graph, assignment);
}

void LayerPlanner::place_freely(ReplicaGraph& graph, StepPlan& plan) {
  // Exchanges ignore the budgets for copies and guests, so they run only without budgets.
  const bool may_exchange = options_.stages.relocation && !options_.max_copies_per_rank &&
                            options_.max_copies_per_source == kNoLimit && options_.min_tokens_per_guest == 0;
  Assignment assignment;
  AssignmentSearch search;
  std::vector<ExpertId> slots(graph.num_slots(), kNoExpert);  // the plan's slots; experts that stay keep their slot
  for (int e = 0; e < problem_.num_experts; ++e) slots[problem_.home_slot[e]] = ExpertId{e};
  for (int m = 0; m < problem_.num_micro_steps; ++m) {
    Replication replication(problem_, options_);
    balance(m, graph, assignment, replication);
    const std::int64_t busiest = *std::max_element(assignment.rank_load.begin(), assignment.rank_load.end());
    if (may_exchange && busiest > problem_.target[m] && exchange_anchors(problem_, m, graph, assignment, search)) {
      balance(m, graph, assignment, replication);
    }
    for (int r = 0; r < problem_.num_ranks(); ++r) {
      const std::span<ExpertId> row(slots.data() + graph.first_slot(r),
                                    static_cast<std::size_t>(graph.slots_per_rank()));
      keep_slots(graph, r, row);
      std::copy(row.begin(), row.end(), plan.slot_expert.row(order_.forward[m], layer_, r).begin());
    }
    count(kPlacingParts);
  }
}

void LayerPlanner::write_homes(EventId t, StepPlan& plan) const {
  for (int e = 0; e < problem_.num_experts; ++e) {
    const int r = problem_.home[e];
    plan.slot_expert(t, layer_, r, problem_.home_slot[e] - r * problem_.slots_per_rank()) = ExpertId{e};
  }
}

void LayerPlanner::write_slots(const GuestSlots& guests, StepPlan& plan) const {
  for (int t = 0; t < order_.num_events(); ++t) {
    write_homes(EventId{t}, plan);
    for (int r = 0; r < problem_.num_ranks(); ++r) {
      for (int g = 0; g < problem_.guest_slots; ++g) {
        plan.slot_expert(t, layer_, r, problem_.homes_per_rank() + g) = ExpertId{guests(t, r, g)};
      }
    }
  }
}

// Returns the replicas present in both passes of m.
ReplicaGraph LayerPlanner::replicas_of(int m, const StepPlan& plan) const {
  ReplicaGraph graph(problem_.num_ranks(), problem_.slots_per_rank(), problem_.num_experts);
  for (int r = 0; r < problem_.num_ranks(); ++r) {
    const auto forward = plan.slot_expert.row(order_.forward[m], layer_, r);
    const auto backward = plan.slot_expert.row(order_.backward[m], layer_, r);
    for (int s = 0; s < problem_.slots_per_rank(); ++s) {
      const bool stays =
          forward[s] != kNoExpert && std::find(backward.begin(), backward.end(), forward[s]) != backward.end();
      const bool wanted = options_.stages.tokens || options_.residency == Residency::kFree ||
                          s < problem_.homes_per_rank() ||
                          std::binary_search(wanted_[m][r].begin(), wanted_[m][r].end(), forward[s].value);
      if (stays && wanted) graph.put(graph.first_slot(r) + s, forward[s].value);
    }
  }
  return graph;
}

// Returns [expert], the slot where its tokens start: the home slot or, without a replica there, the lowest slot.
std::vector<int> LayerPlanner::anchors_in(const ReplicaGraph& graph, const StepPlan& plan) const {
  if (options_.residency != Residency::kFree) return problem_.home_slot;
  std::vector<int> anchor(problem_.num_experts, -1);
  for (int s = graph.num_slots() - 1; s >= 0; --s) {
    const int e = graph.expert_in(s);
    if (e < 0) continue;
    const int at_home = graph.find(e, plan.home(layer_, e).value);
    anchor[e] = at_home >= 0 ? at_home : s;
  }
  return anchor;
}

void LayerPlanner::finish(MicroStepId micro_step, StepPlan& plan) {
  const double begin = thread_cpu_seconds();
  const int m = micro_step.value;
  ReplicaGraph graph = replicas_of(m, plan);
  Assignment assignment;
  std::int64_t level = 0;
  Quotas quotas(problem_, options_, anchors_in(graph, plan));
  if (options_.stages.tokens) {
    level = quotas.exact(m, graph, assignment);
  } else {
    rests_[m].resize(problem_.num_experts, 0);
    level = quotas.equal(m, graph, rests_[m], assignment);
  }
  plan.max_load(m, layer_) = Tokens{level};
  plan.lower_bound(m, layer_) = Tokens{problem_.lower_bound[m]};
  for (const EventId t : {order_.forward[m], order_.backward[m]}) {
    for (int r = 0; r < problem_.num_ranks(); ++r) {
      const auto experts = plan.slot_expert.row(t, layer_, r);
      const auto tokens = plan.slot_tokens.row(t, layer_, r);
      for (int s = 0; s < problem_.slots_per_rank(); ++s) {
        const int held = experts[s] == kNoExpert ? -1 : graph.find(experts[s].value, r);
        tokens[s] = Tokens{held < 0 ? 0 : assignment.quota[held]};
        const bool serves_nobody =
            options_.residency == Residency::kShared && s >= problem_.homes_per_rank() && tokens[s] == Tokens{0};
        if (serves_nobody) experts[s] = kNoExpert;
      }
    }
  }
  planning_cpu_seconds_ += thread_cpu_seconds() - begin;
  count(1);
}

}  // namespace foremoe::planner
