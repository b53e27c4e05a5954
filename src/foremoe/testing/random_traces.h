#pragma once

// Small random traces of every type, for tests.

#include <cstddef>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

struct RandomTrace {
  RouteType type = RouteType::kU8;
  std::vector<std::int64_t> lengths;  // tokens of each sequence; the last token of each has no route
  int num_layers = 3;
  int top_k = 2;
  int num_experts = 8;
  std::uint64_t seed = 1;
};

// Returns the trace and its storage, bytes [tokens][layers][top_k], for tests to corrupt.
inline std::pair<RoutingTrace, std::shared_ptr<std::vector<std::byte>>> make_random_trace(const RandomTrace& wanted) {
  RoutingTrace trace{.name = "random",
                     .type = wanted.type,
                     .storage = {},
                     .num_layers = wanted.num_layers,
                     .top_k = wanted.top_k,
                     .num_experts = wanted.num_experts,
                     .cu_seqlens = {0},
                     .prompt_lengths = {},
                     .group_ids = {},
                     .micro_step = {},
                     .rank = {},
                     .layer_ids = {},
                     .model = {},
                     .origin = {}};
  for (const std::int64_t length : wanted.lengths) trace.cu_seqlens.push_back(trace.cu_seqlens.back() + length);
  trace.num_tokens = trace.cu_seqlens.back();
  for (int l = 0; l < wanted.num_layers; ++l) trace.layer_ids.push_back(l);

  Random random(wanted.seed);
  const auto bytes = std::make_shared<std::vector<std::byte>>();
  std::vector<std::int32_t> ids(static_cast<std::size_t>(wanted.num_experts));  // a permutation of all experts
  std::iota(ids.begin(), ids.end(), 0);
  for (std::size_t s = 0; s < wanted.lengths.size(); ++s) {
    for (std::int64_t t = 0; t < wanted.lengths[s]; ++t) {
      for (int l = 0; l < wanted.num_layers; ++l) {
        for (std::size_t k = 0; k < static_cast<std::size_t>(wanted.top_k); ++k) {
          std::swap(ids[k], ids[k + random.below(ids.size() - k)]);
          const std::int32_t entry = t + 1 == wanted.lengths[s] ? -1 : ids[k];
          const std::size_t at = bytes->size();
          bytes->resize(at + size_of(wanted.type));
          std::memcpy(bytes->data() + at, &entry, size_of(wanted.type));
        }
      }
    }
  }
  trace.routes = bytes->data();
  trace.storage = bytes;
  return {std::move(trace), bytes};
}

}  // namespace foremoe
