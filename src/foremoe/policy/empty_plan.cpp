#include "foremoe/policy/empty_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"

namespace foremoe {

void check_policy_input(const PolicyInput& input) {
  if (input.options.guest_slots < 0) throw InputError({.field = "--guest-slots"}, "must not be negative");
  if (input.options.in_flight < 1) throw InputError({.field = "--in-flight"}, "must be at least 1");
  if (input.home.extent(0) != static_cast<std::size_t>(input.load.num_layers()) ||
      input.home.extent(1) != static_cast<std::size_t>(input.load.num_experts())) {
    throw InputError({.field = "--homes"}, "must give a rank for every layer and expert of the load");
  }
}

StepPlan empty_plan(std::string_view policy, Residency residency, const PolicyInput& input) {
  const LoadTable& load = input.load;
  const int guest_slots = input.options.guest_slots;
  const int in_flight = input.options.in_flight;
  const ExecutionOrder order = make_execution_order(load.num_micro_steps(), in_flight);
  const std::size_t num_slots = load.load.extent(3) / load.load.extent(2) + static_cast<std::size_t>(guest_slots);
  const nlohmann::ordered_json options = {
      {"guest-slots", guest_slots}, {"residency", to_string(residency)}, {"in-flight", in_flight}};
  StepPlan plan;
  plan.policy = policy;
  plan.residency = residency;
  plan.guest_slots = guest_slots;
  plan.in_flight = in_flight;
  plan.ranks_per_node = load.ranks_per_node;
  plan.options = options.dump();
  plan.load_digest = load_digest(load);
  plan.slot_expert =
      Array<ExpertId, 4>({order.micro_step.size(), load.load.extent(1), load.load.extent(2), num_slots}, kNoExpert);
  plan.slot_tokens = Array<Tokens, 4>(plan.slot_expert.shape());
  plan.event_micro_step = order.micro_step;
  plan.event_pass = order.pass;
  plan.home = Array<RankId, 2>(input.home.shape());
  std::ranges::copy(input.home.flat(), plan.home.flat().begin());
  plan.max_load = Array<Tokens, 2>({load.load.extent(0), load.load.extent(1)});
  plan.lower_bound = Array<Tokens, 2>(plan.max_load.shape());
  return plan;
}

}  // namespace foremoe
