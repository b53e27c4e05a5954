#include "foremoe/runtime/cpu/router.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <limits>

#include "foremoe/runtime/cpu/rows.h"

namespace foremoe::cpu {

namespace {

constexpr double kLeast = -std::numeric_limits<double>::infinity();

}  // namespace

void router_forward(const RoutedTokens& tokens, float* weight, RouterWorkspace& ws) {
  const auto k = static_cast<std::size_t>(tokens.k);
  ws.logit.resize(std::max(ws.logit.size(), k));
  const float* x = tokens.x;
  for (std::size_t first = 0; first < tokens.expert.size(); first += k, x += tokens.hidden) {
    double greatest = kLeast;
    for (std::size_t j = 0; j < k; ++j) {
      const std::int32_t e = tokens.expert[first + j];
      if (e < 0) continue;
      ws.logit[j] = dot(x, tokens.router + static_cast<std::ptrdiff_t>(e) * tokens.hidden, tokens.hidden);
      greatest = std::max(greatest, ws.logit[j]);
    }
    double sum = 0;
    for (std::size_t j = 0; j < k; ++j) {
      ws.logit[j] = tokens.expert[first + j] < 0 ? 0 : std::exp(ws.logit[j] - greatest);
      sum += ws.logit[j];
    }
    for (std::size_t j = 0; j < k; ++j) weight[first + j] = sum == 0 ? 0.0F : static_cast<float>(ws.logit[j] / sum);
  }
}

void router_backward(const RoutedTokens& tokens, const RouterGradients& gradients, RouterWorkspace& ws) {
  const auto k = static_cast<std::size_t>(tokens.k);
  const auto hidden = static_cast<std::size_t>(tokens.hidden);
  std::int32_t greatest = -1;
  for (const std::int32_t e : tokens.expert) greatest = std::max(greatest, e);
  const std::size_t values = static_cast<std::size_t>(greatest + 1) * hidden;
  if (ws.d_router.size() < values) ws.d_router.resize(values);
  std::fill_n(ws.d_router.begin(), values, 0.0);
  const float* x = tokens.x;
  float* dx = gradients.dx;
  for (std::size_t first = 0; first < tokens.expert.size(); first += k, x += hidden, dx += hidden) {
    double mean = 0;  // mean gradient of the weights, weighted by the weights
    for (std::size_t j = 0; j < k; ++j) {
      if (tokens.expert[first + j] >= 0) mean += double{gradients.weight[first + j]} * gradients.d_weight[first + j];
    }
    for (std::size_t j = 0; j < k; ++j) {
      if (tokens.expert[first + j] < 0) continue;
      const std::size_t row = static_cast<std::size_t>(tokens.expert[first + j]) * hidden;
      const double d_logit = gradients.weight[first + j] * (gradients.d_weight[first + j] - mean);
      for (std::size_t h = 0; h < hidden; ++h) {
        dx[h] += static_cast<float>(d_logit * tokens.router[row + h]);
        ws.d_router[row + h] += d_logit * x[h];
      }
    }
  }
  for (std::size_t i = 0; i < values; ++i) {
    gradients.d_router[i] = static_cast<float>(gradients.d_router[i] + ws.d_router[i]);
  }
}

void router_pick(const RoutedTokens& tokens, const RouterPicks& picks, RouterWorkspace& ws) {
  const auto k = static_cast<std::size_t>(tokens.k);
  assert(tokens.k <= picks.experts);
  ws.logit.resize(std::max(ws.logit.size(), k));
  for (std::size_t i = 0; i < picks.token.size(); ++i) {
    const float* x = tokens.x + static_cast<std::ptrdiff_t>(picks.token[i]) * tokens.hidden;
    const std::span<std::int32_t> best = picks.picked.subspan(i * k, k);
    std::size_t found = 0;
    for (std::int32_t e = 0; e < picks.experts; ++e) {
      double logit = dot(x, tokens.router + static_cast<std::ptrdiff_t>(e) * tokens.hidden, tokens.hidden);
      if (std::isnan(logit)) logit = kLeast;  // ranks last; experts remain distinct
      // Insert after all logits that are at least as large: their experts have lower ids.
      std::size_t place = found;
      while (place > 0 && ws.logit[place - 1] < logit) --place;
      if (place == k) continue;
      if (found < k) ++found;
      for (std::size_t j = found - 1; j > place; --j) {
        ws.logit[j] = ws.logit[j - 1];
        best[j] = best[j - 1];
      }
      ws.logit[place] = logit;
      best[place] = e;
    }
  }
}

}  // namespace foremoe::cpu
