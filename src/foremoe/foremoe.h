#pragma once

// Headers for programs that plan steps: read loads and traces, plan, check, measure, write, and schedule copies.
// docs/users/library.md begins with the shortest such program. Excludes foremoe::runtime, which executes plans.

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/evaluate/running_plan.h"
#include "foremoe/homes/choose_homes.h"
#include "foremoe/plan/assign_rows.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/homes_file.h"
#include "foremoe/plan/plan_figures.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/plan/route_tokens.h"
#include "foremoe/planner/planner.h"
#include "foremoe/policy/policy.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/packing.h"
#include "foremoe/rollout/trace_file.h"
#include "foremoe/transfer/transfer_schedule.h"
