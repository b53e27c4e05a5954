// Cost of outputs whose bits do not depend on a row's position: one expert's forward on a CPU, in tiles of fixed height
// compared with whole blocks. The two variants alternate, so that `ratio` (of their medians) is robust against other
// load. The printed time is the sum of both. `tile` is the smaller tile height of the expert's two products.
//
//   position_independence_bench   [hidden/intermediate/rows]

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/runtime/cpu/experts.h"
#include "foremoe/runtime/cpu/row_tiles.h"

namespace {

using namespace foremoe;

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void forward(benchmark::State& state) {
  const ExpertShape shape{.hidden = static_cast<int>(state.range(0)), .intermediate = static_cast<int>(state.range(1))};
  const std::int64_t rows = state.range(2);
  cpu::ExpertsWorkspace whole(shape), in_tiles(shape, /*position_independent=*/true);
  Random random(1);
  const auto values = [&](std::int64_t n) {
    std::vector<float> result(static_cast<std::size_t>(n));
    for (float& v : result) v = static_cast<float>(random.uniform() - 0.5);
    return result;
  };
  const std::int64_t matrix = std::int64_t{shape.hidden} * shape.intermediate;
  const std::vector<float> gate_up = values(2 * matrix), down = values(matrix), x = values(rows * shape.hidden);
  std::vector<float> kept = values(rows * 2 * shape.intermediate), y = values(rows * shape.hidden);
  const cpu::ExpertRows expert{.first_row = 0, .rows = rows, .gate_up = gate_up.data(), .down = down.data()};

  std::vector<double> seconds[2];  // [in tiles]
  const auto run = [&](cpu::ExpertsWorkspace& workspace) {
    const auto begin = std::chrono::steady_clock::now();
    cpu::experts_forward({&expert, 1}, {.x = x.data(), .gate_up = kept.data(), .y = y.data()}, workspace);
    seconds[workspace.position_independent ? 1 : 0].push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  };
  run(whole);
  run(in_tiles);
  for (auto& of_mode : seconds) of_mode.clear();
  for (auto _ : state) {
    run(whole);
    run(in_tiles);
  }
  state.counters["ratio"] = median(seconds[1]) / median(seconds[0]);
  state.counters["tile"] = std::min(cpu::tile_height(2 * shape.intermediate, shape.hidden),
                                    cpu::tile_height(shape.hidden, shape.intermediate));
}

}  // namespace

BENCHMARK(forward)
    ->ArgsProduct({{64}, {32, 128}, {16, 64, 500}})
    ->ArgsProduct({{512}, {256}, {64, 500}})
    ->ArgsProduct({{2048}, {768}, {64, 512}})
    ->Unit(benchmark::kMicrosecond)
    ->MinTime(0.2);
