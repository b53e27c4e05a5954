#include "foremoe/reference/reference_model.h"

#include <algorithm>
#include <cmath>

#include "foremoe/runtime/cpu/optimizers.h"

namespace foremoe {

namespace {

std::vector<double> drawn(const ModelSize& size, const TensorKey& key, std::size_t n) {
  std::vector<float> values(n);
  draw(size, key, values);
  return {values.begin(), values.end()};
}

std::size_t gate_up_size(ExpertShape shape) {
  return std::size_t{2} * static_cast<std::size_t>(shape.intermediate) * static_cast<std::size_t>(shape.hidden);
}

std::size_t expert_size(ExpertShape shape) { return gate_up_size(shape) / 2 * 3; }

}  // namespace

ReferenceModel::ReferenceModel(const ModelSize& size, ThreadPool& pool)
    : size_(size),
      weights_{.expert = Array<std::vector<double>, 2>(
                   {static_cast<std::size_t>(size.layers), static_cast<std::size_t>(size.experts)}),
               .router = std::vector<std::vector<double>>(static_cast<std::size_t>(size.layers))} {
  pool.for_each_index(weights_.expert.size(), [&](std::size_t i, std::size_t) {
    const TensorKey gate_up{
        .tensor = Tensor::kGateUp, .a = static_cast<int>(i) / size.experts, .b = static_cast<int>(i) % size.experts};
    TensorKey down = gate_up;
    down.tensor = Tensor::kDown;
    std::vector<double>& weights = weights_.expert.flat()[i];
    weights = drawn(size, gate_up, gate_up_size(size.shape));
    const std::vector<double> rest = drawn(size, down, gate_up_size(size.shape) / 2);
    weights.insert(weights.end(), rest.begin(), rest.end());
  });
  for (int l = 0; l < size.layers; ++l) {
    weights_.router[static_cast<std::size_t>(l)] =
        drawn(size, {.tensor = Tensor::kRouter, .a = l, .b = 0},
              static_cast<std::size_t>(size.experts) * static_cast<std::size_t>(size.shape.hidden));
  }
}

Array<double, 2> ReferenceModel::rows_of_experts(const ReferenceStep& step) const {
  Array<double, 2> rows(weights_.expert.shape());
  for (int m = 0; m < step.micro_steps; ++m) {
    for (int r = 0; r < step.ranks; ++r) {
      for (int l = 0; l < size_.layers; ++l) {
        for (const ExpertId e : step.routes(MicroStepId{m}, RankId{r}, LayerId{l})) {
          if (e.value >= 0) rows(l, e) += 1;
        }
      }
    }
  }
  return rows;
}

// Adds the rounding of each sum over rows to the variances of gradients. rows: [layers, experts].
static void add_rounding_of_sums(ReferenceResult& result, const Array<double, 2>& rows) {
  const std::size_t experts = rows.extent(1);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t l = i / experts, e = i % experts;
    std::vector<double>& of_expert = result.variance.expert_gradient(l, e);
    for (std::size_t j = 0; j < of_expert.size(); ++j) {
      of_expert[j] += rows(l, e) * squared(result.expert_gradient(l, e)[j]);
    }
    const std::size_t hidden = result.router_gradient[l].size() / experts;
    for (std::size_t j = e * hidden; j < (e + 1) * hidden; ++j) {
      result.variance.router_gradient[l][j] += rows(l, e) * squared(result.router_gradient[l][j]);
    }
  }
}

