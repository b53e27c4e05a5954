#include "foremoe/runtime/reference_model.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

#include "foremoe/runtime/cpu/optimizers.h"
#include "foremoe/runtime/reference_expert.h"

namespace foremoe {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kUnit = 0x1.0p-24;  // of variances: the greatest relative error of a rounding to float32

double squared(double x) { return x * x; }

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

// Entries are [token·k + j]; the rows of an expert are its entries, ascending. Threads share the tokens, or the
// experts: each writes what belongs to its own.
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

  // Exact x.
  Rounded forward(std::vector<double> input, bool variances) {
    Rounded x{.value = std::move(input), .variance = {}};
    if (variances) x.variance.resize(x.value.size());
    for (std::size_t l = 0; l < layers_.size(); ++l) x = forward(l, std::move(x));
    return x;
  }

  // From the gradient of the output to that of the input. `rows` [layer][expert]: of the step.
  Rounded backward(Rounded dy, const Array<double, 2>& rows, ReferenceResult& sums) {
    for (std::size_t l = layers_.size(); l-- > 0;) dy = backward(l, dy, rows.row(l), sums);
    return dy;
  }

 private:
  struct Layer {
    Rounded x;                                      // [token][hidden], what came in
    Rounded weight;                                 // [entry]
    std::vector<std::vector<std::size_t>> entries;  // [expert]
  };

  const double* router_row(std::size_t l, std::size_t entry) const {
    return &model_.router_[l][routes_[l][entry].index() * hidden_];
  }

  bool chosen(std::size_t l, std::size_t entry) const { return routes_[l][entry].value >= 0; }

  // Calls f(first entry of a token) for all tokens.
  template <class F>
  void for_each_token(std::size_t l, const F& f) const {
    constexpr std::size_t kTokens = 16;  // at a time
    const std::size_t tokens = routes_[l].size() / k_;
    pool_.for_each_index((tokens + kTokens - 1) / kTokens, [&](std::size_t part, std::size_t) {
      for (std::size_t t = part * kTokens; t < std::min(tokens, (part + 1) * kTokens); ++t) f(t * k_);
    });
  }

  // Calls f(j) for the entries of a token that have an expert.
  template <class F>
  void for_each_chosen(std::size_t l, std::size_t first, const F& f) const {
    for (std::size_t entry = first; entry < first + k_; ++entry) {
      if (chosen(l, entry)) f(entry);
    }
  }

  // Rows of [token][hidden] that an expert's entries name.
  Rounded gather(const Rounded& from, const std::vector<std::size_t>& entries) const {
    const auto gathered = [&](const std::vector<double>& values) {
      std::vector<double> rows;
      if (values.empty()) return rows;
      rows.reserve(entries.size() * hidden_);
      for (const std::size_t entry : entries) {
        const auto token = values.begin() + static_cast<std::ptrdiff_t>(entry / k_ * hidden_);
        rows.insert(rows.end(), token, token + static_cast<std::ptrdiff_t>(hidden_));
      }
      return rows;
    };
    return {.value = gathered(from.value), .variance = gathered(from.variance)};
  }

  // Where the rows of an expert's entries lie among those of all entries.
  void scatter(const Rounded& rows, const std::vector<std::size_t>& entries, Rounded& of_entry) const {
    for (std::size_t i = 0; i < entries.size(); ++i) {
      std::copy_n(&rows.value[i * hidden_], hidden_, &of_entry.value[entries[i] * hidden_]);
      if (rows.variance.empty()) continue;
      std::copy_n(&rows.variance[i * hidden_], hidden_, &of_entry.variance[entries[i] * hidden_]);
    }
  }

  Rounded zeros(std::size_t n, bool bounded) const {
    return {.value = std::vector<double>(n), .variance = std::vector<double>(bounded ? n : 0)};
  }

  void weigh(std::size_t l) {
    Layer& layer = layers_[l];
    const bool bounded = !layer.x.variance.empty();
    layer.weight = zeros(routes_[l].size(), bounded);
    for_each_token(l, [&](std::size_t first) {
      std::vector<double>& weight = layer.weight.value;
      const double* x = &layer.x.value[first / k_ * hidden_];
      double greatest = -kInfinity, sum = 0;
      for_each_chosen(l, first, [&](std::size_t entry) {
        for (std::size_t h = 0; h < hidden_; ++h) weight[entry] += x[h] * router_row(l, entry)[h];
        greatest = std::max(greatest, weight[entry]);
      });
      for_each_chosen(l, first, [&](std::size_t entry) { sum += weight[entry] = std::exp(weight[entry] - greatest); });
      for_each_chosen(l, first, [&](std::size_t entry) { weight[entry] /= sum; });
      if (bounded) bound_weights(l, first);
    });
  }

