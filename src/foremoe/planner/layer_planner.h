#pragma once

// The four stages composed over the horizon, for one layer.
//
// place() decides the slots of every event: B once, then L or P micro-step by micro-step on what the one before left,
// then retention. Under `shared`, where nothing stays, lend(m) decides those of one micro-step when its turn comes.
// finish(m) is stage T for one micro-step on what is there in both of its passes. Layers share nothing.
//
// Where P runs, L does not: a copy that P makes may serve a whole expert, and P weighs it against splitting. Under
// `free`, L exchanges experts where guests alone do not reach the target.

#include <memory>
#include <optional>
#include <vector>

#include "foremoe/planner/layer_problem.h"
#include "foremoe/planner/planner.h"
#include "foremoe/planner/quotas.h"
#include "foremoe/planner/retention.h"
#include "foremoe/planner/static_rival.h"

namespace foremoe::planner {

class Replication;

// Whether stage B chooses guests. Under `shared` and `free` nothing stays, so there is nothing to choose. Where budgets
// on copies forbid a full beginning, P starts from homes.
bool uses_base_guests(const PlannerOptions& options);

class LayerPlanner {
 public:
  LayerPlanner(const PlanRequest& request, const ExecutionOrder& order, LayerId layer);

  ~LayerPlanner();

  void place(StepPlan& plan);                  // writes home, and slot_expert, of this layer
  void lend(MicroStepId m, StepPlan& plan);    // under `shared`: slot_expert of (m, layer)
  void finish(MicroStepId m, StepPlan& plan);  // writes slot_tokens, max_load and lower_bound of (m, layer)

  double base_cpu_seconds() const { return base_cpu_seconds_; }
  double planning_cpu_seconds() const { return planning_cpu_seconds_; }

 private:
  // Stage B: homes, written to the plan, and the guests that the step begins with, found from nothing or from those of
  // the former plan.
  void place_homes(StepPlan& plan);
  bool saves_copies() const;
  ReplicaGraph place_base(bool warm);
  void start_from_previous(ReplicaGraph& graph) const;

  // L or P, one function per residency. All but the last return the guests of every event.
  GuestSlots place_guests(ReplicaGraph base);
  GuestSlots place_static(const ReplicaGraph& base);
  GuestSlots place_resident(ReplicaGraph graph);
  WantedGuests catch_up(int m, const ReplicaGraph& found, const ReplicaGraph& graph, const Assignment& assignment,
                        Replication& replication);
  void take_warm_start(GuestSlots& guests);
  std::int64_t least_load(int m, const GuestSlots& guests) const;
  void place_freely(ReplicaGraph& graph, StepPlan& plan);
  void balance(int m, ReplicaGraph& graph, Assignment& assignment, Replication& replication);

  void write_homes(EventId t, StepPlan& plan) const;
  void write_slots(const GuestSlots& guests, StepPlan& plan) const;
  ReplicaGraph replicas_of(int m, const StepPlan& plan) const;
  std::vector<int> anchors_in(const ReplicaGraph& graph, const StepPlan& plan) const;

  const PlanRequest& request_;
  const PlannerOptions& options_;
  const ExecutionOrder& order_;
  LayerId layer_;
  LayerProblem problem_;
  std::vector<WantedGuests> wanted_;      // [micro_step]
  std::vector<std::vector<char>> rests_;  // [micro_step][expert], relocated: home does not serve; empty: none does
  std::optional<StaticRival> rival_;      // while place_resident() runs
  std::unique_ptr<Replication> lending_;  // of lend()
  double base_cpu_seconds_ = 0;
  double planning_cpu_seconds_ = 0;
};

}  // namespace foremoe::planner
