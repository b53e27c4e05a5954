#pragma once

// How the tokens of one sequence choose experts: what the routing models have in common.

#include <cstdint>
#include <memory>
#include <span>

#include "foremoe/core/ids.h"
#include "foremoe/rollout/synthesis/synthesis.h"

namespace foremoe {

struct SyntheticSequence {
  MicroStepId micro_step;
  RankId rank;
  std::int32_t index = 0;  // in the step
  std::int32_t group = 0;
  std::int64_t tokens = 0;
};

class TokenRouter {
 public:
  virtual ~TokenRouter() = default;

  // Weights of the experts for the sequence's tokens in a layer, not normalised. [expert]. A pure function.
  virtual void weigh(const SyntheticSequence& sequence, LayerId layer, std::span<double> weight) const = 0;

  // Tokens of a rank in a micro-step.
  virtual std::int64_t tokens_of(MicroStepId, RankId, std::int64_t tokens_per_rank) const { return tokens_per_rank; }

  // Counts are the rounded shares instead of draws. Weights are then those of the micro-step, for all its sequences.
  virtual bool without_chance() const { return false; }
};

// They keep a reference to the options (routing_models.cpp, stress.cpp).
std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const ZipfRouting& zipf);
std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const DirichletRouting& dirichlet);
std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const GrpoRouting& grpo);
std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, StressWorkload workload);

}  // namespace foremoe
