#pragma once

// The rules of check_plan, one function each. Each takes for granted what the groups above its own establish.

#include <vector>

#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/route_tokens.h"

namespace foremoe::check {

struct Subject {
  const StepPlan& plan;
  const LoadTable& load;
  const CheckOptions& options;
  const SourceTokens* tokens = nullptr;  // behind the load, where the options tell them

  // Between rules, and within long ones between layers.
  void expect_going_on() const {
    if (options.pool != nullptr) options.pool->expect_going_on();
  }
};

// Where the rules put what they find.
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

// check_plan.cpp: made for this load, and what the plan says of itself.
void shapes(const Subject&, Findings&);
void digest(const Subject&, Findings&);
void recorded_options(const Subject&, Findings&);
void event_order(const Subject&, Findings&);

// check_slots.cpp: ids in range and homes as they must be.
void expert_ids(const Subject&, Findings&);
void homes(const Subject&, Findings&);

// check_slots.cpp and check_tokens.cpp: what the slots hold and owe, and what the plan's own options permit.
void home_slots(const Subject&, Findings&);
void replicas(const Subject&, Findings&);
void staying_experts(const Subject&, Findings&);
void static_guests(const Subject&, Findings&);
void forward_only(const Subject&, Findings&);
void quotas(const Subject&, Findings&);
void passes(const Subject&, Findings&);
void budgets(const Subject&, Findings&);

// check_tokens.cpp: what follows from them.
void bounds(const Subject&, Findings&);
void routes(const Subject&, Findings&);

// check_figures.cpp: the figures from their definitions, and reported ones held against them.
PlanFigures recompute_figures(const Subject&);
void reported_figures(const PlanFigures& reported, const PlanFigures& recomputed, Findings&);

// True when the trace that the options name, batched as they say, has exactly the rows that the load counts.
bool trace_has_the_load(const Subject&);

// The rows of one expert that a source sends to a replica.
struct Delivery {
  RankId source;
  RankId replica;
  std::int64_t rows;
};

// [expert], the deliveries of each by the three sweeps, in their order, at one event.
std::vector<std::vector<Delivery>> deliveries(const Subject&, EventId, LayerId);

// Was the slot's expert in none of the rank's slots before? (Under `shared`: is it a guest with quota?)
bool is_copy(const StepPlan& plan, EventId t, LayerId l, RankId r, SlotId s);

// [micro_step], the first of its events: with more than one in flight its forward.
std::vector<EventId> first_events(const Subject&);

// Tokens of one expert over all sources.
std::int64_t load_of(const Subject&, MicroStepId, LayerId, ExpertId);

}  // namespace foremoe::check
