#pragma once

// A run held against the reference: every tensor that it computed, and the loss of every step.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/reference/reference_model.h"
#include "foremoe/runtime/rank_run.h"

namespace foremoe {

// A tensor is right when it is within kMaxRelativeError of the reference, relative to the reference's greatest element.
// Where terms nearly cancel in every element, as they do in tensors of a few elements, float32 cannot keep so many
// digits; then each element must be within what rounding explains (reference_expert.h, tensor_error.h).
inline constexpr double kMaxRelativeError = 1e-5;
inline constexpr double kMaxLossError = 1e-4;  // of the loss of a step, relative; after SGD steps

struct Agreement {
  double max_relative_error = 0;  // of all tensors of the first step; see relative_error()
  bool within_rounding = true;    // rounding explains every tensor that is off by more than kMaxRelativeError
  std::string worst;              // the tensor that is off most, of those that rounding does not explain if there are
                                  // any: "output of micro-step 3, rank 1"
  double max_loss_error = 0;      // of all steps, relative
  bool routes_replayed = true;    // every recorded route was used as it was recorded

  bool tensors_equal() const { return max_relative_error <= kMaxRelativeError || within_rounding; }
  bool equal(Optimizer::Kind optimizer) const;  // Adam's later losses are reported, not judged
};

// Remembers the last reference: runs of several policies mostly use the same routes. At rank 0, after the run.
class ReferenceRuns {
 public:
  // Of phases without backward too when `backward`: one reference then serves both.
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
  std::string key_;             // of the routes that `first_` and `losses_` are for
  ReferenceResult first_;       // of the first step; with variances once they were asked for
  std::vector<double> losses_;  // [step]
};

}  // namespace foremoe
