#include "foremoe/runtime/reference_model.h"

#include <cblas.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <mutex>

#include "foremoe/runtime/reference_expert.h"

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

// Entries are [token·k + j]; the rows of an expert are its entries, ascending.
class ReferenceModel::SourcePass {
 public:
  SourcePass(const ReferenceModel& model, ThreadPool& pool, std::vector<std::vector<ExpertId>> routes)
      : model_(model),
        size_(model.size_),
        pool_(pool),
        hidden_(static_cast<std::size_t>(size_.shape.hidden)),
        k_(static_cast<std::size_t>(size_.top_k)),
        routes_(std::move(routes)),
        layers_(routes_.size()) {}

  std::vector<double> forward(std::vector<double> x) {
    for (std::size_t l = 0; l < layers_.size(); ++l) x = forward(l, std::move(x));
    return x;
  }

  // From the gradient of the output to that of the input.
  std::vector<double> backward(std::vector<double> dy, ReferenceResult& sums) {
    for (std::size_t l = layers_.size(); l-- > 0;) dy = backward(l, dy, sums);
    return dy;
  }

 private:
  struct Layer {
    std::vector<double> x;                          // [token][hidden], what came in
    std::vector<double> weight;                     // [entry]
    std::vector<std::vector<std::size_t>> entries;  // [expert]
  };

  const double* router_row(std::size_t l, std::size_t entry) const {
    return &model_.router_[l][routes_[l][entry].index() * hidden_];
  }

  bool chosen(std::size_t l, std::size_t entry) const { return routes_[l][entry].value >= 0; }

  // Rows of [token][hidden] that an expert's entries name.
  std::vector<double> gather(const std::vector<double>& from, const std::vector<std::size_t>& entries) const {
    std::vector<double> rows;
    rows.reserve(entries.size() * hidden_);
    for (const std::size_t entry : entries) {
      const auto token = from.begin() + static_cast<std::ptrdiff_t>(entry / k_ * hidden_);
      rows.insert(rows.end(), token, token + static_cast<std::ptrdiff_t>(hidden_));
    }
    return rows;
  }

  void weigh(std::size_t l) {
    Layer& layer = layers_[l];
    layer.weight.assign(routes_[l].size(), 0);
    for (std::size_t first = 0; first < layer.weight.size(); first += k_) {
      const double* x = &layer.x[first / k_ * hidden_];
      double greatest = -std::numeric_limits<double>::infinity(), sum = 0;
      for (std::size_t entry = first; entry < first + k_; ++entry) {
        if (!chosen(l, entry)) continue;
        for (std::size_t h = 0; h < hidden_; ++h) layer.weight[entry] += x[h] * router_row(l, entry)[h];
        greatest = std::max(greatest, layer.weight[entry]);
      }
      for (std::size_t entry = first; entry < first + k_; ++entry) {
        if (chosen(l, entry)) sum += layer.weight[entry] = std::exp(layer.weight[entry] - greatest);
      }
      for (std::size_t entry = first; entry < first + k_; ++entry) {
        if (chosen(l, entry)) layer.weight[entry] /= sum;
      }
    }
  }

  std::vector<double> forward(std::size_t l, std::vector<double> x) {
    Layer& layer = layers_[l];
    layer.x = std::move(x);
    weigh(l);
    layer.entries.assign(static_cast<std::size_t>(size_.experts), {});
    for (std::size_t entry = 0; entry < routes_[l].size(); ++entry) {
      if (chosen(l, entry)) layer.entries[routes_[l][entry].index()].push_back(entry);
    }
    std::vector<double> y_of_entry(routes_[l].size() * hidden_);
    pool_.for_each_index(layer.entries.size(), [&](std::size_t e, std::size_t) {
      ReferenceExpert expert(size_.shape, model_.expert_(l, e));
      const std::vector<double> y = expert.forward(gather(layer.x, layer.entries[e]));
      for (std::size_t i = 0; i < layer.entries[e].size(); ++i) {
        std::copy_n(&y[i * hidden_], hidden_, &y_of_entry[layer.entries[e][i] * hidden_]);
      }
    });
    std::vector<double> out = layer.x;
    for (std::size_t entry = 0; entry < layer.weight.size(); ++entry) {
      for (std::size_t h = 0; h < hidden_; ++h)
        out[entry / k_ * hidden_ + h] += layer.weight[entry] * y_of_entry[entry * hidden_ + h];
    }
    return out;
  }

