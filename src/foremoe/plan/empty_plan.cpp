#include "foremoe/plan/empty_plan.h"

#include <array>
#include <utility>

namespace foremoe {

StepPlan empty_plan(StepPlan header, const LoadTable& load) {
  const auto& [micro_steps, layers, ranks, experts] = load.load.shape();
  const std::size_t slots = experts / ranks + static_cast<std::size_t>(header.guest_slots);
  ExecutionOrder order = make_execution_order(load.num_micro_steps(), header.in_flight);
  const std::array<std::size_t, 4> shape = {order.micro_step.size(), layers, ranks, slots};
  StepPlan plan = std::move(header);
  plan.ranks_per_node = load.ranks_per_node;
  plan.load_digest = load_digest(load);
  plan.slot_expert = Array<ExpertId, 4>(shape, kNoExpert);
  plan.slot_tokens = Array<Tokens, 4>(shape);
  plan.event_micro_step = std::move(order.micro_step);
  plan.event_pass = std::move(order.pass);
  plan.home = Array<RankId, 2>({layers, experts});
  plan.max_load = Array<Tokens, 2>({micro_steps, layers});
  plan.lower_bound = Array<Tokens, 2>({micro_steps, layers});
  return plan;
}

}  // namespace foremoe
