#pragma once

// The router on a CPU. Logits are dot products in double and in one fixed order: what a token gets does not depend on
// the tokens beside it. Gradients of one call are summed in double before they are added.

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

class Router {
 public:
  void forward(const RoutedTokens& tokens, float* weight);

  struct Gradients {
    const float* weight = nullptr;    // [token·k + j], of forward()
    const float* d_weight = nullptr;  // likewise
    float* dx = nullptr;              // added
    float* d_router = nullptr;        // added
  };
  void backward(const RoutedTokens& tokens, const Gradients& gradients);

  struct Picks {
    int experts = 0;
    std::span<const std::int32_t> token;
    std::span<std::int32_t> picked;  // [listed token·k + j]
  };
  // `tokens.expert` is not read.
  void pick(const RoutedTokens& tokens, const Picks& picks);

 private:
  std::vector<double> logit_;     // [j]
  std::vector<double> d_router_;  // [expert][hidden]
};

}  // namespace foremoe::cpu
