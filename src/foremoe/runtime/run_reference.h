#pragma once

// A run held against the reference: every tensor that it computed, and the loss of every step.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/runtime/rank_run.h"
#include "foremoe/runtime/reference_model.h"

namespace foremoe {

inline constexpr double kMaxRelativeError = 1e-5;  // of a tensor in float32
inline constexpr double kMaxLossError = 1e-4;      // of the loss of a step, relative; after SGD steps

struct Agreement {
  double max_relative_error = 0;  // of all tensors of the first step; see relative_error()
  std::string worst;              // the tensor that has it: "output of micro-step 3, rank 1"
  double max_loss_error = 0;      // of all steps, relative
  bool routes_replayed = true;    // every recorded route was used as it was recorded

  bool equal(Optimizer::Kind optimizer) const;  // Adam's later losses are told, not judged
};

// Remembers the last reference: runs of several policies mostly use the same routes. At rank 0, after the run.
class ReferenceRuns {
 public:
  // Of phases without backward too when `backward`: one reference then serves both.
  ReferenceRuns(const ModelSize& model, const Optimizer& optimizer, bool backward)
      : model_(model), optimizer_(optimizer), backward_(backward) {}

  Agreement compare(const PhaseOutcome& outcome, const ReplayRoutes& recorded, ThreadPool& pool);

 private:
  void compute(const PhaseOutcome& outcome, int steps, ThreadPool& pool);

  ModelSize model_;
  Optimizer optimizer_;
  bool backward_ = false;
  std::string key_;             // of the routes that `first_` and `losses_` are for
  ReferenceResult first_;       // of the first step
  std::vector<double> losses_;  // [step]
};

}  // namespace foremoe
