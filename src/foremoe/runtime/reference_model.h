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
  bool variances = false;  // too; of the first step alone, whose weights are exact
};

struct ReferenceTensors {
  Array<std::vector<double>, 2> output;              // [micro_step][rank] → [tokens][hidden]
  Array<std::vector<double>, 2> input_gradient;      // likewise; empty without backward
  Array<std::vector<double>, 2> expert_gradient;     // [layer][expert] → gate_up, then down
  std::vector<std::vector<double>> router_gradient;  // [layer] → [experts][hidden], of all tokens
};

struct ReferenceResult : ReferenceTensors {
  double loss = 0;            // 0 without backward
  ReferenceTensors variance;  // of rounding in float32, see reference_expert.h; empty unless asked for
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
  class SourcePass;  // forward and backward of one source in one micro-step
  void optimize(std::span<double> weights, std::span<const double> gradient, std::size_t moments,
                const Optimizer& optimizer);
  Array<double, 2> rows_of_experts(const ReferenceStep& step) const;  // [layer][expert]

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

// The greatest |x − reference| ÷ standard deviation of its rounding. Where nothing can have been rounded: 0 if x is the
// reference, else infinity. Infinity also as above.
double deviations(std::span<const float> x, std::span<const double> reference, std::span<const double> variance);

// What deviations() is below for n right values: a Gaussian exceeds it anywhere among them with a probability below
// 1 ÷ n, and no rounding is as wild as that, its greatest error counting as the standard deviation.
double most_deviations(std::size_t n);

}  // namespace foremoe
