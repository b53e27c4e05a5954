#pragma once

// The same model in float64 on one rank without any plan, kernels or communication of ours: what every run is held
// against. Shares with the runtime only what the seed says (draw) and the routes that were used.

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
  // [token·k + j] of (micro-step, source, layer), kUnassigned (or any negative) where there is none.
  std::function<std::vector<ExpertId>(MicroStepId, RankId, LayerId)> routes;
  bool backward = false;
  bool variances = false;  // too; of the first step alone, whose weights are exact
};

struct ReferenceResult : RoundedTensors {
  double loss = 0;  // 0 without backward
};

class ReferenceModel {
 public:
  ReferenceModel(const ModelSize& size, ThreadPool& pool);  // weights as drawn, rounded to float32
  // Micro-step by micro-step and source by source: activations of one of them are alive at a time. The same bits
  // whatever the number of threads.
  ReferenceResult run(const ReferenceStep& step, ThreadPool& pool) const;
  // In float64, as cpu/optimizers.h defines it.
  void optimize(const ReferenceResult& gradients, const Optimizer& optimizer, ThreadPool& pool);

 private:
  void optimize(std::span<double> weights, std::span<const double> gradient, std::size_t moments,
                const Optimizer& optimizer);
  Array<double, 2> rows_of_experts(const ReferenceStep& step) const;  // [layer][expert]

  ModelSize size_;
  ReferenceWeights weights_;
  std::vector<std::vector<double>> mean_,
      square_;  // Adam's, [layer·(experts + 1) + expert], routers last; none before its first step
  int steps_ = 0;
};

}  // namespace foremoe
