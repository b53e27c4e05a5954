// Routing models with random popularities: Zipf, Dirichlet and GRPO. synthesis.h has their formulas.

#include <algorithm>
#include <cmath>

#include "foremoe/core/array.h"
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
  std::vector<double> by_place_;         // [rank by popularity]
  std::vector<std::uint64_t> order_of_;  // [micro_step], index of the order used
};

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

constexpr double kSequencePart = 0.3;  // relative to the group's spread: samples of one prompt are similar

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

std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const ZipfRouting& zipf) {
  if (!(zipf.skew >= 0 && zipf.skew <= 100)) throw InputError({.field = "skew"}, "must be a number from 0 to 100");
  if (!(zipf.permute_probability >= 0 && zipf.permute_probability <= 1)) {
    throw InputError({.field = "permute_probability"}, "must be a number from 0 to 1");
  }
  return std::make_unique<ZipfRouter>(options, zipf);
}

std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const DirichletRouting& dirichlet) {
  if (!(dirichlet.concentration > 0 && dirichlet.concentration <= 1e9)) {
    throw InputError({.field = "concentration"}, "must be a number above 0, up to 1e9");
  }
  if (!(dirichlet.sequence_concentration >= 0 && dirichlet.sequence_concentration <= 1e9)) {
    throw InputError({.field = "sequence_concentration"}, "must be a number from 0 to 1e9");
  }
  return std::make_unique<DirichletRouter>(options, dirichlet);
}

std::unique_ptr<TokenRouter> make_router(const SynthesisOptions& options, const GrpoRouting& grpo) {
  if (!(grpo.step_spread >= 0 && grpo.step_spread <= 20))
    throw InputError({.field = "step_spread"}, "must be a number from 0 to 20");
  if (!(grpo.group_spread >= 0 && grpo.group_spread <= 20))
    throw InputError({.field = "group_spread"}, "must be a number from 0 to 20");
  return std::make_unique<GrpoRouter>(options, grpo);
}

}  // namespace foremoe
