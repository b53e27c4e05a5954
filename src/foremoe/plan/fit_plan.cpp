#include "foremoe/plan/fit_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

void expect_fit(const StepPlan& plan, const LoadTable& load) {
  const auto expect = [](const char* what, int of_plan, int of_load) {
    if (of_plan != of_load) {
      throw InputError({.field = "plan"}, fmt::format("has {} {}, the load has {}", of_plan, what, of_load));
    }
  };
  expect("micro-steps", plan.num_micro_steps(), load.num_micro_steps());
  expect("layers", plan.num_layers(), load.num_layers());
  expect("ranks", plan.num_ranks(), load.num_ranks());
  expect("experts", plan.num_experts(), load.num_experts());
  expect_valid(plan, load);
  if (plan.residency == Residency::kFree) {
    throw InputError({.field = "plan"}, "has residency free: its experts have no homes that could serve other routes");
  }
}

struct Workspace {
  std::vector<std::int64_t> rows;     // [expert], of the load
  std::vector<std::int64_t> planned;  // [expert]
  std::vector<std::int64_t> left;     // [expert], rows left for its home
  std::vector<std::size_t> home;      // [expert], index of its home slot among all slots

  explicit Workspace(std::size_t experts) : rows(experts), planned(experts), left(experts), home(experts) {}
};

// Fits one layer of one event. Returns the number of rows above the planned rows of their expert.
std::int64_t fit_layer(StepPlan& plan, EventId t, LayerId l, Workspace& ws) {
  const std::span<const ExpertId> slots = std::as_const(plan).slot_expert[t][l].flat();  // [rank][slot]
  const std::span<Tokens> tokens = plan.slot_tokens[t][l].flat();
  std::ranges::fill(ws.planned, 0);
  for (std::size_t s = 0; s < slots.size(); ++s) {
    if (slots[s] != kNoExpert) ws.planned[slots[s].index()] += tokens[s].value;
  }
  ws.left = ws.rows;
  for (std::size_t s = 0; s < slots.size(); ++s) {
    if (slots[s] == kNoExpert) continue;
    const std::size_t e = slots[s].index();
    if (plan.home(l, e) == RankId{s / static_cast<std::size_t>(plan.num_slots())}) {
      ws.home[e] = s;
      continue;
    }
    if (ws.rows[e] < ws.planned[e]) tokens[s].value = tokens[s].value * ws.rows[e] / ws.planned[e];
    ws.left[e] -= tokens[s].value;
  }
  std::int64_t mismatched = 0;
  for (std::size_t e = 0; e < ws.rows.size(); ++e) {
    tokens[ws.home[e]] = Tokens{ws.left[e]};
    mismatched += std::max<std::int64_t>(0, ws.rows[e] - ws.planned[e]);
  }
  return mismatched;
}

}  // namespace

FittedPlan fit_plan(StepPlan plan, const LoadTable& load) {
  expect_fit(plan, load);
  FittedPlan fitted;
  Workspace ws(static_cast<std::size_t>(plan.num_experts()));
  std::vector<bool> counted(static_cast<std::size_t>(plan.num_micro_steps()), false);
  for (int t = 0; t < plan.num_events(); ++t) {
    const MicroStepId m = plan.event_micro_step[static_cast<std::size_t>(t)];
    for (int l = 0; l < plan.num_layers(); ++l) {
      load.expert_loads(m, LayerId{l}, ws.rows);
      const std::int64_t mismatched = fit_layer(plan, EventId{t}, LayerId{l}, ws);
      if (!counted[m.index()]) fitted.mismatched += mismatched;
    }
    counted[m.index()] = true;
  }
  plan.max_load = {};
  plan.lower_bound = {};
  plan.load_digest = load_digest(load);
  fitted.plan = std::move(plan);
  return fitted;
}

}  // namespace foremoe
