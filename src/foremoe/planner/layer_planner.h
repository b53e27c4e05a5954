#pragma once

// Plans one layer: runs the four stages over all micro-steps.
//
// place() decides the slots of every event. It runs B once, then L or P for each micro-step from the previous one's
// guests, then retention. Under `shared` guests do not persist, so lend(m) decides the slots of one micro-step.
// finish(m) runs T for one micro-step on the replicas present in both of its passes. Layers share no state.
//
// L runs only if P is off: a copy made by P may serve a whole expert, and P weighs this against splitting. Under
// `free`, L also runs after P and exchanges experts if guests alone do not reach the target.

#include <memory>
#include <optional>
#include <vector>

#include "foremoe/planner/layer_problem.h"
#include "foremoe/planner/planner.h"
#include "foremoe/planner/quotas.h"
#include "foremoe/planner/retention.h"
#include "foremoe/planner/static_reference.h"

namespace foremoe::planner {

class Replication;

class LayerPlanner {
 public:
  // parts: receives parts_of_layer() in total, while this object plans. May be null.
  LayerPlanner(const PlanRequest& request, const ExecutionOrder& order, LayerId layer, PartCount* parts = nullptr);

  ~LayerPlanner();

  void place(StepPlan& plan);                  // writes home and, except under `shared`, slot_expert
  void lend(MicroStepId m, StepPlan& plan);    // under `shared`: writes slot_expert of (m, layer)
  void finish(MicroStepId m, StepPlan& plan);  // writes slot_tokens, max_load and lower_bound of (m, layer)

  // The parts of one layer. Equal parts take roughly equal time.
  static std::int64_t parts_of_layer(const PlanRequest& request);

  double base_cpu_seconds() const { return base_cpu_seconds_; }
  double planning_cpu_seconds() const { return planning_cpu_seconds_; }

 private:
  // Stage B. place_homes() writes the homes to the plan; place_base() chooses the initial guests, starting from the
  // previous plan's guests if `warm`.
  void place_homes(StepPlan& plan);
  bool saves_copies() const;
  ReplicaGraph place_base(bool warm);
  void start_from_previous(ReplicaGraph& graph) const;

  // Stages L and P, one function per residency. place_freely() writes to the plan; the others return guests by event.
  GuestSlots place_guests(ReplicaGraph base);
  GuestSlots place_static(const ReplicaGraph& base);
  GuestSlots place_resident(ReplicaGraph graph);
  WantedGuests search_alternatives(int m, const ReplicaGraph& found, const ReplicaGraph& graph,
                                   const Assignment& assignment, Replication& replication);
  void take_warm_start(GuestSlots& guests);
  std::int64_t least_load(int m, const GuestSlots& guests) const;
  void place_freely(ReplicaGraph& graph, StepPlan& plan);
  void balance(int m, ReplicaGraph& graph, Assignment& assignment, Replication& replication);

  void count(std::int64_t parts) const;
  void write_homes(EventId t, StepPlan& plan) const;
  void write_slots(const GuestSlots& guests, StepPlan& plan) const;
  ReplicaGraph replicas_of(int m, const StepPlan& plan) const;
  std::vector<int> anchors_in(const ReplicaGraph& graph, const StepPlan& plan) const;

  const PlanRequest& request_;
  const PlannerOptions& options_;
  const ExecutionOrder& order_;
  LayerId layer_;
  PartCount* parts_;
  LayerProblem problem_;
  std::vector<WantedGuests> wanted_;      // [micro_step]
  std::vector<std::vector<char>> rests_;  // [micro_step][expert], 1 if relocated (home is idle); empty: all 0
  std::optional<StaticReference> rival_;  // only while place_resident() runs
  std::unique_ptr<Replication> lending_;  // used by lend()
  double base_cpu_seconds_ = 0;
  double planning_cpu_seconds_ = 0;
};

}  // namespace foremoe::planner
