#pragma once

// The smallest capacities with which trainers drop no row of a load.
//
// Trainers size buffers of the expert-parallel exchange before they know the routes. Rows beyond a buffer are dropped,
// or end the run. A load or a plan determines the rows of every rank, and thus the capacity. Each rule below was read
// in the project's source. `own` is the number of token–expert assignments of a rank's own tokens, tokens · top-k.
//
//   Megatron-LM, moe_expert_capacity_factor
//     ⌈own ÷ experts · factor⌉ rows of each source rank and expert (router.py, and get_capacity in moe_utils.py,
//     0.19.2). The router drops rows before the dispatch, so this capacity is the same for every plan. min_capacity is
//     not used.
//   Megatron-LM, moe_expert_rank_capacity_factor
//     int(own · factor), rounded up to 256, rows of each rank (setup_metadata of _HybridEPManager in
//     token_dispatcher.py). From 0.20 (main, d98e8a6), each expert's rows are padded to a multiple of 256. 0.19.2 pads
//     them in FP8 and with NCCL-EP, but not with HybridEP in BF16. NCCL-EP rounds the rank's tokens up to 64, which
//     only adds room.
//   Megatron-LM, moe_paged_stash_buffer_size_factor_cuda, if positive
//     int(average · factor) rows in pages of 64 (allocate_stash_buffers in paged_stash.py, 0.19.2 and d98e8a6). A
//     tensor occupies whole pages. `average` is the largest sum of int(budget // rank capacity factor) over the layers
//     and micro-steps in flight, where budget is the rank's buffer above. The factor below suffices for any number of
//     saved tensors of one width. It assumes a load of the captured iteration's shape, no buffer in host memory, that
//     one pipeline stage has the load's layers, and a model without MTP layers, whose rows would be stashed too. A
//     layer whose backward comes next is not stashed (PipelinePostScheduleFunction): the last one, if the load has all
//     layers and one micro-step is in flight.
//   torchtitan, non_blocking_capacity_factor
//     int(tokens · ranks · min(experts of a rank, top-k) · factor) rows of each rank
//     (_num_permuted_tokens_for_non_blocking in torchtitan/distributed/deepep/hybridep.py, 0.2.2, b5bcd76), without
//     pad_multiple. A plan's guest slots count as experts of a rank.
//
// NeMo Automodel (0.5.0, 36044ad) accepts moe_expert_capacity_factor but computes no capacity from it: only rows of
// probability 0 are masked. The rule behind its mok.schedule_capacity_multiplier is in another project.

#include <optional>
#include <string>
#include <vector>

#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

struct Capacity {
  std::string trainer;             // "Megatron-LM 0.20"
  std::string option;              // "moe_expert_rank_capacity_factor"
  std::optional<double> smallest;  // none: rows reach a rank without tokens of its own, whose buffer is always empty
  // `smallest`, rounded up to four decimals: also sufficient, and exact in a configuration file.
  std::optional<double> rounded() const;
};

// Capacities for the plans of a step, which check_plan accepts for the load and which may be the same. The stash serves
// only the policy update. Vanilla's plan gives the capacities without planning.
// model_layers: MoE layers of the whole model, without MTP layers. A load that has them too has more layers than the
// model, which expect_model_fits() refuses.
std::vector<Capacity> capacities(const StepPlan& recompute, const StepPlan& policy_update, const LoadTable& load,
                                 int model_layers);

}  // namespace foremoe