  // d weight_j = weight_j·(d logit_j − Σ weight·d logit); logits are taken in double.
  void bound_weights(std::size_t l, std::size_t first) {
    Layer& layer = layers_[l];
    const std::vector<double>& weight = layer.weight.value;
    const double* of_x = &layer.x.variance[first / k_ * hidden_];
    std::vector<double> of_logit(k_);
    double all = 0;
    for_each_chosen(l, first, [&](std::size_t entry) {
      for (std::size_t h = 0; h < hidden_; ++h) of_logit[entry - first] += of_x[h] * squared(router_row(l, entry)[h]);
      all += squared(weight[entry]) * of_logit[entry - first];
    });
    for_each_chosen(l, first, [&](std::size_t entry) {
      const double mine = of_logit[entry - first], others = all - squared(weight[entry]) * mine;
      layer.weight.variance[entry] =
          squared(weight[entry]) * (squared(1 - weight[entry]) * mine + std::max(others, 0.0) + 1);
    });
  }

  Rounded forward(std::size_t l, Rounded x) {
    Layer& layer = layers_[l];
    layer.x = std::move(x);
    const bool bounded = !layer.x.variance.empty();
    weigh(l);
    layer.entries.assign(static_cast<std::size_t>(size_.experts), {});
    for (std::size_t entry = 0; entry < routes_[l].size(); ++entry) {
      if (chosen(l, entry)) layer.entries[routes_[l][entry].index()].push_back(entry);
    }
    Rounded y_of_entry = zeros(routes_[l].size() * hidden_, bounded);
    pool_.for_each_index(layer.entries.size(), [&](std::size_t e, std::size_t) {
      if (layer.entries[e].empty()) return;
      ReferenceExpert expert(size_.shape, model_.expert_(l, e));
      scatter(expert.forward(gather(layer.x, layer.entries[e])), layer.entries[e], y_of_entry);
    });
    Rounded out = layer.x;
    for_each_token(l, [&](std::size_t first) {
      const std::size_t token = first / k_ * hidden_;
      const auto terms = static_cast<double>(2 * k_ + 1);
      for_each_chosen(l, first, [&](std::size_t entry) {
        const double weight = layer.weight.value[entry];
        for (std::size_t h = 0; h < hidden_; ++h) {
          const double y = y_of_entry.value[entry * hidden_ + h];
          out.value[token + h] += weight * y;
          if (!bounded) continue;
          out.variance[token + h] += squared(weight) * y_of_entry.variance[entry * hidden_ + h] +
                                     squared(y) * layer.weight.variance[entry] + terms * squared(weight * y);
        }
      });
      for (std::size_t at = token; bounded && at < token + hidden_; ++at) {
        out.variance[at] += terms * (squared(layer.x.value[at]) + squared(out.value[at]));
      }
    });
    return out;
  }

  // What a layer's backward has of every entry.
  struct EntryGradients {
    Rounded dx;        // [entry][hidden], through the expert
    Rounded d_weight;  // [entry]
    Rounded d_logit;   // [entry]
  };

  // Through the experts: dx and d_weight, and the experts' gradients.
  void backward_experts(std::size_t l, const Rounded& dy, std::span<const double> rows, EntryGradients& of_entry,
                        ReferenceResult& sums) const {
    const Layer& layer = layers_[l];
    const bool bounded = !dy.variance.empty();
    pool_.for_each_index(layer.entries.size(), [&](std::size_t e, std::size_t) {
      const std::vector<std::size_t>& entries = layer.entries[e];
      if (entries.empty()) return;
      ReferenceExpert expert(size_.shape, model_.expert_(l, e));
      const Rounded y = expert.forward(gather(layer.x, entries));
      Rounded d_rows = gather(dy, entries);
      for (std::size_t i = 0; i < entries.size(); ++i) {
        const double weight = layer.weight.value[entries[i]];
        double d_weight = 0, of_d_weight = 0;
        for (std::size_t at = i * hidden_; at < (i + 1) * hidden_; ++at) {
          const double d = d_rows.value[at];
          d_weight += y.value[at] * d;
          d_rows.value[at] *= weight;
          if (!bounded) continue;
          of_d_weight += squared(d) * y.variance[at] + squared(y.value[at]) * d_rows.variance[at];
          d_rows.variance[at] = squared(weight) * d_rows.variance[at] + squared(d) * layer.weight.variance[entries[i]] +
                                squared(weight * d);
        }
        of_entry.d_weight.value[entries[i]] = d_weight;
        if (bounded) of_entry.d_weight.variance[entries[i]] = of_d_weight + squared(d_weight);
      }
      RoundedSum gradient{.value = sums.expert_gradient(l, e), .variance = {}, .terms = rows[e]};
      if (bounded) gradient.variance = sums.variance.expert_gradient(l, e);
      scatter(expert.backward(d_rows, gradient), entries, of_entry.dx);
    });
  }

