// Measures stage T alone. `assign_cold` computes optimal quotas from a placement and the loads of a draw.
// `relieve_after_copy` measures one trial of stage P.
//
// A cell is defined by the numbers of experts E, ranks R and replicas per expert, and a Zipf exponent. The placement is
// random, with the same number of slots on every rank. A cell's draws form a sequence: expert popularity is a permuted
// Zipf law, permuted again with probability 1/10 before each draw. Loads are multinomial counts (normal approximation).
//
// Every iteration solves the next draw, so that the branch predictor is not trained on the same draw. A draw's time is
// the minimum over passes, because other programs on the machine can only add time. Google Benchmark prints the mean
// over all iterations. FOREMOE_DRAWS=FILE also writes placement, loads, times and objectives of the last cell, so that
// token_assignment_highs.py can solve the same draws.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/core/safetensors.h"
#include "foremoe/planner/token_assignment.h"
#include "foremoe/testing/assignment_at_homes.h"

namespace foremoe::planner {
namespace {

constexpr int kDraws = 300;
constexpr int kPasses = 5;
constexpr double kTokensPerRank = 16384;
constexpr double kPermuteProbability = 0.1;

struct Cell {
  int num_experts;
  int num_ranks;
  int replicas;
  double zipf;
};

template <class T>
void shuffle(std::vector<T>& values, Random& random) {
  for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random.below(i)]);
}

// Shuffles all slots. Expert e takes the slots at [e·replicas, (e + 1)·replicas). A slot on a rank that already has e
// is first swapped with a random slot.
ReplicaGraph random_placement(const Cell& cell, Random& random) {
  const int num_slots = cell.num_experts * cell.replicas;
  const int per_rank = num_slots / cell.num_ranks;
  std::vector<int> slots(num_slots);
  std::iota(slots.begin(), slots.end(), 0);
  shuffle(slots, random);
  const auto repeats = [&](int i) {
    const int first = i - i % cell.replicas;
    return std::any_of(slots.begin() + first, slots.begin() + first + cell.replicas,
                       [&](const int& s) { return &s != &slots[i] && s / per_rank == slots[i] / per_rank; });
  };
  for (bool clean = false; !clean;) {
    clean = true;
    for (int i = 0; i < num_slots; ++i) {
      for (; repeats(i); clean = false) std::swap(slots[i], slots[random.below(slots.size())]);
    }
  }
  ReplicaGraph graph(cell.num_ranks, per_rank, cell.num_experts);
  for (int i = 0; i < num_slots; ++i) graph.put(slots[i], i / cell.replicas);
  return graph;
}

std::vector<std::int64_t> draw_loads(const Cell& cell, Random& random) {
  std::vector<double> popularity(cell.num_experts);
  for (int e = 0; e < cell.num_experts; ++e) popularity[e] = std::pow(e + 1, -cell.zipf);
  const double sum = std::accumulate(popularity.begin(), popularity.end(), 0.0);
  const double tokens = kTokensPerRank * cell.num_ranks;
  std::vector<std::int64_t> load;
  for (int d = 0; d < kDraws; ++d) {
    if (d == 0 || random.uniform() < kPermuteProbability) shuffle(popularity, random);
    for (const double p : popularity) {
      const double mean = tokens * p / sum;
      const double deviation = std::sqrt(mean * (1 - p / sum));
      load.push_back(std::max<std::int64_t>(0, std::llround(mean + deviation * random.normal())));
    }
  }
  return load;  // [draw][expert]
}

void write_draws(const std::string& path, const ReplicaGraph& graph, std::span<const std::int64_t> load,
                 std::span<const double> seconds, std::span<const std::int64_t> max_load) {
  std::vector<std::int32_t> slot_expert;
  for (int s = 0; s < graph.num_slots(); ++s) slot_expert.push_back(graph.expert_in(s));
  const auto num_experts = static_cast<std::size_t>(graph.num_experts());
  const auto num_ranks = static_cast<std::size_t>(graph.num_ranks());
  write_safetensors(path,
                    {tensor_data<std::int32_t>("slot_expert", slot_expert, {num_ranks, slot_expert.size() / num_ranks}),
                     tensor_data<std::int64_t>("load", load, {kDraws, num_experts}),
                     tensor_data<double>("seconds", seconds), tensor_data<std::int64_t>("max_load", max_load)},
                    {});
}

