#pragma once

// The same model in float64 on one rank without any plan, kernels or communication of ours: what every run is held
// against. Shares with the runtime only what the seed says (draw) and the routes that were used.

#include <functional>
#include <span>
#include <vector>

#include "foremoe/core/parallel.h"
#include "foremoe/runtime/moe_model.h"

namespace foremoe {

struct ReferenceStep {
  int micro_steps = 0;
  int ranks = 0;
  // [token·k + j] of (micro-step, source, layer), kUnassigned (or any negative) where there is none.
  std::function<std::vector<ExpertId>(MicroStepId, RankId, LayerId)> routes;
  bool backward = false;
};

struct ReferenceResult {
  Array<std::vector<double>, 2> output;              // [micro_step][rank] → [tokens][hidden]
  Array<std::vector<double>, 2> input_gradient;      // likewise; empty without backward
  Array<std::vector<double>, 2> expert_gradient;     // [layer][expert] → gate_up, then down
  std::vector<std::vector<double>> router_gradient;  // [layer] → [experts][hidden], of all tokens
  double loss = 0;                                   // 0 without backward
};

class ReferenceModel {
 public:
  explicit ReferenceModel(const ModelSize& size);  // weights as drawn, rounded to float32
  // Micro-step by micro-step and source by source: activations of one of them are alive at a time.
  ReferenceResult run(const ReferenceStep& step, ThreadPool& pool) const;
  void optimize(const ReferenceResult& gradients, const Optimizer& optimizer);  // in float64, as Device defines it

 private:
  class SourcePass;  // forward and backward of one source in one micro-step
  void optimize(std::span<double> weights, std::span<const double> gradient, std::size_t moments,
                const Optimizer& optimizer);

  ModelSize size_;
  Array<std::vector<double>, 2> expert_;     // [layer][expert] → gate_up, then down
  std::vector<std::vector<double>> router_;  // [layer] → [experts][hidden]
  std::vector<std::vector<double>> mean_,
      square_;  // Adam's, [layer·(experts + 1) + expert], routers last; none before its first step
  int steps_ = 0;
};

// ‖x − reference‖∞ ÷ ‖reference‖∞; where the reference is 0 everywhere: 0 if x is, else infinity. Infinity also when
// the sizes differ or x holds what is not a number.
double relative_error(std::span<const float> x, std::span<const double> reference);

}  // namespace foremoe
