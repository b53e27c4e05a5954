#pragma once

// Evaluates a policy's plan on a workload. compare, simulate, report and run use this pipeline:
//
//   plan       with the policy, for the policy update; again for recompute if in_flight > 1
//   measure    plan_figures
//   check      check_plan, with the workload's homes and tokens and the reported figures
//   simulate   both phases on the modelled cluster, if there is one
//   compare    seconds relative to vanilla on the same workload
//
//   ThreadPool pool;
//   const Workload workload = read_workload({.path = "step.load.safetensors"}, pool);
//   const Evaluation e = evaluate(*find_policy("foremoe"), workload, {.planner = {.guest_slots = 2}}, {.pool = pool});
//   if (e.skipped.empty() && e.check.ok()) use(e.plan, e.figures.rho.mean);
//
// If the workload has fewer layers than the model, each workload layer represents the same number of model layers.

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/core/timeline.h"
#include "foremoe/evaluate/plan_choice.h"
#include "foremoe/evaluate/workload.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/policy/policy.h"
#include "foremoe/sim/simulation.h"

namespace foremoe {

struct EvaluateOptions {
  PlannerOptions planner = {};
  bool hidden_copies = false;  // sets max_copies_per_rank to what the links carry while a layer computes
  // With a cost model, policy foremoe plans as is best among these (plan_choice.h). Others plan as the options say.
  ChooseAmong choose = ChooseAmong::kDefault;
  int align = 128;    // tokens; rho_padded rounds each replica's tokens up to a multiple of this
  bool check = true;  // false: do not check the plans

  // Simulation.
  bool simulate = true;  // false: use the cost model only for hidden copies
  PathChoice path = PathChoice::kAuto;
  Rows rows = Rows::kOrder;            // which of a source's rows go to which replica; routes must be known
  int depth = kDefaultDepth;           // how many turns ahead copies may begin
  double rollout_seconds = 0;          // of the RL step, equal for all policies
  double rollout_tail_seconds = 0;     // the part of the rollout that placement overlaps
  int planners = 0;                    // processes that each plan some layers; 0: one per rank
  int planning_threads = 1;            // per planner
  double plan_gather_seconds = 0.04;   // to gather the parts of the plan; measured (lab/performance.md)
  double memory_budget_gigabytes = 0;  // per rank, 10⁹ bytes; 0: none

  std::optional<Bytes> memory_budget() const;
};

// The planner's options, with residency `auto` and `hidden` copies. Residency and prefer, if given, set `choose`.
std::vector<Option> planning_options_of(EvaluateOptions& options);
std::vector<Option> simulation_options_of(EvaluateOptions& options);

struct EvaluationContext {
  ThreadPool& pool;
  const CostModel* cost = nullptr;  // null: no simulation. Needs the workload's ranks per node
  Timeline* timeline = nullptr;     // receives the simulated step
  std::function<void(const std::string& what)> progress = {};  // called before each long part: "planning with eplb"
};

// Returns the context for the evaluation at `index` of `count`: its progress begins with "3 of 19, ".
EvaluationContext one_of(const EvaluationContext& context, std::size_t index, std::size_t count);

// Time per layer and pass of a trainer's own code, which the model omits. It explains the difference to a published
// step of Megatron-LM; other published steps differ by 0 to 0.5 ms (lab/measured/published.csv).
inline constexpr double kFrameworkSeconds = 1.5e-3;

struct Evaluation {
  std::string policy;
  std::string skipped;  // why the policy has no plan for this workload; empty: it has one, and the rest is valid

  StepPlan plan;                           // of the policy update; of recompute too unless recompute_plan is set
  std::optional<StepPlan> recompute_plan;  // set if the policy update has more than one micro-step in flight
  PlanTimes times;
  std::optional<PlanChoice> choice;  // set if this plan was chosen among several; then it may be vanilla's
  // Measured seconds from the start of planning until the first micro-step can begin, without trials, which are made
  // once per run. Set with a cost model. 0 for a policy that does not plan ahead.
  double placement_seconds = 0;
  double whole_placement_seconds = 0;  // until all micro-steps are placed; charged as measured_plan.h says
  int planners = 1;
  int threads = 1;
  PlanFigures figures;
  CheckReport check;  // of both plans

  std::optional<SimulatedStep> step;  // set with a cost model if the plans are valid
  double speedup_over_vanilla = 1;
  // Of vanilla over vanilla with contiguous homes, equal for all policies: the part of the gain that is due to homes.
  // Set by evaluate_all() with a simulated step and homes that are not contiguous.
  std::optional<double> homes_speedup;
  double placed_speedup = 1;  // with placement included; vanilla has none
  // The step, and its speedup over vanilla, with kFrameworkSeconds per layer and pass. Set by evaluate_all() with a
  // simulated step whose cost model has no other seconds.
  std::optional<double> framework_step_seconds;
  double framework_speedup = 1;
  double rl_step_speedup = 1;                        // with rollout included
  std::optional<Tokens> largest_micro_batch_tokens;  // mean per rank; set with a memory budget

  bool planned() const { return skipped.empty(); }
  const StepPlan& plan_of(Phase phase) const;
  // CPU time of planning one layer of one micro-step, in µs, without the work done once per step.
  double us_per_layer_micro_step() const;
  double fraction_of_ideal() const;  // needs a simulated step
};

// Throws InputError for invalid options and for a cost model that does not fit the workload.
Evaluation evaluate(const Policy& policy, const Workload& workload, const EvaluateOptions& options,
                    const EvaluationContext& context);

// Chooses the plan of policy foremoe for this workload among those that options.choose names (plan_choice.h). Needs a
// cost model.
PlanChoice choose_plan(const Workload& workload, const EvaluateOptions& options, const EvaluationContext& context);

// Evaluates the policies in order and fills in speedups over vanilla, which is always evaluated. The timeline, if any,
// shows the last policy that has a plan.
std::vector<Evaluation> evaluate_all(std::span<const Policy* const> policies, const Workload& workload,
                                     const EvaluateOptions& options, const EvaluationContext& context);

// Throws InputError, field `residency`, unless the plan has the residency `asked` (if set).
void expect_residency(const Evaluation& evaluation, std::optional<Residency> asked);

// Fills in the speedups if both have a simulated step.
void compare_with(const Evaluation& vanilla, Evaluation& evaluation);

// before ÷ after; 1 if `after_seconds` is 0.
double speedup(double before_seconds, double after_seconds);

// Options to check a plan for this workload. Refers to the workload and the figures.
CheckOptions check_options(const Workload& workload, const PlanFigures* reported = nullptr, int align = 128);

// Returns the planner's options with the price of copies that cost model and load imply, unless they have one or prefer
// does not need it, and with hidden_copies resolved to the number of copies that a rank can receive while one
// layer of a mean micro-step computes. The copies come from its host and, on a single node, also from peers. On a
// single node, the same number limits the copies that a home sends. Throws InputError without a cost model.
PlannerOptions planner_options(const EvaluateOptions& options, const LoadTable& load, const CostModel* cost);

}  // namespace foremoe
