#include <cmath>

#include "foremoe/core/array.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/synthesis/draw.h"
#include "foremoe/rollout/synthesis/token_router.h"

namespace foremoe {

namespace {

constexpr double kSequencePart = 0.3;  // of the group's spread: samples of one prompt are much alike

class GrpoRouter : public TokenRouter {
 public:
  GrpoRouter(const SynthesisOptions& options, const GrpoRouting& grpo)
      : options_(options),
        grpo_(grpo),
        base_({static_cast<std::size_t>(options.num_layers), static_cast<std::size_t>(options.num_experts)}) {
    for (int l = 0; l < options.num_layers; ++l) {
      Random random = stream_of(options.seed, Purpose::kBase, static_cast<std::uint64_t>(l));
      for (double& exponent : base_.row(l)) exponent = grpo.step_spread * random.normal();
    }
  }

  void weigh(const SyntheticSequence& sequence, LayerId layer, std::span<double> weight) const override {
    const auto base = base_.row(layer);
    Random topic = stream_of(options_.seed, Purpose::kTopic, static_cast<std::uint64_t>(sequence.group), layer.index());
    Random own =
        stream_of(options_.seed, Purpose::kSequence, static_cast<std::uint64_t>(sequence.index), layer.index());
    for (std::size_t e = 0; e < weight.size(); ++e) {
      weight[e] = std::exp(base[e] + grpo_.group_spread * (topic.normal() + kSequencePart * own.normal()));
    }
  }

 private:
  const SynthesisOptions& options_;
  GrpoRouting grpo_;
  Array<double, 2> base_;  // [layer][expert], exponents
};

}  // namespace

std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const GrpoRouting& grpo) {
  if (!(grpo.step_spread >= 0 && grpo.step_spread <= 20))
    throw InputError({.field = "step_spread"}, "should be in [0, 20]");
  if (!(grpo.group_spread >= 0 && grpo.group_spread <= 20))
    throw InputError({.field = "group_spread"}, "should be in [0, 20]");
  return std::make_unique<GrpoRouter>(options, grpo);
}

}  // namespace foremoe
