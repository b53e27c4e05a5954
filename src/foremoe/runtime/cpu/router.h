#pragma once

// The router: logits = x·Rᵀ, and a token's weights are the softmax over its chosen experts' logits. Logits are dot
// products in double and in one fixed order: what a token gets does not depend on the tokens beside it. Gradients of
// one call are summed in double before they are added.

#include <cstdint>
#include <span>
#include <vector>

namespace foremoe::cpu {

struct RoutedTokens {
  const float* x = nullptr;              // [token][hidden]
  const float* router = nullptr;         // [expert][hidden]
  std::span<const std::int32_t> expert;  // [token·k + j], negative: not chosen
  int k = 1;
  int hidden = 0;
};

struct RouterWorkspace {
  std::vector<double> logit;     // [j]
  std::vector<double> d_router;  // [expert][hidden]
};

// weight [token·k + j]; 0 where no expert is chosen.
void router_forward(const RoutedTokens& tokens, float* weight, RouterWorkspace& workspace);

struct RouterGradients {
  const float* weight = nullptr;    // [token·k + j], of router_forward()
  const float* d_weight = nullptr;  // likewise
  float* dx = nullptr;              // [token][hidden], added
  float* d_router = nullptr;        // [expert][hidden], added
};
void router_backward(const RoutedTokens& tokens, const RouterGradients& gradients, RouterWorkspace& workspace);

// The k experts of greatest logit for each listed token, best first, ties to the lowest id. `tokens.expert` is not
// read.
struct RouterPicks {
  int experts = 0;
  std::span<const std::int32_t> token;
  std::span<std::int32_t> picked;  // [listed token·k + j]
};
void router_pick(const RoutedTokens& tokens, const RouterPicks& picks, RouterWorkspace& workspace);

}  // namespace foremoe::cpu
