#pragma once

// Interface of routing models: how the tokens of one sequence choose experts.

#include <cstdint>
#include <memory>
#include <span>

#include "foremoe/core/ids.h"
#include "foremoe/rollout/synthesis/synthesis.h"

namespace foremoe {

struct SyntheticSequence {
  MicroStepId micro_step;
  RankId rank;
  std::int32_t index = 0;  // index in the step
  std::int32_t group = 0;
  std::int64_t tokens = 0;
};

class TokenRouter {
 public:
  virtual ~TokenRouter() = default;

  // Sets the unnormalised weights, [expert], for the tokens of a sequence in a layer. Pure function.
  virtual void weigh(const SyntheticSequence& sequence, LayerId layer, std::span<double> weight) const = 0;

  // Number of tokens of a rank in a micro-step.
  virtual std::int64_t tokens_of(MicroStepId, RankId, std::int64_t tokens_per_rank) const { return tokens_per_rank; }

  // If true, counts are rounded shares, not draws, and weights are equal for all sequences of a micro-step.
  virtual bool is_deterministic() const { return false; }
};

// Routers keep a reference to the options (routing_models.cpp, stress.cpp).
std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const ZipfRouting& zipf);
std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const DirichletRouting& dirichlet);
std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const GrpoRouting& grpo);
std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, StressWorkload workload);

}  // namespace foremoe
