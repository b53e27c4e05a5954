#include "foremoe/planner/layer_planner.h"

#include <algorithm>

#include "foremoe/core/timeline.h"
#include "foremoe/planner/base_guests.h"
#include "foremoe/planner/exchange.h"
#include "foremoe/planner/local_guests.h"
#include "foremoe/planner/rehoming.h"
#include "foremoe/planner/relocation.h"
#include "foremoe/planner/replication.h"

namespace foremoe::planner {

static std::vector<RankId> homes_of_layer(const PlanRequest& request, LayerId layer) {
  const auto row = request.home.row(layer);
  return {row.begin(), row.end()};
}

LayerPlanner::LayerPlanner(const PlanRequest& request, const ExecutionOrder& order, LayerId layer)
    : request_(request),
      options_(request.options),
      order_(order),
      layer_(layer),
      problem_(make_layer_problem(request.load, layer, homes_of_layer(request, layer), request.options)),
      wanted_(problem_.num_micro_steps, WantedGuests(problem_.num_ranks())),
      rests_(problem_.num_micro_steps) {}

// Brings the slots of a rank to what `graph` has on it: who stays keeps its slot, who comes takes the first free one.
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

// The guests that the previous plan held longest, as far as they still are guests: a beginning for stage B.
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

void LayerPlanner::place(StepPlan& plan) {
  const double begin = thread_cpu_seconds();
  if (options_.stages.base && options_.rehome > 0) set_homes(problem_, rehome(problem_, options_.rehome));
  for (int e = 0; e < problem_.num_experts; ++e) plan.home(layer_, e) = RankId{problem_.home[e]};
  ReplicaGraph graph = homes_only(problem_);
  // A beginning that the budgets of the first event do not permit would be no beginning: P then starts from homes.
  const bool budgeted = options_.max_copies_per_rank.value_or(options_.guest_slots) < options_.guest_slots ||
                        options_.max_copies_per_source != kNoLimit;
  const bool keeps_guests = options_.residency == Residency::kStatic || options_.residency == Residency::kResident;
  if (options_.stages.base && keeps_guests && !(budgeted && options_.residency == Residency::kResident)) {
    if (request_.previous != nullptr) start_from_previous(graph);
    BaseGuests(problem_, options_.residency == Residency::kStatic ? BaseGoal::kFinal : BaseGoal::kBeginning)
        .choose(graph);
    if (options_.prefer == Prefer::kLinks) add_local_guests(problem_, graph);
  }
  const double based = thread_cpu_seconds();
  base_cpu_seconds_ += based - begin;

  if (options_.residency == Residency::kFree) {
    place_freely(graph, plan);
  } else {
    place_guests(graph);
    write_slots(keep_guests(), plan);
  }
  planning_cpu_seconds_ += thread_cpu_seconds() - based;
}

GuestSlots LayerPlanner::keep_guests() const {
  if (wanted_.empty() || problem_.guest_slots == 0) return lend_slots(problem_, order_, wanted_);
  switch (options_.residency) {
    case Residency::kStatic:
      return pin_guests(problem_, options_, order_, wanted_.front());
    case Residency::kShared:
      return lend_slots(problem_, order_, wanted_);
    default:
      return retain_guests(problem_, options_, order_, wanted_);
  }
}

void LayerPlanner::place_guests(ReplicaGraph& graph) {
  Replication replication(problem_, options_);
  const ReplicaGraph homes = options_.residency == Residency::kShared ? graph : ReplicaGraph();
  Assignment assignment;
  for (int m = 0; m < problem_.num_micro_steps; ++m) {
    if (options_.residency == Residency::kShared) graph = homes;
    if (options_.residency != Residency::kStatic) balance(m, graph, assignment, replication);
    if (options_.prefer == Prefer::kLinks && options_.residency == Residency::kResident) {
      renew_local_guests(problem_, m, assignment, graph);
    }
    want(m, graph, assignment);
  }
}

// L or P for one micro-step, as far as they are switched on.
void LayerPlanner::balance(int m, ReplicaGraph& graph, Assignment& assignment, Replication& replication) {
  if (options_.stages.replication) {
    replication.balance(m, graph, assignment);
    return;
  }
  serve_at_homes(problem_, m, assignment);
  if (!options_.stages.relocation) {
    AssignmentWorkspace workspace;
    relieve(graph, problem_.target[m], assignment, workspace);
    return;
  }
  rests_[m].assign(problem_.num_experts, 0);
  CopyLedger ledger(problem_, options_);
  ledger.begin(graph);
  relocate_experts(problem_, m, ledger, graph, assignment, rests_[m]);
}

// What m wants: the guests that serve it; all of them where they stay anyway or may keep tokens on their node.
void LayerPlanner::want(int m, const ReplicaGraph& graph, const Assignment& assignment) {
  for (int s = 0; s < graph.num_slots(); ++s) {
    const int e = graph.expert_in(s);
    if (e < 0 || s == problem_.home_slot[e]) continue;
    const bool all = options_.residency == Residency::kStatic ||
                     (options_.prefer == Prefer::kLinks && options_.residency == Residency::kResident);
    if (all || assignment.quota[s] > 0) wanted_[m][graph.rank_of(s)].push_back(e);
  }
  for (auto& guests : wanted_[m]) std::sort(guests.begin(), guests.end());
}

void LayerPlanner::place_freely(ReplicaGraph& graph, StepPlan& plan) {
  // An exchange makes copies that no guest budget counts.
  const bool may_exchange = options_.stages.relocation && !options_.max_copies_per_rank &&
                            options_.max_copies_per_source == kNoLimit && options_.min_tokens_per_guest == 0;
  Assignment assignment;
  AssignmentWorkspace workspace;
  std::vector<ExpertId> slots(graph.num_slots(),
                              kNoExpert);  // as the plan has them: an expert that stays keeps its slot
  for (int e = 0; e < problem_.num_experts; ++e) slots[problem_.home_slot[e]] = ExpertId{e};
  for (int m = 0; m < problem_.num_micro_steps; ++m) {
    Replication replication(problem_, options_);
    balance(m, graph, assignment, replication);
    const std::int64_t busiest = *std::max_element(assignment.rank_load.begin(), assignment.rank_load.end());
    if (may_exchange && busiest > problem_.target[m] && exchange_anchors(problem_, m, graph, assignment, workspace)) {
      balance(m, graph, assignment, replication);
    }
    for (int r = 0; r < problem_.num_ranks(); ++r) {
      const std::span<ExpertId> row(slots.data() + graph.first_slot(r),
                                    static_cast<std::size_t>(graph.slots_per_rank()));
      keep_slots(graph, r, row);
      std::copy(row.begin(), row.end(), plan.slot_expert.row(order_.forward[m], layer_, r).begin());
    }
  }
}

void LayerPlanner::write_slots(const GuestSlots& guests, StepPlan& plan) const {
  for (int t = 0; t < order_.num_events(); ++t) {
    for (int e = 0; e < problem_.num_experts; ++e) {
      const int r = problem_.home[e];
      plan.slot_expert(t, layer_, r, problem_.home_slot[e] - r * problem_.slots_per_rank()) = ExpertId{e};
    }
    for (int r = 0; r < problem_.num_ranks(); ++r) {
      for (int g = 0; g < problem_.guest_slots; ++g) {
        plan.slot_expert(t, layer_, r, problem_.homes_per_rank() + g) = ExpertId{guests(t, r, g)};
      }
    }
  }
}

// The replicas that are there in both passes of m.
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

void LayerPlanner::finish(MicroStepId micro_step, StepPlan& plan) {
  const double begin = thread_cpu_seconds();
  const int m = micro_step.value;
  ReplicaGraph graph = replicas_of(m, plan);
  if (options_.residency ==
      Residency::kFree) {  // tokens start from the home, or from any replica where it was given up
    for (int s = graph.num_slots() - 1; s >= 0; --s) {
      const int e = graph.expert_in(s);
      if (e < 0) continue;
      const int owner = plan.home(layer_, e).value;
      const int holding = graph.find(e, owner);
      problem_.home_slot[e] = holding >= 0 ? holding : s;
      problem_.home[e] = graph.rank_of(problem_.home_slot[e]);
    }
  }
  Assignment assignment;
  std::int64_t level = 0;
  Quotas quotas(problem_, options_);
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
        const bool lent_in_vain =
            options_.residency == Residency::kShared && s >= problem_.homes_per_rank() && tokens[s] == Tokens{0};
        if (lent_in_vain) experts[s] = kNoExpert;
      }
    }
  }
  planning_cpu_seconds_ += thread_cpu_seconds() - begin;
}

}  // namespace foremoe::planner
