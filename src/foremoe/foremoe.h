#pragma once

// All that a program needs to plan a step: read loads and traces, plan, check, measure, write, schedule the copies.
// docs/users/library.md begins with the shortest such program. What executes plans (foremoe::runtime) is not in here.

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/evaluate/running_plan.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/plan_figures.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/plan/route_tokens.h"
#include "foremoe/planner/planner.h"
#include "foremoe/policy/policy.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/trace_file.h"
#include "foremoe/transfer/transfer_schedule.h"