void assign_cold(benchmark::State& state, Cell cell) {
  Random random(2511'16947);
  const ReplicaGraph graph = random_placement(cell, random);
  const std::vector<std::int64_t> load = draw_loads(cell, random);
  std::vector<double> seconds(kDraws, std::numeric_limits<double>::infinity());
  std::vector<std::int64_t> max_load(kDraws);
  Assignment assignment;
  AssignmentSearch search;
  int d = 0;
  while (state.KeepRunning()) {
    const auto of_draw = std::span(load).subspan(static_cast<std::size_t>(d) * cell.num_experts, cell.num_experts);
    const auto start = std::chrono::steady_clock::now();
    const std::int64_t total = std::accumulate(of_draw.begin(), of_draw.end(), std::int64_t{0});
    water_fill(graph, of_draw, assignment);
    max_load[d] = assign_tokens(graph, (total + cell.num_ranks - 1) / cell.num_ranks, assignment, search);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    seconds[d] = std::min(seconds[d], taken.count());
    state.SetIterationTime(taken.count());
    d = (d + 1) % kDraws;
  }
  // NOLINTNEXTLINE(concurrency-mt-unsafe): no thread changes the environment
  if (const char* path = std::getenv("FOREMOE_DRAWS")) write_draws(path, graph, load, seconds, max_load);
}

// A trial of stage P, with E/R homes and two guests per rank and an assignment at the target. A guest is dropped, its
// tokens return to its home, a copy of a popular expert takes the slot, and relieve() moves tokens above the target.
void relieve_after_copy(benchmark::State& state) {
  const auto num_experts = static_cast<int>(state.range(0));
  const auto num_ranks = static_cast<int>(state.range(1));
  constexpr int kGuests = 2;
  const int homes = num_experts / num_ranks;
  Random random(3);
  ReplicaGraph graph(num_ranks, homes + kGuests, num_experts);
  std::vector<std::int64_t> load(num_experts);
  for (int e = 0; e < num_experts; ++e) {
    graph.put(graph.first_slot(e / homes) + e % homes, e);
    load[e] = std::llround(kTokensPerRank / homes * std::exp(0.8 * random.normal()));
  }
  const auto popular = [&] {  // the most popular of four random experts
    auto best = static_cast<int>(random.below(num_experts));
    for (int i = 0; i < 3; ++i) {
      const auto e = static_cast<int>(random.below(num_experts));
      if (load[e] > load[best]) best = e;
    }
    return best;
  };
  for (int r = 0; r < num_ranks; ++r) {
    for (int g = 0; g < kGuests;) {
      if (const int e = popular(); graph.find(e, r) < 0) graph.put(graph.first_slot(r) + homes + g++, e);
    }
  }
  const std::int64_t total = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  const std::int64_t target = total / num_ranks + total / num_ranks / 100;
  Assignment start;
  Assignment trial;
  AssignmentSearch search;
  serve_at_homes(graph, load, start);
  search.relieve(graph, target, start);
  while (state.KeepRunning()) {
    const auto rank = static_cast<int>(random.below(num_ranks));
    const int slot = graph.first_slot(rank) + homes + static_cast<int>(random.below(kGuests));
    const int old = graph.expert_in(slot);
    const int arriving = popular();
    if (graph.find(arriving, rank) >= 0) continue;
    trial.quota = start.quota;
    trial.rank_load = start.rank_load;
    graph.drop(slot);
    const int home = old / homes * graph.slots_per_rank() + old % homes;
    trial.quota[home] += trial.quota[slot];
    trial.rank_load[old / homes] += trial.quota[slot];
    trial.rank_load[rank] -= trial.quota[slot];
    trial.quota[slot] = 0;
    graph.put(slot, arriving);
    benchmark::DoNotOptimize(search.relieve(graph, target, trial));
    graph.drop(slot);
    graph.put(slot, old);
  }
}
BENCHMARK(relieve_after_copy)
    ->ArgNames({"experts", "ranks"})
    ->Args({128, 8})
    ->Args({128, 64})
    ->Args({256, 64})
    ->Args({2048, 1024})
    ->Unit(benchmark::kMicrosecond);

const bool kRegistered = [] {
  for (const int experts : {32, 128, 256}) {
    for (const int ranks : {8, 64}) {
      for (const int replicas : {2, 4}) {
        for (const int halves : {0, 1, 2}) {
          const Cell cell{experts, ranks, replicas, 0.5 * halves};
          const std::string name = "assign_cold/experts:" + std::to_string(experts) +
                                   "/ranks:" + std::to_string(ranks) + "/replicas:" + std::to_string(replicas) +
                                   "/zipf:" +
                                   (halves == 0   ? "0"
                                    : halves == 1 ? "0.5"
                                                  : "1");
          benchmark::RegisterBenchmark(name.c_str(), assign_cold, cell)
              ->Iterations(std::int64_t{kDraws} * kPasses)
              ->UseManualTime()
              ->Unit(benchmark::kMicrosecond);
        }
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace foremoe::planner
