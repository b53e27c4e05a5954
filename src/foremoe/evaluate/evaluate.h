#pragma once

// What a policy's plan is worth on an input: the one pipeline behind compare, simulate, report and run.
//
//   plan       by the policy, for the policy update; once more for recompute where in_flight > 1
//   check      by check_plan, with the input's homes and tokens and the figures that are shown
//   figures    plan_figures
//   simulate   both phases on the modelled cluster, where there is one
//   compare    seconds over those of vanilla on the same input
//
//   ThreadPool pool;
//   const StepInput input = read_step_input({.path = "step.load.safetensors"}, pool);
//   const Evaluation e = evaluate(*find_policy("foremoe"), input, {.planner = {.guest_slots = 2}}, {.pool = pool});
//   if (e.skipped.empty() && e.check.ok()) use(e.plan, e.figures.rho.mean);
//
// An input of fewer layers than the model stands for all of them: each layer for as many of the model's.

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/core/timeline.h"
#include "foremoe/evaluate/step_input.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/policy/policy.h"
#include "foremoe/sim/simulation.h"

namespace foremoe {

struct EvaluateOptions {
  PlannerOptions planner;
  bool hidden_copies = false;  // max_copies_per_rank is as many as the links carry while a layer computes
  // The residency with which the simulated step is quickest within the memory budget: of static, resident and shared;
  // free too in recompute. A policy that has its own residency keeps it.
  bool choose_residency = false;
  int align = 128;    // tokens; rho_padded rounds each replica's tokens up to a multiple of this
  bool check = true;  // false: the caller checks, or does not

  // Of the simulation.
  bool simulate = true;  // false: a cost model serves hidden copies alone
  PathChoice path = PathChoice::kAuto;
  int depth = kDefaultDepth;           // turns ahead of which copies may begin
  double rollout_seconds = 0;          // of the RL step, the same whoever plans
  double rollout_tail_seconds = 0;     // of it, what placement overlaps with
  int planners = 0;                    // that place experts together, each some of the layers; 0: one per rank
  int planning_threads = 1;            // of each planner
  double plan_gather_seconds = 0.04;   // after which all planners have the whole plan; measured (lab/performance.md)
  double memory_budget_gigabytes = 0;  // of one rank, 10⁹ bytes; 0: none

  std::optional<Bytes> memory_budget() const;
};

// The planner's options, with residency `auto` and `hidden` copies, and align.
std::vector<Option> planning_options_of(EvaluateOptions& options);
std::vector<Option> simulation_options_of(EvaluateOptions& options);

struct EvaluationContext {
  ThreadPool& pool;
  const CostModel* cost = nullptr;  // null: nothing is simulated; its ranks per node are those of the input
  Timeline* timeline = nullptr;     // of the simulated policy update
  std::function<void(const std::string& what)> progress = {};  // "planning with eplb"; before each long part
};

struct Evaluation {
  std::string policy;
  std::string skipped;  // why the policy has no plan for this input; empty: it has, and all below holds

  StepPlan plan;                           // the policy update's, and recompute's where that has none of its own
  std::optional<StepPlan> recompute_plan;  // where the policy update has more than one micro-step in flight
  PlanTimes times;
  // Measured, with a cost model: from the beginning of planning until the first micro-step can begin, by the planners
  // of the options, of all plans that are made to choose one; 0 of a policy that does not plan ahead.
  double placement_seconds = 0;
  double whole_placement_seconds = 0;  // charged in its place where it says so: measured_plan.h
  int planners = 1;
  int threads = 1;
  PlanFigures figures;
  CheckReport check;  // of both plans

  std::optional<SimulatedStep> step;  // with a cost model, of a plan that is right
  double speedup_over_vanilla = 1;
  double placed_speedup = 1;                         // with placement, which vanilla has none of
  double rl_step_speedup = 1;                        // with the rollout
  std::optional<Tokens> largest_micro_batch_tokens;  // per rank in the mean, with a memory budget

  bool planned() const { return skipped.empty(); }
  const StepPlan& plan_of(Phase phase) const;
  // CPU time of planning one layer of one micro-step, without what is done once per step, µs.
  double us_per_layer_micro_step() const;
  double fraction_of_ideal() const;  // of a simulated step
};

// Throws InputError for options that cannot be, and for a cost model that does not fit.
Evaluation evaluate(const Policy& policy, const StepInput& input, const EvaluateOptions& options,
                    const EvaluationContext& context);

// In the order of the policies, with speedups over vanilla, which is evaluated whether or not it is among them. A
// timeline is of the last one that has a plan.
std::vector<Evaluation> evaluate_all(std::span<const Policy* const> policies, const StepInput& input,
                                     const EvaluateOptions& options, const EvaluationContext& context);

// Throws InputError, field `residency`, where the plan has another one than was asked for; none: any will do.
void expect_residency(const Evaluation& evaluation, std::optional<Residency> asked);

// Fills in the speedups. Nothing to compare where one of them has no simulated step.
void compare_with(const Evaluation& vanilla, Evaluation& evaluation);

// 1 of a step that takes no time.
double speedup(double before_seconds, double after_seconds);

// What check_plan is given wherever a plan of this input is checked. Refers to the input and the figures.
CheckOptions check_options(const StepInput& input, const PlanFigures* reported = nullptr, int align = 128);

// The planner's options with hidden_copies made a number: the copies that a rank receives while one layer of a mean
// micro-step computes, from its host and, on a single node, from peers too; there no home sends more either. Throws
// InputError without a cost model.
PlannerOptions planner_options(const EvaluateOptions& options, const LoadTable& load, const CostModel* cost);

}  // namespace foremoe
