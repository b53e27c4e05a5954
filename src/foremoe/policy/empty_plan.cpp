#include "foremoe/policy/empty_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/plan/empty_plan.h"

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
  const int guest_slots = input.options.guest_slots;
  const int in_flight = input.options.in_flight;
  const nlohmann::ordered_json options = {
      {"guest-slots", guest_slots}, {"residency", to_string(residency)}, {"in-flight", in_flight}};
  StepPlan plan = empty_plan({.policy = std::string(policy),
                              .residency = residency,
                              .guest_slots = guest_slots,
                              .in_flight = in_flight,
                              .options = options.dump()},
                             input.load);
  std::ranges::copy(input.home.flat(), plan.home.flat().begin());
  return plan;
}

}  // namespace foremoe
