#pragma once

// The rules of check_plan, one function each. A rule assumes that the rules of earlier groups hold.

#include <vector>

#include "foremoe/plan/assign_rows.h"
#include "foremoe/plan/check_plan.h"

namespace foremoe::check {

struct Subject {
  const StepPlan& plan;
  const LoadTable& load;
  const CheckOptions& options;
  const SourceTokens* tokens = nullptr;  // the tokens that the load counts; null if unknown

  // Throws Cancelled if the pool was cancelled. Called between rules, and in long rules between layers.
  void throw_if_cancelled() const {
    if (options.pool != nullptr) options.pool->throw_if_cancelled();
  }
};

// Adds violations and skipped checks to a report.
class Findings {
 public:
  Findings(CheckReport& report, int max_listed) : report_(report), max_listed_(max_listed) {}

  void add(Violation violation);
  void not_checked(std::string what);
  bool has(ViolationKind kind) const { return report_.num_of_kind[static_cast<std::size_t>(kind)] > 0; }

 private:
  CheckReport& report_;
  int max_listed_;
};

// check_plan.cpp: shapes, digest of the load, recorded options and order of events.
void shapes(const Subject&, Findings&);
void digest(const Subject&, Findings&);
void recorded_options(const Subject&, Findings&);
void event_order(const Subject&, Findings&);

// check_slots.cpp: expert ids in range and valid homes.
void expert_ids(const Subject&, Findings&);
void homes(const Subject&, Findings&);

// check_slots.cpp and check_tokens.cpp: experts and quotas of the slots, and budgets in the plan's options.
void home_slots(const Subject&, Findings&);
void replicas(const Subject&, Findings&);
void staying_experts(const Subject&, Findings&);
void static_guests(const Subject&, Findings&);
void forward_only(const Subject&, Findings&);
void quotas(const Subject&, Findings&);
void passes(const Subject&, Findings&);
void budgets(const Subject&, Findings&);

// check_tokens.cpp: recorded loads and bounds, and routing.
void bounds(const Subject&, Findings&);
void routes(const Subject&, Findings&);

// check_figures.cpp: recomputes the figures from their definitions and compares reported figures with them.
PlanFigures recompute_figures(const Subject&);
void reported_figures(const PlanFigures& reported, const PlanFigures& recomputed, Findings&);

// True if the batched trace in the options has exactly the rows that the load counts.
bool trace_matches_load(const Subject&);

// Rows of one expert that a source sends to a replica.
struct Delivery {
  RankId source;
  RankId replica;
  std::int64_t rows;
};

// [expert]: deliveries at one event, in the order of the three sweeps (own rank, own node, other nodes).
std::vector<std::vector<Delivery>> deliveries(const Subject&, EventId, LayerId);

// True if the slot's expert was in no slot of the rank at the previous event. Under `shared`, if a guest has quota.
bool is_copy(const StepPlan& plan, EventId t, LayerId l, RankId r, SlotId s);

// [micro_step]: the first event of each. With more than one micro-step in flight, this is the forward event.
std::vector<EventId> first_events(const Subject&);

// Tokens of one expert, summed over all sources.
std::int64_t load_of(const Subject&, MicroStepId, LayerId, ExpertId);

}  // namespace foremoe::check
