#pragma once

// Compares a run with the reference: every tensor of the first step, and the loss of every step.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/reference/reference_model.h"
#include "foremoe/runtime/rank_run.h"

namespace foremoe {

// A tensor is correct if its error is within kMaxRelativeError of the reference's largest element. In tensors of a few
// elements, the terms of all elements may nearly cancel, and float32 has too few digits for this bound. Every element
// must then be within its rounding error (reference_expert.h, tensor_error.h).
inline constexpr double kMaxRelativeError = 1e-5;
inline constexpr double kMaxLossError = 1e-4;  // relative error of a step's loss; checked for SGD

struct Agreement {
  double max_relative_error = 0;  // maximum over tensors of the first step; see relative_error()
  bool within_rounding = true;    // rounding explains every error above kMaxRelativeError
  std::string worst;              // tensor with the largest error, preferably one that rounding does not explain:
                                  // "output of micro-step 3, rank 1"
  double max_loss_error = 0;      // maximum relative error over steps
  bool routes_replayed = true;    // the run used every recorded route

  bool tensors_equal() const { return max_relative_error <= kMaxRelativeError || within_rounding; }
  bool equal(Optimizer::Kind optimizer) const;  // Adam's later losses are reported but not checked
};

// Compares runs with the reference, at rank 0. Caches the last reference: most policies use the same routes.
class ReferenceRuns {
 public:
  // `backward`: also compute gradients for phases without backward, so that one reference serves both kinds of phase.
  ReferenceRuns(const ModelSize& model, const Optimizer& optimizer, bool backward)
      : model_(model), optimizer_(optimizer), backward_(backward) {}

  Agreement compare(const PhaseOutcome& outcome, const ReplayRoutes& recorded, ThreadPool& pool);

 private:
  ReferenceStep step(const RoutesUsed& routes) const;
  void compute(const PhaseOutcome& outcome, int steps, ThreadPool& pool);
  void judge_rounding(const PhaseOutcome& outcome, Agreement& agreement, ThreadPool& pool);

  ModelSize model_;
  Optimizer optimizer_;
  bool backward_ = false;
  std::string key_;             // hash of the routes of `first_` and `losses_`
  ReferenceResult first_;       // first step; includes variances after the first request
  std::vector<double> losses_;  // [step]
};

}  // namespace foremoe
