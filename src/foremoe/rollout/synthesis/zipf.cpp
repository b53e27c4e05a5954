#include <cmath>

#include "foremoe/core/error.h"
#include "foremoe/rollout/synthesis/draw.h"
#include "foremoe/rollout/synthesis/token_router.h"

namespace foremoe {

namespace {

class ZipfRouter : public TokenRouter {
 public:
  ZipfRouter(const SynthesisOptions& options, const ZipfRouting& zipf) : options_(options) {
    for (int i = 1; i <= options.num_experts; ++i) by_place_.push_back(std::pow(i, -zipf.skew));
    Random random = stream_of(options.seed, Purpose::kChange);
    std::uint64_t order = 0;
    for (int m = 0; m < options.num_micro_steps; ++m) {
      if (m > 0 && random.uniform() < zipf.permute_probability) ++order;
      order_of_.push_back(order);
    }
  }

  void weigh(const SyntheticSequence& sequence, LayerId layer, std::span<double> weight) const override {
    Random random = stream_of(options_.seed, Purpose::kOrder, layer.index(), order_of_[sequence.micro_step.index()]);
    const auto expert_at = permutation(random, weight.size());
    for (std::size_t i = 0; i < weight.size(); ++i) weight[static_cast<std::size_t>(expert_at[i])] = by_place_[i];
  }

 private:
  const SynthesisOptions& options_;
  std::vector<double> by_place_;         // [place in the order of popularity]
  std::vector<std::uint64_t> order_of_;  // [micro_step] which of the drawn orders holds
};

}  // namespace

std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const ZipfRouting& zipf) {
  if (!(zipf.skew >= 0 && zipf.skew <= 100)) throw InputError({.field = "skew"}, "should be in [0, 100]");
  if (!(zipf.permute_probability >= 0 && zipf.permute_probability <= 1)) {
    throw InputError({.field = "permute_probability"}, "should be in [0, 1]");
  }
  return std::make_unique<ZipfRouter>(options, zipf);
}

}  // namespace foremoe
