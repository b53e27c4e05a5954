#include <algorithm>

#include "foremoe/core/array.h"
#include "foremoe/core/error.h"
#include "foremoe/rollout/synthesis/draw.h"
#include "foremoe/rollout/synthesis/token_router.h"

namespace foremoe {

namespace {

class DirichletRouter : public TokenRouter {
 public:
  DirichletRouter(const SynthesisOptions& options, const DirichletRouting& dirichlet)
      : options_(options),
        dirichlet_(dirichlet),
        base_({static_cast<std::size_t>(options.num_layers), static_cast<std::size_t>(options.num_experts)}) {
    for (int l = 0; l < options.num_layers; ++l) {
      Random random = stream_of(options.seed, Purpose::kBase, static_cast<std::uint64_t>(l));
      for (double& weight : base_.row(l)) weight = gamma(random, dirichlet.concentration);
      normalize(base_.row(l));
    }
  }

  void weigh(const SyntheticSequence& sequence, LayerId layer, std::span<double> weight) const override {
    const auto base = base_.row(layer);
    std::copy(base.begin(), base.end(), weight.begin());
    if (dirichlet_.sequence_concentration <= 0) return;
    Random random =
        stream_of(options_.seed, Purpose::kSequence, static_cast<std::uint64_t>(sequence.index), layer.index());
    for (double& w : weight) w = w > 0 ? gamma(random, dirichlet_.sequence_concentration * w) : 0;
  }

 private:
  const SynthesisOptions& options_;
  DirichletRouting dirichlet_;
  Array<double, 2> base_;  // [layer][expert], probabilities
};

}  // namespace

std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const DirichletRouting& dirichlet) {
  if (!(dirichlet.concentration > 0 && dirichlet.concentration <= 1e9)) {
    throw InputError({.field = "concentration"}, "should be in (0, 1e9]");
  }
  if (!(dirichlet.sequence_concentration >= 0 && dirichlet.sequence_concentration <= 1e9)) {
    throw InputError({.field = "sequence_concentration"}, "should be in [0, 1e9]");
  }
  return std::make_unique<DirichletRouter>(options, dirichlet);
}

}  // namespace foremoe
