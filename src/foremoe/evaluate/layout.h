#pragma once

// Chooses the expert-parallel size and the number of pipeline stages of a job by the modelled seconds of a step.
//
// Every layout runs the same tokens in micro-steps of the same size. N ranks in S stages are N ÷ S data-parallel ranks,
// each with S times as many micro-steps (in_more_micro_steps() in load_table.h). Stages are outermost: the ranks of a
// stage are consecutive, and so are those of an expert-parallel group within it.
//
// Pipeline. Stages differ by at most one MoE layer (stage_of() in model_shape.h). The schedule is 1F1B without
//   virtual stages (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473, §2.2): a phase of m micro-steps
//   takes m + S − 1 times the slowest stage's mean micro-step. Each pass of a micro-step also waits for one transfer of
//   activations or their gradients between stages. Stage s has min(S − s, m) micro-steps in flight, which its memory
//   and its plan account for. Planning (estimated), arenas, the optimizer and data parallelism count once per step. The
//   slowest group determines the step. If the input has fewer layers than the model, all stages see the same input
//   layers. Then a stage is not simulated if an earlier one has at least as many layers of each kind: that one has more
//   micro-steps in flight, and takes no less time.
// Search. Every layout is simulated without a plan. Then layouts are planned in ascending order of a lower bound of any
//   plan: every rank at the mean load, without copies and exchanges. A layout is not planned if the bound is no less
//   than the best found, or if its weights and optimizer state alone exceed the memory. Guest slots and
//   residency (if not given), with prefer time, are ranked on the group and stage that is slowest without a plan; the
//   first that fits on all is used. The plans of the recommended layout are checked.
// Not modelled: tensor and context parallelism, virtual stages, and the reduction of gradients outside the
//   experts.

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/evaluate/evaluate.h"

namespace foremoe {

struct JobLayout {
  int ep = 1;      // ranks of an expert-parallel group
  int stages = 1;  // of the pipeline
  int groups = 1;  // expert-parallel groups of a stage: ranks ÷ (ep · stages)
};

// All layouts of these ranks, by stages, then by ep. A group is within a node or consists of whole nodes. `ep` divides
// the model's experts; a stage has at least one MoE layer. Throws InputError, field `gpus`, unless the ranks fill their
// nodes.
std::vector<JobLayout> layouts_of(const Topology& ranks, const ModelShape& model);

struct LayoutStep {
  double seconds = 0;
  Bytes memory;  // of the rank with the most
};

struct PlannedLayout {
  LayoutStep step;
  PlannerOptions planner;  // guest_slots, residency and prefer
};

struct LayoutResult {
  JobLayout layout;
  int micro_steps = 0;  // of a rank
  LayoutStep unplanned;
  double balanced_seconds = 0;  // with every rank at the mean load, without copies and exchanges: no plan is faster
  std::optional<PlannedLayout> planned;
  std::string not_planned;  // why; empty if it is planned
};

struct LayoutChoice {
  Bytes limit;         // the memory budget; without one, the device's memory
  Tokens mean_tokens;  // of a rank and micro-step, the same in all layouts
  std::vector<LayoutResult> layouts;
  std::optional<std::size_t> best;       // the fastest that fits, planned or not; set by choose_layout()
  bool planned = false;                  // the best one is planned
  std::optional<std::size_t> unplanned;  // the fastest that fits without a plan

  const LayoutResult& best_layout() const { return layouts[*best]; }
  const LayoutStep& best_step() const;
  bool fits(const LayoutStep& step) const { return step.memory <= limit; }
};

// whole: the load of all ranks, with their tokens if known. context.cost: of the whole model. Throws InputError if no
// layout fits.
LayoutChoice choose_layout(const Workload& whole, const EvaluateOptions& options, const EvaluationContext& context);

std::string describe(const JobLayout& layout);  // "EP 8 with 2 stages"

}  // namespace foremoe
