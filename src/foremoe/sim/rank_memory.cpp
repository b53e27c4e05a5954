#include "foremoe/sim/rank_memory.h"

#include <algorithm>

#include "foremoe/sim/layer_scale.h"

namespace foremoe {

namespace {

// Activations of one rank.
class RankActivations {
 public:
  RankActivations(const MemoryProblem& problem, RankId rank) : problem_(problem), rank_(rank) {}

  Bytes most() {
    const StepPlan& plan = problem_.input.plan;
    Bytes kept;
    Bytes most;
    for (std::size_t t = 0; t < plan.event_micro_step.size(); ++t) {
      const MicroStepId m = plan.event_micro_step[t];
      const bool forward = plan.event_pass[t] == Pass::kForward;
      if (forward) kept += kept_by(m);
      most = std::max(most, kept + working(m));
      if (!forward || plan.in_flight == 1) kept -= kept_by(m);
    }
    return most;
  }

 private:
  bool backward() const { return problem_.options.phase == Phase::kPolicyUpdate; }

  Bytes kept_by(MicroStepId m) const {
    const CostModel& cost = problem_.input.cost;
    const std::int64_t of_tokens = problem_.profile.tokens(m, rank_).value * cost.activations_per_token().value;
    if (!backward()) return Bytes{of_tokens};
    const Bytes of_rows{problem_.profile.total_rows(m, rank_).value * cost.activations_per_row().value};
    return Bytes{of_tokens * cost.model().layers()} + scaled(of_rows, problem_.layer_scale);
  }

  Bytes working(MicroStepId m) const {
    const Pass direction = backward() ? Pass::kBackward : Pass::kForward;
    return Bytes{problem_.profile.most_rows(m, rank_).value *
                 problem_.input.cost.working_memory_per_row(direction).value};
  }

  const MemoryProblem& problem_;
  RankId rank_;
};

}  // namespace

RankMemory rank_memory(const MemoryProblem& problem) {
  const StepPlan& plan = problem.input.plan;
  const CostModel& cost = problem.input.cost;
  RankMemory memory{.state = cost.rank_state(plan.num_experts() / plan.num_ranks(), plan.num_ranks())};
  if (problem.any_copies) {
    const bool shared = plan.residency == Residency::kShared;
    const std::int64_t all_layers = std::int64_t{plan.guest_slots} * cost.model().moe_layers;
    const std::int64_t weights = shared ? std::int64_t{plan.guest_slots} * problem.options.depth : all_layers;
    const std::int64_t gradients = shared ? plan.guest_slots : all_layers;
    memory.guest_weights = Bytes{weights * cost.expert_weights().value};
    if (problem.options.phase == Phase::kPolicyUpdate) {
      memory.guest_gradients = Bytes{gradients * cost.expert_gradient().value};
    }
  }
  for (int r = 0; r < plan.num_ranks(); ++r) {
    memory.activations = std::max(memory.activations, RankActivations(problem, RankId{r}).most());
  }
  return memory;
}

}  // namespace foremoe
