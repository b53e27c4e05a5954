// Speed of counting and validating recorded routes on one core, in ids per second. The Zipf-like routes in memory have
// the shape of Qwen3-30B-A3B (48 layers, top-8, U8 for 128 experts) or DeepSeek-V3 (58 layers, 256 experts, U16).
// bench/count_routes_numpy.py counts the first shape with numpy.bincount per layer.
//
//   count_routes_bench --benchmark_min_time=1

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/rollout/count_routes.h"

namespace foremoe {
namespace {

constexpr std::int64_t kTokens = 16'384;

// Draws distinct experts per row, with low ids more frequent. Every 512th token has no route.
std::vector<std::byte> routes(const RouteShape& shape) {
  Random random(1);
  std::vector<std::byte> bytes(static_cast<std::size_t>(kTokens) * shape.token_bytes());
  std::vector<std::int64_t> taken_by(static_cast<std::size_t>(shape.num_experts), -1);
  const std::size_t entry_bytes = size_of(shape.type);
  std::byte* at = bytes.data();
  for (std::int64_t row = 0; row < kTokens * shape.num_layers; ++row) {
    const bool missing = row / shape.num_layers % 512 == 511;
    for (int k = 0; k < shape.top_k; ++k, at += entry_bytes) {
      auto id = static_cast<std::int64_t>(-1);
      while (!missing && (id < 0 || taken_by[static_cast<std::size_t>(id)] == row)) {
        id = static_cast<std::int64_t>(std::pow(random.uniform(), 1.5) * shape.num_experts);
      }
      if (!missing) taken_by[static_cast<std::size_t>(id)] = row;
      std::memcpy(at, &id, entry_bytes);
    }
  }
  return bytes;
}

void count_routes(benchmark::State& state, const RouteShape& shape) {
  const std::vector<std::byte> bytes = routes(shape);
  const auto experts = static_cast<std::size_t>(shape.num_experts);
  const auto tokens_per_call = state.range(0);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(shape.num_layers) * experts);
  RouteCounter counter(shape);
  for (auto _ : state) {
    for (std::int64_t t = 0; t < kTokens; t += tokens_per_call) {
      const std::byte* const first = bytes.data() + static_cast<std::size_t>(t) * shape.token_bytes();
      if (!counter.count(first, tokens_per_call, counts.data(), experts)) state.SkipWithError("malformed routes");
    }
    benchmark::DoNotOptimize(counts.data());
  }
  state.counters["ids/s"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * static_cast<double>(kTokens) * shape.num_layers * shape.top_k,
      benchmark::Counter::kIsRate);
}

constexpr RouteShape kQwen3{.type = RouteType::kU8, .num_layers = 48, .top_k = 8, .num_experts = 128};
constexpr RouteShape kDeepSeekV3{.type = RouteType::kU16, .num_layers = 58, .top_k = 8, .num_experts = 256};
constexpr RouteShape kTop6{.type = RouteType::kU8, .num_layers = 26, .top_k = 6, .num_experts = 64};

// The argument is the number of tokens per call: a whole step, or one sequence of 512 tokens.
BENCHMARK_CAPTURE(count_routes, qwen3_u8, kQwen3)->Arg(kTokens)->Arg(512);
BENCHMARK_CAPTURE(count_routes, deepseek_v3_u16, kDeepSeekV3)->Arg(kTokens)->Arg(512);
BENCHMARK_CAPTURE(count_routes, top6_u8, kTop6)->Arg(kTokens);

}  // namespace
}  // namespace foremoe