  std::vector<double> backward(std::size_t l, const std::vector<double>& dy, ReferenceResult& sums) {
    const Layer& layer = layers_[l];
    std::vector<double> dx_of_entry(layer.weight.size() * hidden_), d_weight(layer.weight.size());
    pool_.for_each_index(layer.entries.size(), [&](std::size_t e, std::size_t) {
      const std::vector<std::size_t>& entries = layer.entries[e];
      ReferenceExpert expert(size_.shape, model_.expert_(l, e));
      const std::vector<double> y = expert.forward(gather(layer.x, entries));
      std::vector<double> d_rows = gather(dy, entries);
      for (std::size_t i = 0; i < entries.size(); ++i) {
        for (std::size_t at = i * hidden_; at < (i + 1) * hidden_; ++at) {
          d_weight[entries[i]] += y[at] * d_rows[at];
          d_rows[at] *= layer.weight[entries[i]];
        }
      }
      const std::vector<double> dx = expert.backward(d_rows, sums.expert_gradient(l, e));
      for (std::size_t i = 0; i < entries.size(); ++i)
        std::copy_n(&dx[i * hidden_], hidden_, &dx_of_entry[entries[i] * hidden_]);
    });
    std::vector<double> dx = dy;  // of the residual connection
    for (std::size_t first = 0; first < layer.weight.size(); first += k_) {
      const std::size_t token = first / k_ * hidden_;
      double mean = 0;
      for (std::size_t entry = first; entry < first + k_; ++entry) mean += layer.weight[entry] * d_weight[entry];
      for (std::size_t entry = first; entry < first + k_; ++entry) {
        if (!chosen(l, entry)) continue;
        const double d_logit = layer.weight[entry] * (d_weight[entry] - mean);
        double* d_router = &sums.router_gradient[l][routes_[l][entry].index() * hidden_];
        for (std::size_t h = 0; h < hidden_; ++h) {
          dx[token + h] += dx_of_entry[entry * hidden_ + h] + d_logit * router_row(l, entry)[h];
          d_router[h] += d_logit * layer.x[token + h];
        }
      }
    }
    return dx;
  }

  const ReferenceModel& model_;
  const ModelSize& size_;
  ThreadPool& pool_;
  std::size_t hidden_, k_;
  std::vector<std::vector<ExpertId>> routes_;  // [layer][entry]
  std::vector<Layer> layers_;
};

ReferenceModel::ReferenceModel(const ModelSize& size)
    : size_(size), expert_({static_cast<std::size_t>(size.layers), static_cast<std::size_t>(size.experts)}) {
  static std::once_flag once;  // the pool's threads are enough
  std::call_once(once, [] { openblas_set_num_threads(1); });
  for (int l = 0; l < size.layers; ++l) {
    for (int e = 0; e < size.experts; ++e) {
      std::vector<double>& weights = expert_(l, e);
      weights = drawn(size, {.tensor = Tensor::kGateUp, .a = l, .b = e}, gate_up_size(size.shape));
      const std::vector<double> down =
          drawn(size, {.tensor = Tensor::kDown, .a = l, .b = e}, gate_up_size(size.shape) / 2);
      weights.insert(weights.end(), down.begin(), down.end());
    }
    router_.push_back(drawn(size, {.tensor = Tensor::kRouter, .a = l, .b = 0},
                            static_cast<std::size_t>(size.experts) * static_cast<std::size_t>(size.shape.hidden)));
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
  result.output = Array<std::vector<double>, 2>(sources);
  double scale = 0;
  if (step.backward) {
    result.input_gradient = Array<std::vector<double>, 2>(sources);
    result.expert_gradient =
        Array<std::vector<double>, 2>(expert_.shape(), std::vector<double>(expert_size(size_.shape)));
    for (const auto& router : router_) result.router_gradient.emplace_back(router.size());
    std::size_t tokens = 0;
    for_each_source([&](int m, int r) { tokens += step.routes(MicroStepId{m}, RankId{r}, LayerId{0}).size() / top_k; });
    scale = 1 / static_cast<double>(tokens);
  }
  for_each_source([&](int m, int r) {
    std::vector<std::vector<ExpertId>> routes;
    for (int l = 0; l < size_.layers; ++l) routes.push_back(step.routes(MicroStepId{m}, RankId{r}, LayerId{l}));
    const std::size_t values = routes.front().size() / top_k * hidden;
    SourcePass pass(*this, pool, std::move(routes));
    std::vector<double>& y = result.output(m, r);
    y = pass.forward(drawn(size_, {.tensor = Tensor::kInput, .a = m, .b = r}, values));
    if (!step.backward) return;
    std::vector<double> dy = drawn(size_, {.tensor = Tensor::kTarget, .a = m, .b = r}, values);
    for (std::size_t i = 0; i < values; ++i) {
      const double difference = y[i] - dy[i];
      result.loss += 0.5 * difference * difference * scale;
      dy[i] = difference * scale;
    }
    result.input_gradient(m, r) = pass.backward(std::move(dy), result);
  });
  return result;
}

void ReferenceModel::optimize(std::span<double> weights, std::span<const double> gradient, std::size_t moments,
                              const Optimizer& optimizer) {
  const double rate = optimizer.rate;
  if (optimizer.kind == Optimizer::Kind::kSgd) {
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= rate * gradient[i];
    return;
  }
  constexpr Device::Adam kAdam;
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

void ReferenceModel::optimize(const ReferenceResult& gradients, const Optimizer& optimizer) {
  const std::size_t layers = expert_.extent(0), experts = expert_.extent(1);
  ++steps_;
  mean_.resize(layers * (experts + 1));
  square_.resize(layers * (experts + 1));
  for (std::size_t l = 0; l < layers; ++l) {
    for (std::size_t e = 0; e < experts; ++e) {
      optimize(expert_(l, e), gradients.expert_gradient(l, e), l * (experts + 1) + e, optimizer);
    }
    optimize(router_[l], gradients.router_gradient[l], l * (experts + 1) + experts, optimizer);
  }
}

double relative_error(std::span<const float> x, std::span<const double> reference) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (x.size() != reference.size()) return kInfinity;
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double difference = std::abs(double{x[i]} - reference[i]);
    if (std::isnan(difference)) return kInfinity;
    error = std::max(error, difference);
    norm = std::max(norm, std::abs(reference[i]));
  }
  if (norm > 0) return error / norm;
  return error > 0 ? kInfinity : 0;
}

}  // namespace foremoe
