#pragma once

// The router: logits = x·Rᵀ. The weights of a token are the softmax over the logits of its chosen experts. Logits are
// dot products in double with a fixed summation order, so a token's weights do not depend on neighbouring tokens.
// Gradients of one call are summed in double before they are added.

#include <cstdint>
#include <span>
#include <vector>

namespace foremoe::cpu {

struct RoutedTokens {
  const float* x = nullptr;              // [token][hidden]
  const float* router = nullptr;         // [expert][hidden]
  std::span<const std::int32_t> expert;  // [token·k + j]; negative: no expert
  int k = 1;
  int hidden = 0;
};

struct RouterWorkspace {
  std::vector<double> logit;     // [j]
  std::vector<double> d_router;  // [expert][hidden]
};

// Sets weight [token·k + j]; 0 for entries without an expert.
void router_forward(const RoutedTokens& tokens, float* weight, RouterWorkspace& workspace);

struct RouterGradients {
  const float* weight = nullptr;    // [token·k + j], from router_forward()
  const float* d_weight = nullptr;  // likewise
  float* dx = nullptr;              // [token][hidden], added to
  float* d_router = nullptr;        // [expert][hidden], added to
};
void router_backward(const RoutedTokens& tokens, const RouterGradients& gradients, RouterWorkspace& workspace);

// Selects the k experts with the largest logits for each listed token, best first; ties go to the lowest id. Does not
// read `tokens.expert`.
struct RouterPicks {
  int experts = 0;
  std::span<const std::int32_t> token;
  std::span<std::int32_t> picked;  // [listed token·k + j]
};
void router_pick(const RoutedTokens& tokens, const RouterPicks& picks, RouterWorkspace& workspace);

}  // namespace foremoe::cpu