ReferenceResult ReferenceModel::run(const ReferenceStep& step, ThreadPool& pool) const {
  const Array<std::vector<double>, 2>::Shape sources{static_cast<std::size_t>(step.micro_steps),
                                                     static_cast<std::size_t>(step.ranks)};
  const auto top_k = static_cast<std::size_t>(size_.top_k), hidden = static_cast<std::size_t>(size_.shape.hidden);
  const auto for_each_source = [&](const auto& visit) {
    for (int m = 0; m < step.micro_steps; ++m) {
      for (int r = 0; r < step.ranks; ++r) visit(m, r);
    }
  };
  ReferenceResult result;
  const auto prepare = [&](ReferenceTensors& tensors) {
    tensors.output = Array<std::vector<double>, 2>(sources);
    if (!step.backward) return;
    tensors.input_gradient = Array<std::vector<double>, 2>(sources);
    tensors.expert_gradient =
        Array<std::vector<double>, 2>(weights_.expert.shape(), std::vector<double>(expert_size(size_.shape)));
    for (const auto& router : weights_.router) tensors.router_gradient.emplace_back(router.size());
  };
  prepare(result);
  if (step.variances) prepare(result.variance);
  const Array<double, 2> rows = step.variances ? rows_of_experts(step) : Array<double, 2>(weights_.expert.shape());
  double scale = 0;
  if (step.backward) {
    std::size_t tokens = 0;
    for_each_source([&](int m, int r) { tokens += step.routes(MicroStepId{m}, RankId{r}, LayerId{0}).size() / top_k; });
    scale = 1 / static_cast<double>(tokens);
  }
  for_each_source([&](int m, int r) {
    std::vector<std::vector<ExpertId>> routes;
    for (int l = 0; l < size_.layers; ++l) routes.push_back(step.routes(MicroStepId{m}, RankId{r}, LayerId{l}));
    const std::size_t values = routes.front().size() / top_k * hidden;
    ReferencePass pass(size_, weights_, pool, std::move(routes));
    Rounded y = pass.forward(drawn(size_, {.tensor = Tensor::kInput, .a = m, .b = r}, values), step.variances);
    if (step.backward) {
      Rounded dy{.value = drawn(size_, {.tensor = Tensor::kTarget, .a = m, .b = r}, values), .variance = y.variance};
      for (std::size_t i = 0; i < values; ++i) {
        const double difference = y.value[i] - dy.value[i];
        result.loss += 0.5 * difference * difference * scale;
        dy.value[i] = difference * scale;
        // Three roundings: of the difference, of the scale and of their product.
        if (step.variances) dy.variance[i] = squared(scale) * y.variance[i] + 3 * squared(dy.value[i]);
      }
      Rounded dx = pass.backward(std::move(dy), rows, result);
      result.input_gradient(m, r) = std::move(dx.value);
      if (step.variances) result.variance.input_gradient(m, r) = std::move(dx.variance);
    }
    result.output(m, r) = std::move(y.value);
    if (step.variances) result.variance.output(m, r) = std::move(y.variance);
  });
  if (step.variances && step.backward) add_rounding_of_sums(result, rows);
  return result;
}

void ReferenceModel::optimize(std::span<double> weights, std::span<const double> gradient, std::size_t moments,
                              const Optimizer& optimizer) {
  const double rate = optimizer.rate;
  if (optimizer.kind == Optimizer::Kind::kSgd) {
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= rate * gradient[i];
    return;
  }
  constexpr cpu::Adam kAdam;
  const double beta1 = kAdam.beta1, beta2 = kAdam.beta2;
  std::vector<double>&mean = mean_[moments], &square = square_[moments];
  mean.resize(weights.size());
  square.resize(weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    mean[i] = beta1 * mean[i] + (1 - beta1) * gradient[i];
    square[i] = beta2 * square[i] + (1 - beta2) * gradient[i] * gradient[i];
    const double m = mean[i] / (1 - std::pow(beta1, steps_)), v = square[i] / (1 - std::pow(beta2, steps_));
    weights[i] -= rate * m / (std::sqrt(v) + double{kAdam.epsilon});
  }
}

void ReferenceModel::optimize(const ReferenceResult& gradients, const Optimizer& optimizer, ThreadPool& pool) {
  const std::size_t layers = weights_.expert.extent(0), experts = weights_.expert.extent(1);
  ++steps_;
  mean_.resize(layers * (experts + 1));
  square_.resize(layers * (experts + 1));
  pool.for_each_index(layers * (experts + 1), [&](std::size_t i, std::size_t) {
    const std::size_t l = i / (experts + 1), e = i % (experts + 1);
    if (e == experts) return optimize(weights_.router[l], gradients.router_gradient[l], i, optimizer);
    optimize(weights_.expert(l, e), gradients.expert_gradient(l, e), i, optimizer);
  });
}

}  // namespace foremoe
