#include "foremoe/runtime/cuda/cuda_router.h"

#include <algorithm>

#include "foremoe/runtime/cuda/cuda_check.h"

namespace foremoe::cuda {
namespace {

constexpr std::int32_t kChunk =
    256;  // entries; long enough that few partial sums are stored, short enough to share out

}  // namespace

CudaRouter::CudaRouter(cudaStream_t stream, StagingRing& ring, Allocate allocate)
    : stream_(stream), ring_(ring), allocate_(std::move(allocate)) {}

RoutedTokens CudaRouter::on_device(const Tokens& tokens) {
  return {.x = tokens.x,
          .router = tokens.router,
          .expert = ring_.stage(tokens.expert),
          .tokens = static_cast<std::int64_t>(tokens.expert.size()) / tokens.k,
          .k = tokens.k,
          .hidden = tokens.hidden};
}

// Grows by half as much again, so that micro-steps of slightly different sizes do not each allocate.
std::byte* CudaRouter::scratch(DeviceMemory& memory, std::int64_t bytes) {
  if (memory.bytes() < Bytes{bytes}) {
    wait_for(stream_);
    memory = {};
    memory = allocate_(Bytes{bytes + bytes / 2});
  }
  return memory.data();
}

void CudaRouter::forward(const Tokens& tokens, float* weight) { router_forward(on_device(tokens), weight, stream_); }

// A counting sort: within an expert entries stay in token order.
void CudaRouter::sort_by_expert(std::span<const std::int32_t> expert) {
  const std::int32_t greatest = expert.empty() ? -1 : *std::max_element(expert.begin(), expert.end());
  const auto num_experts = static_cast<std::size_t>(std::max(greatest, -1) + 1);
  first_.assign(num_experts + 1, 0);
  for (const std::int32_t e : expert) {
    if (e >= 0) ++first_[static_cast<std::size_t>(e) + 1];
  }
  chunks_.clear();
  experts_.clear();
  for (std::size_t e = 0; e < num_experts; ++e) {
    const std::int32_t count = first_[e + 1], begin = first_[e];
    first_[e + 1] += begin;
    if (count == 0) continue;
    experts_.push_back({.expert = static_cast<std::int32_t>(e),
                        .first = static_cast<std::int32_t>(chunks_.size()),
                        .count = (count + kChunk - 1) / kChunk});
    for (std::int32_t i = 0; i < count; i += kChunk) {
      chunks_.push_back({.first = begin + i, .count = std::min(kChunk, count - i)});
    }
  }
  entry_.resize(static_cast<std::size_t>(first_.back()));
  for (std::size_t i = 0; i < expert.size(); ++i) {
    if (expert[i] < 0) continue;
    std::int32_t& next = first_[static_cast<std::size_t>(expert[i])];  // first_ is spent by this
    entry_[static_cast<std::size_t>(next++)] = static_cast<std::int32_t>(i);
  }
}

void CudaRouter::backward(const Tokens& tokens, const Gradients& gradients) {
  if (tokens.expert.empty()) return;
  const RoutedTokens routed = on_device(tokens);
  const auto doubles = [&](DeviceMemory& memory, std::size_t n) {
    return reinterpret_cast<double*>(scratch(memory, static_cast<std::int64_t>(n * sizeof(double))));
  };
  double* d_logit = doubles(d_logit_, tokens.expert.size());
  router_token_gradients(
      routed, {.weight = gradients.weight, .d_weight = gradients.d_weight, .d_logit = d_logit, .dx = gradients.dx},
      stream_);
  sort_by_expert(tokens.expert);
  if (experts_.empty()) return;
  router_weight_gradient(routed,
                         {.entry = ring_.stage(std::span<const std::int32_t>(entry_)),
                          .chunk = ring_.stage(std::span<const EntryChunk>(chunks_)),
                          .expert = ring_.stage(std::span<const ExpertChunks>(experts_)),
                          .num_chunks = static_cast<std::int32_t>(chunks_.size()),
                          .num_experts = static_cast<std::int32_t>(experts_.size()),
                          .d_logit = d_logit,
                          .partial = doubles(partial_, chunks_.size() * static_cast<std::size_t>(tokens.hidden)),
                          .d_router = gradients.d_router},
                         stream_);
}

const std::int32_t* CudaRouter::pick(const Tokens& tokens, int experts, std::span<const std::int32_t> token) {
  const std::size_t bytes = token.size() * static_cast<std::size_t>(tokens.k) * sizeof(std::int32_t);
  auto* picked = reinterpret_cast<std::int32_t*>(scratch(picked_, static_cast<std::int64_t>(bytes)));
  const RoutedTokens routed{.x = tokens.x, .router = tokens.router, .k = tokens.k, .hidden = tokens.hidden};
  router_pick(
      routed,
      {.token = ring_.stage(token), .n = static_cast<std::int64_t>(token.size()), .experts = experts, .picked = picked},
      stream_);
  return picked;
}

}  // namespace foremoe::cuda
