#include "foremoe/reference/reference_pass.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace foremoe {
namespace {

Rounded zeros(std::size_t n, bool bounded) {
  return {.value = std::vector<double>(n), .variance = std::vector<double>(bounded ? n : 0)};
}

}  // namespace

ReferencePass::ReferencePass(const ModelSize& size, const ReferenceWeights& weights, ThreadPool& pool,
                             std::vector<std::vector<ExpertId>> routes)
    : size_(size),
      weights_(weights),
      pool_(pool),
      hidden_(static_cast<std::size_t>(size_.shape.hidden)),
      k_(static_cast<std::size_t>(size_.top_k)),
      routes_(std::move(routes)),
      layers_(routes_.size()) {}

Rounded ReferencePass::forward(std::vector<double> input, bool variances) {
  Rounded x{.value = std::move(input), .variance = {}};
  if (variances) x.variance.resize(x.value.size());
  for (std::size_t l = 0; l < layers_.size(); ++l) x = forward(l, std::move(x));
  return x;
}

Rounded ReferencePass::backward(Rounded dy, const Array<double, 2>& rows, RoundedTensors& sums) {
  for (std::size_t l = layers_.size(); l-- > 0;) dy = backward(l, dy, rows.row(l), sums);
  return dy;
}

const double* ReferencePass::router_row(std::size_t l, std::size_t entry) const {
  return &weights_.router[l][routes_[l][entry].index() * hidden_];
}

// Calls f(first entry of the token) for all tokens.
template <class F>
void ReferencePass::for_each_token(std::size_t l, const F& f) const {
  constexpr std::size_t kTokens = 16;  // tokens per task
  const std::size_t tokens = routes_[l].size() / k_;
  pool_.for_each_index((tokens + kTokens - 1) / kTokens, [&](std::size_t part, std::size_t) {
    for (std::size_t t = part * kTokens; t < std::min(tokens, (part + 1) * kTokens); ++t) f(t * k_);
  });
}

// Calls f(j) for the entries of a token that have an expert.
template <class F>
void ReferencePass::for_each_chosen(std::size_t l, std::size_t first, const F& f) const {
  for (std::size_t entry = first; entry < first + k_; ++entry) {
    if (chosen(l, entry)) f(entry);
  }
}

// Gathers the rows of [token][hidden] of an expert's entries.
Rounded ReferencePass::gather(const Rounded& from, const std::vector<std::size_t>& entries) const {
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

// Copies the rows of an expert's entries to their places among all entries.
void ReferencePass::scatter(const Rounded& rows, const std::vector<std::size_t>& entries, Rounded& of_entry) const {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    std::copy_n(&rows.value[i * hidden_], hidden_, &of_entry.value[entries[i] * hidden_]);
    if (rows.variance.empty()) continue;
    std::copy_n(&rows.variance[i * hidden_], hidden_, &of_entry.variance[entries[i] * hidden_]);
  }
}

void ReferencePass::weigh(std::size_t l) {
  Layer& layer = layers_[l];
  const bool bounded = !layer.x.variance.empty();
  layer.weight = zeros(routes_[l].size(), bounded);
  for_each_token(l, [&](std::size_t first) {
    std::vector<double>& weight = layer.weight.value;
    const double* x = &layer.x.value[first / k_ * hidden_];
    double greatest = -std::numeric_limits<double>::infinity(), sum = 0;
    for_each_chosen(l, first, [&](std::size_t entry) {
      for (std::size_t h = 0; h < hidden_; ++h) weight[entry] += x[h] * router_row(l, entry)[h];
      greatest = std::max(greatest, weight[entry]);
    });
    for_each_chosen(l, first, [&](std::size_t entry) { sum += weight[entry] = std::exp(weight[entry] - greatest); });
    for_each_chosen(l, first, [&](std::size_t entry) { weight[entry] /= sum; });
    if (bounded) bound_weights(l, first);
  });
}

// Sets variances from d weight_j = weight_j·(d logit_j − Σ weight·d logit). Logits are computed in double.
void ReferencePass::bound_weights(std::size_t l, std::size_t first) {
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

Rounded ReferencePass::forward(std::size_t l, Rounded x) {
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
    ReferenceExpert expert(size_.shape, weights_.expert(l, e));
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

// Backpropagates through the experts: dx, d_weight and the experts' gradients.
void ReferencePass::backward_experts(std::size_t l, const Rounded& dy, std::span<const double> rows,
                                     EntryGradients& of_entry, RoundedTensors& sums) const {
  const Layer& layer = layers_[l];
  const bool bounded = !dy.variance.empty();
  pool_.for_each_index(layer.entries.size(), [&](std::size_t e, std::size_t) {
    const std::vector<std::size_t>& entries = layer.entries[e];
    if (entries.empty()) return;
    ReferenceExpert expert(size_.shape, weights_.expert(l, e));
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

// Backpropagates through the softmax of one token: d_logit_j = weight_j·(d_weight_j − Σ weight·d_weight), in double.
void ReferencePass::backward_weights(std::size_t l, std::size_t first, EntryGradients& of_entry) const {
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

Rounded ReferencePass::backward(std::size_t l, const Rounded& dy, std::span<const double> rows, RoundedTensors& sums) {
  const Layer& layer = layers_[l];
  const bool bounded = !dy.variance.empty();
  const std::size_t entries = routes_[l].size();
  EntryGradients of_entry{
      .dx = zeros(entries * hidden_, bounded), .d_weight = zeros(entries, bounded), .d_logit = zeros(entries, bounded)};
  backward_experts(l, dy, rows, of_entry, sums);

  Rounded dx = dy;  // residual connection
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
  pool_.for_each_index(layer.entries.size(), [&](std::size_t e, std::size_t) {  // adds entries in ascending order
    double* sum = &sums.router_gradient[l][e * hidden_];
    for (const std::size_t entry : layer.entries[e]) {
      const std::size_t token = entry / k_ * hidden_;
      const double d_logit = of_entry.d_logit.value[entry];
      for (std::size_t h = 0; h < hidden_; ++h) {
        const double x = layer.x.value[token + h];
        sum[h] += d_logit * x;
        if (!bounded) continue;
        sums.variance.router_gradient[l][e * hidden_ + h] +=
            squared(x) * of_entry.d_logit.variance[entry] + squared(d_logit) * (layer.x.variance[token + h] + rows[e]);
      }
    }
  });
  return dx;
}

}  // namespace foremoe