  // Through the softmax of one token: d_logit_j = weight_j·(d_weight_j − Σ weight·d_weight), in double.
  void backward_weights(std::size_t l, std::size_t first, EntryGradients& of_entry) const {
    const Rounded &weight = layers_[l].weight, &d_weight = of_entry.d_weight;
    const bool bounded = !weight.variance.empty();
    double mean = 0, of_mean = 0;
    const auto of_term = [&](std::size_t entry) {
      return squared(weight.value[entry]) * d_weight.variance[entry] +
             squared(d_weight.value[entry]) * weight.variance[entry];
    };
    for_each_chosen(l, first, [&](std::size_t entry) {
      mean += weight.value[entry] * d_weight.value[entry];
      if (bounded) of_mean += of_term(entry);
    });
    for_each_chosen(l, first, [&](std::size_t entry) {
      const double w = weight.value[entry], d = d_weight.value[entry];
      of_entry.d_logit.value[entry] = w * (d - mean);
      if (!bounded) return;
      const double others = std::max(of_mean - of_term(entry), 0.0);
      of_entry.d_logit.variance[entry] = squared(d - mean - w * d) * weight.variance[entry] +
                                         squared(w * (1 - w)) * d_weight.variance[entry] + squared(w) * others;
    });
  }

  Rounded backward(std::size_t l, const Rounded& dy, std::span<const double> rows, ReferenceResult& sums) {
    const Layer& layer = layers_[l];
    const bool bounded = !dy.variance.empty();
    const std::size_t entries = routes_[l].size();
    EntryGradients of_entry{.dx = zeros(entries * hidden_, bounded),
                            .d_weight = zeros(entries, bounded),
                            .d_logit = zeros(entries, bounded)};
    backward_experts(l, dy, rows, of_entry, sums);

    Rounded dx = dy;  // of the residual connection
    for_each_token(l, [&](std::size_t first) {
      backward_weights(l, first, of_entry);
      const std::size_t token = first / k_ * hidden_;
      const auto terms = static_cast<double>(2 * k_ + 1);
      for_each_chosen(l, first, [&](std::size_t entry) {
        const double d_logit = of_entry.d_logit.value[entry];
        for (std::size_t h = 0; h < hidden_; ++h) {
          const double through_expert = of_entry.dx.value[entry * hidden_ + h], router = router_row(l, entry)[h];
          dx.value[token + h] += through_expert + d_logit * router;
          if (!bounded) continue;
          dx.variance[token + h] += of_entry.dx.variance[entry * hidden_ + h] +
                                    squared(router) * of_entry.d_logit.variance[entry] +
                                    terms * (squared(through_expert) + squared(d_logit * router));
        }
      });
      for (std::size_t at = token; bounded && at < token + hidden_; ++at) {
        dx.variance[at] += terms * (squared(dy.value[at]) + squared(dx.value[at]));
      }
    });
    pool_.for_each_index(layer.entries.size(), [&](std::size_t e, std::size_t) {  // an expert's entries are ascending
      double* sum = &sums.router_gradient[l][e * hidden_];
      for (const std::size_t entry : layer.entries[e]) {
        const std::size_t token = entry / k_ * hidden_;
        const double d_logit = of_entry.d_logit.value[entry];
        for (std::size_t h = 0; h < hidden_; ++h) {
          const double x = layer.x.value[token + h];
          sum[h] += d_logit * x;
          if (!bounded) continue;
          sums.variance.router_gradient[l][e * hidden_ + h] +=
              squared(x) * of_entry.d_logit.variance[entry] +
              squared(d_logit) * (layer.x.variance[token + h] + rows[e]);
        }
      }
    });
    return dx;
  }

  const ReferenceModel& model_;
  const ModelSize& size_;
  ThreadPool& pool_;
  std::size_t hidden_, k_;
  std::vector<std::vector<ExpertId>> routes_;  // [layer][entry]
  std::vector<Layer> layers_;
};

