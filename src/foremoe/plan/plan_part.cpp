#include "foremoe/plan/plan_part.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <vector>

namespace foremoe {

namespace {

Array<Tokens, 2> first_of(const Array<Tokens, 2>& figures, std::size_t micro_steps, std::size_t layers) {
  if (figures.empty()) return {};
  Array<Tokens, 2> first({micro_steps, layers});
  for (std::size_t m = 0; m < micro_steps; ++m) std::ranges::copy(figures.row(m).first(layers), first.row(m).begin());
  return first;
}

}  // namespace

StepPlan take_first(const StepPlan& plan, const LoadTable& part) {
  assert(part.num_layers() <= plan.num_layers() && part.num_micro_steps() <= plan.num_micro_steps());
  const auto layers = static_cast<std::size_t>(part.num_layers());
  const auto micro_steps = static_cast<std::size_t>(part.num_micro_steps());
  std::vector<std::size_t> events;
  for (std::size_t e = 0; e < plan.event_micro_step.size(); ++e) {
    if (plan.event_micro_step[e].index() < micro_steps) events.push_back(e);
  }
  StepPlan first = plan;
  first.load_digest = load_digest(part);
  const std::array<std::size_t, 4> shape = {events.size(), layers, plan.slot_expert.extent(2),
                                            plan.slot_expert.extent(3)};
  first.slot_expert = Array<ExpertId, 4>(shape);
  first.slot_tokens = Array<Tokens, 4>(shape);
  first.event_micro_step.clear();
  first.event_pass.clear();
  for (std::size_t e = 0; e < events.size(); ++e) {
    first.event_micro_step.push_back(plan.event_micro_step[events[e]]);
    first.event_pass.push_back(plan.event_pass[events[e]]);
    for (std::size_t l = 0; l < layers; ++l) {
      std::ranges::copy(plan.slot_expert[events[e]][l].flat(), first.slot_expert[e][l].flat().begin());
      std::ranges::copy(plan.slot_tokens[events[e]][l].flat(), first.slot_tokens[e][l].flat().begin());
    }
  }
  first.home = Array<RankId, 2>({layers, plan.home.extent(1)});
  std::ranges::copy(plan.home.flat().first(first.home.size()), first.home.flat().begin());
  first.max_load = first_of(plan.max_load, micro_steps, layers);
  first.lower_bound = first_of(plan.lower_bound, micro_steps, layers);
  return first;
}

}  // namespace foremoe
