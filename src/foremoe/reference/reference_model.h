#pragma once

// Reference for all runs: computes the same model in float64 on one rank. Uses no plan, no communication and none of
// the runtime's kernels. Shares with the runtime only the drawn tensors (draw) and the routes that were used.

#include <functional>
#include <span>
#include <vector>

#include "foremoe/core/parallel.h"
#include "foremoe/reference/reference_pass.h"
#include "foremoe/runtime/moe_model.h"

namespace foremoe {

struct ReferenceStep {
  int micro_steps = 0;
  int ranks = 0;
  // Returns [token·k + j] of (micro-step, source, layer); kUnassigned (or any negative id) marks missing experts.
  std::function<std::vector<ExpertId>(MicroStepId, RankId, LayerId)> routes;
  bool backward = false;
  bool variances = false;  // compute variances; valid only for the first step, whose weights are exact
};

struct ReferenceResult : RoundedTensors {
  double loss = 0;  // 0 without backward
};

class ReferenceModel {
 public:
  ReferenceModel(const ModelSize& size, ThreadPool& pool);  // drawn weights, rounded to float32
  // Runs one source of one micro-step at a time, which limits the memory for activations. Results are bitwise
  // independent of the number of threads.
  ReferenceResult run(const ReferenceStep& step, ThreadPool& pool) const;
  // Applies the update of cpu/optimizers.h in float64.
  void optimize(const ReferenceResult& gradients, const Optimizer& optimizer, ThreadPool& pool);

 private:
  void optimize(std::span<double> weights, std::span<const double> gradient, std::size_t moments,
                const Optimizer& optimizer);
  Array<double, 2> rows_of_experts(const ReferenceStep& step) const;  // [layer][expert]

  ModelSize size_;
  ReferenceWeights weights_;
  // Adam's moments, [layer·(experts + 1) + expert], routers last; empty before the first step.
  std::vector<std::vector<double>> mean_, square_;
  int steps_ = 0;
};

}  // namespace foremoe
