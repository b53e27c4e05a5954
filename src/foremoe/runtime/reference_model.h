#pragma once

// The same model in float64 on one rank without any plan, kernels or communication of ours: what every run is held
// against. Shares with the runtime only what the seed says (draw) and the routes that were used.

#include <functional>
#include <vector>

#include "foremoe/core/parallel.h"
#include "foremoe/runtime/moe_model.h"

namespace foremoe {

struct ReferenceStep {
  int micro_steps = 0;
  int ranks = 0;
  // [token·k + j] of (micro-step, source, layer), kUnassigned where there is none.
  std::function<std::vector<ExpertId>(MicroStepId, RankId, LayerId)> routes;
  bool backward = false;
};

struct ReferenceResult {
  Array<std::vector<double>, 2> output;           // [micro_step][rank] → [tokens][hidden]
  Array<std::vector<double>, 2> input_gradient;   // likewise; empty without backward
  Array<std::vector<double>, 2> expert_gradient;  // [layer][expert] → gate_up, then down
  std::vector<std::vector<double>> router_gradient;  // [layer] → [experts][hidden], of all tokens
  double loss = 0;
};

class ReferenceModel {
 public:
  explicit ReferenceModel(const ModelSize& size);  // weights as drawn, rounded to float32
  ReferenceResult run(const ReferenceStep& step, ThreadPool& pool) const;
  void optimize(const ReferenceResult& gradients, const Optimizer& optimizer);  // in float64

 private:
  ModelSize size_;
  Array<std::vector<double>, 2> gate_up_, down_;  // [layer][expert]
  std::vector<std::vector<double>> router_;       // [layer]
  Array<std::vector<double>, 2> mean_, square_;   // Adam's, allocated at its first step
  int steps_ = 0;
};

// ‖x − reference‖∞ ÷ ‖reference‖∞; where the reference is 0 everywhere: 0 if x is, else infinity.
double relative_error(std::span<const float> x, std::span<const double> reference);

}  // namespace foremoe
