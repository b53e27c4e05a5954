#pragma once

// The router. Logits and their gradients are in double; every sum has a fixed order, none uses atomics.
//
// The gradient of R takes two passes: entries that chose an expert, in token order, are cut into chunks; a chunk is
// summed by one thread per column, then the chunks of an expert are, ascending.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace foremoe::cuda {

struct RoutedTokens {
  const float* x = nullptr;              // [tokens][hidden]
  const float* router = nullptr;         // [experts][hidden]
  const std::int32_t* expert = nullptr;  // [tokens·k], the device's
  std::int64_t tokens = 0;
  int k = 1;
  int hidden = 0;
};

void router_forward(const RoutedTokens& tokens, float* weight, cudaStream_t stream);

// d_logit [tokens·k] := of each entry, 0 where none is chosen; dx[t] += Σ_j d_logit·R.
struct RouterTokenGradients {
  const float* weight = nullptr;
  const float* d_weight = nullptr;
  double* d_logit = nullptr;
  float* dx = nullptr;
};
void router_token_gradients(const RoutedTokens& tokens, const RouterTokenGradients& gradients, cudaStream_t stream);

struct EntryChunk {
  std::int64_t first = 0;  // into entry
  std::int32_t count = 0;
};
struct ExpertChunks {
  std::int32_t expert = 0;
  std::int32_t first = 0;  // into chunk
  std::int32_t count = 0;
};
struct RouterWeightGradient {
  const std::int32_t* entry = nullptr;   // token·k + j by expert, then ascending
  const EntryChunk* chunk = nullptr;     // [num_chunks]
  const ExpertChunks* expert = nullptr;  // [num_experts], those that are chosen
  std::int32_t num_chunks = 0;
  std::int32_t num_experts = 0;
  const double* d_logit = nullptr;  // [tokens·k]
  double* partial = nullptr;        // [num_chunks][hidden], scratch
  float* d_router = nullptr;        // [experts][hidden], added
};
void router_weight_gradient(const RoutedTokens& tokens, const RouterWeightGradient& gradient, cudaStream_t stream);

struct RouterPick {
  const std::int32_t* token = nullptr;  // [n], the device's
  std::int64_t n = 0;
  int experts = 0;
  std::int32_t* picked = nullptr;  // [n·k], the device's
};
// `tokens.expert` is not read.
void router_pick(const RoutedTokens& tokens, const RouterPick& pick, cudaStream_t stream);

}  // namespace foremoe::cuda
