#pragma once

// Executes a whole phase with ranks as threads, from random routes and a real plan to results, and computes the float64
// reference. Tests in this folder share this code. They need planner and runtime, which do not depend on each other.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "foremoe/planner/planner.h"
#include "foremoe/reference/reference_model.h"
#include "foremoe/runtime/moe_model.h"
#include "foremoe/runtime/replay_routes.h"

namespace foremoe::test {

struct Scenario {
  std::uint64_t seed = 1;
  Topology topology{.num_ranks = 4, .ranks_per_node = 2};
  int layers = 2;
  int micro_steps = 3;
  int experts = 8;
  int top_k = 2;
  int most_tokens = 14;   // largest number of tokens of a source in a micro-step; the smallest is 0
  double missing = 0.15;  // fraction of rows without a route
  int hidden = 12;
  int intermediate = 8;

  std::string policy = "foremoe";  // vanilla: no guests, regardless of guest_slots
  Residency residency = Residency::kResident;
  Phase phase = Phase::kPolicyUpdate;
  int in_flight = 1;
  int guest_slots = 2;

  PathChoice path = PathChoice::kAuto;
  int depth = kDefaultDepth;
  bool overlap = true;
  bool position_independent = false;
  EngineOptions engine;
  LinkDecorator decorate;

  std::string name() const;
};

// Random routes, [micro_step][source][layer], that differ between micro-steps, so that plans contain copies.
class RandomRoutes : public ReplayRoutes {
 public:
  explicit RandomRoutes(const Scenario& scenario);
  int top_k() const override { return top_k_; }
  std::int64_t num_tokens(MicroStepId m, RankId source) const override;
  void gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const override;
  LoadTable load() const;

 private:
  Topology topology_;
  int top_k_;
  int experts_;
  Array<std::vector<ExpertId>, 3> routes_;
};

struct RankResult {
  std::vector<std::vector<float>> output;           // [micro_step]
  std::vector<std::vector<float>> input_gradient;   // [micro_step]
  Array<std::vector<float>, 2> expert_gradient;     // [layer][expert]; empty if the home is another rank
  std::vector<std::vector<float>> router_gradient;  // [layer], from this rank's tokens
  Array<std::vector<ExpertId>, 2> routes_used;      // [micro_step][layer]
  double loss = 0;
  PhaseFigures figures;
};

struct Execution {
  StepPlan plan;
  std::shared_ptr<const TransferSchedule> schedule;
  std::vector<RankResult> ranks;
};

StepPlan make_plan(const Scenario& scenario, const LoadTable& load);
ModelSize model_size(const Scenario& scenario);
Execution execute(const Scenario& scenario);

ReferenceResult reference_of(const Scenario& scenario, const Execution& execution);

// The largest relative error of a tensor with respect to the reference.
double largest_error(const Execution& execution, const ReferenceResult& reference, const Scenario& scenario);

void expect_same_bits(const Execution& a, const Execution& b, const std::string& what);

}  // namespace foremoe::test
