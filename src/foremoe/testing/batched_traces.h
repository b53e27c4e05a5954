#pragma once

// Recorded routes for tests, with their batching and load.

#include <cstring>
#include <numeric>

#include "foremoe/core/random.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe::test {

struct CountedTrace : BatchedTrace {
  LoadTable load;
};

// Makes a U8 trace from [token][layer][top_k] expert ids, with 255 in missing rows.
inline RoutingTrace trace_of(std::vector<std::uint8_t> routes, RoutingTrace shape) {
  auto owned = std::make_shared<std::vector<std::uint8_t>>(std::move(routes));
  shape.type = RouteType::kU8;
  shape.routes = reinterpret_cast<const std::byte*>(owned->data());
  shape.storage = owned;
  shape.num_tokens = shape.cu_seqlens.back();
  return shape;
}

inline LoadTable load_of(const RoutingTrace& trace, const Batching& batching) {
  LoadTable table{.top_k = trace.top_k, .ranks_per_node = batching.ranks_per_node};
  table.load = Array<Tokens, 4>({std::size_t(batching.num_micro_steps), std::size_t(trace.num_layers),
                                 std::size_t(batching.num_ranks), std::size_t(trace.num_experts)});
  std::vector<ExpertId> route(trace.top_k);
  for (int s = 0; s < trace.num_sequences(); ++s) {
    for (std::int64_t token = trace.cu_seqlens[s]; token < trace.cu_seqlens[s + 1]; ++token) {
      for (int l = 0; l < trace.num_layers; ++l) {
        trace.route(token, LayerId{l}, route);
        for (const ExpertId e : route) {
          if (e >= ExpertId{0}) table.load(batching.micro_step[s], l, batching.rank[s], e) += Tokens{1};
        }
      }
    }
  }
  return table;
}

// Two micro-steps, two layers, four ranks on two nodes, or others on nodes of two, eight experts or others, top-3.
// Experts with low ids are popular. The last token of every sequence has no route.
inline CountedTrace random_trace(std::uint64_t seed, int num_sequences = 20, int num_ranks = 4, int num_experts = 8) {
  Random random(seed);
  CountedTrace result;
  Batching& batching = result.batching;
  batching = {.num_micro_steps = 2, .num_ranks = num_ranks, .ranks_per_node = 2};
  RoutingTrace shape{.num_layers = 2, .top_k = 3, .num_experts = num_experts, .cu_seqlens = {0}};
  std::vector<std::uint8_t> routes;
  for (int s = 0; s < num_sequences; ++s) {
    batching.micro_step.emplace_back(random.below(2));
    batching.rank.emplace_back(random.below(static_cast<std::uint64_t>(num_ranks)));
    const int length = 1 + static_cast<int>(random.below(6));
    shape.cu_seqlens.push_back(shape.cu_seqlens.back() + length);
    for (int token = 0; token < length; ++token) {
      for (int l = 0; l < shape.num_layers; ++l) {
        std::vector<std::uint8_t> row;
        while (static_cast<int>(row.size()) < shape.top_k) {
          const double u = random.uniform();
          const auto e = static_cast<std::uint8_t>(u * u * num_experts);
          if (std::count(row.begin(), row.end(), e) == 0) row.push_back(e);
        }
        if (token == length - 1) row.assign(shape.top_k, 255);
        routes.insert(routes.end(), row.begin(), row.end());
      }
    }
  }
  result.trace = trace_of(std::move(routes), shape);
  result.load = load_of(result.trace, batching);
  return result;
}

}  // namespace foremoe::test