ReferenceModel::ReferenceModel(const ModelSize& size, ThreadPool& pool)
    : size_(size),
      expert_({static_cast<std::size_t>(size.layers), static_cast<std::size_t>(size.experts)}),
      router_(static_cast<std::size_t>(size.layers)) {
  pool.for_each_index(expert_.size(), [&](std::size_t i, std::size_t) {
    const TensorKey gate_up{
        .tensor = Tensor::kGateUp, .a = static_cast<int>(i) / size.experts, .b = static_cast<int>(i) % size.experts};
    TensorKey down = gate_up;
    down.tensor = Tensor::kDown;
    std::vector<double>& weights = expert_.flat()[i];
    weights = drawn(size, gate_up, gate_up_size(size.shape));
    const std::vector<double> rest = drawn(size, down, gate_up_size(size.shape) / 2);
    weights.insert(weights.end(), rest.begin(), rest.end());
  });
  for (int l = 0; l < size.layers; ++l) {
    router_[static_cast<std::size_t>(l)] =
        drawn(size, {.tensor = Tensor::kRouter, .a = l, .b = 0},
              static_cast<std::size_t>(size.experts) * static_cast<std::size_t>(size.shape.hidden));
  }
}

Array<double, 2> ReferenceModel::rows_of_experts(const ReferenceStep& step) const {
  Array<double, 2> rows(expert_.shape());
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

ReferenceResult ReferenceModel::run(const ReferenceStep& step, ThreadPool& pool) const {
  const std::vector<cpu::BlasThread> threads(pool.num_threads());
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
        Array<std::vector<double>, 2>(expert_.shape(), std::vector<double>(expert_size(size_.shape)));
    for (const auto& router : router_) tensors.router_gradient.emplace_back(router.size());
  };
  prepare(result);
  if (step.variances) prepare(result.variance);
  const Array<double, 2> rows = step.variances ? rows_of_experts(step) : Array<double, 2>(expert_.shape());
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
    SourcePass pass(*this, pool, std::move(routes));
    Rounded y = pass.forward(drawn(size_, {.tensor = Tensor::kInput, .a = m, .b = r}, values), step.variances);
    if (step.backward) {
      Rounded dy{.value = drawn(size_, {.tensor = Tensor::kTarget, .a = m, .b = r}, values), .variance = y.variance};
      for (std::size_t i = 0; i < values; ++i) {
        const double difference = y.value[i] - dy.value[i];
        result.loss += 0.5 * difference * difference * scale;
        dy.value[i] = difference * scale;
        // Roundings: of the difference, of the scale, of their product.
        if (step.variances) dy.variance[i] = squared(scale) * y.variance[i] + 3 * squared(dy.value[i]);
      }
      Rounded dx = pass.backward(std::move(dy), rows, result);
      result.input_gradient(m, r) = std::move(dx.value);
      if (step.variances) result.variance.input_gradient(m, r) = std::move(dx.variance);
    }
    result.output(m, r) = std::move(y.value);
    if (step.variances) result.variance.output(m, r) = std::move(y.variance);
  });
  if (step.variances && step.backward) {  // of every sum over rows, the part of the sum itself
    const auto experts = static_cast<std::size_t>(size_.experts);
    for (std::size_t i = 0; i < expert_.size(); ++i) {
      const std::size_t l = i / experts, e = i % experts;
      std::vector<double>& of_expert = result.variance.expert_gradient(l, e);
      for (std::size_t j = 0; j < of_expert.size(); ++j) {
        of_expert[j] += rows(l, e) * squared(result.expert_gradient(l, e)[j]);
      }
      for (std::size_t j = e * hidden; j < (e + 1) * hidden; ++j) {
        result.variance.router_gradient[l][j] += rows(l, e) * squared(result.router_gradient[l][j]);
      }
    }
  }
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
  const std::size_t layers = expert_.extent(0), experts = expert_.extent(1);
  ++steps_;
  mean_.resize(layers * (experts + 1));
  square_.resize(layers * (experts + 1));
  pool.for_each_index(layers * (experts + 1), [&](std::size_t i, std::size_t) {
    const std::size_t l = i / (experts + 1), e = i % (experts + 1);
    if (e == experts) return optimize(router_[l], gradients.router_gradient[l], i, optimizer);
    optimize(expert_(l, e), gradients.expert_gradient(l, e), i, optimizer);
  });
}

double relative_error(std::span<const float> x, std::span<const double> reference) {
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

double deviations(std::span<const float> x, std::span<const double> reference, std::span<const double> variance) {
  if (x.size() != reference.size() || x.size() != variance.size()) return kInfinity;
  double most = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double difference = std::abs(double{x[i]} - reference[i]);
    if (difference == 0) continue;
    const double deviation = kUnit * std::sqrt(variance[i]);
    if (!(deviation > 0)) return kInfinity;
    most = std::max(most, difference / deviation);
    if (std::isnan(difference)) return kInfinity;
  }
  return most;
}

double most_deviations(std::size_t n) {
  return 2 * std::sqrt(std::log(2 * static_cast<double>(std::max<std::size_t>(n, 1))));
}

}  // namespace foremoe
