#pragma once

// foremoe.plan/1: a step's plan as a safetensors file (docs/users/formats.md).
//
//   slot_expert        [events, layers, ranks, slots]  I16 or I32; the expert in that slot, −1 when empty
//   slot_tokens        [events, layers, ranks, slots]  U32 or I64; its quota
//   event_micro_step   [events]                        I32
//   event_pass         [events]                        U8; 0 forward, 1 backward
//   home               [layers, experts]               I32
//   max_load           [micro_steps, layers]           I64; optional
//   lower_bound        [micro_steps, layers]           I64; optional
//   metadata: policy, residency, guest_slots, ranks_per_node, in_flight, options, load_digest, optional homes_digest
//
// read_plan() checks that shapes match, ids and quotas are in range, each rank has E/R homes, and events follow the
// execution order. check_plan() checks that the plan serves its load and respects its residency and its budgets.

#include <cstddef>
#include <string>
#include <vector>

#include "foremoe/core/safetensors.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

// Throw InputError, with file, field and index, if the file is not a plan.
StepPlan read_plan(const Safetensors& file);
StepPlan read_plan(const std::string& path);

// Throws InputError for file `path`, field `load_digest`, if the plan was made for another load.
void expect_plan_for(const LoadTable& load, const StepPlan& plan, const std::string& path);
StepPlan read_plan_for(const LoadTable& load, const std::string& path);

// Equal plans give equal bytes. Each tensor is stored in the narrowest of its types that can represent all values.
void write_plan(const StepPlan& plan, const std::string& path);
std::vector<std::byte> to_bytes(const StepPlan& plan);  // the contents of such a file

}  // namespace foremoe
