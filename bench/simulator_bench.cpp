// Time to simulate a policy update of 1,024 ranks × 60 layers × 64 micro-steps with a given plan: 1,024 experts, one
// per rank, and two guest slots, on 128 nodes. The load of one micro-step is repeated, because the full table would
// need 32 GB; all rows are counted again in every micro-step. A seeded draw places the guests. Each guest serves half
// of its expert's tokens; one guest in eight is replaced at every micro-step.
//
// Arguments: ranks, layers, micro-steps. The time is for one simulation on all processors.

#include <benchmark/benchmark.h>

#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/planner/planner.h"
#include "foremoe/sim/simulation.h"

namespace foremoe {
namespace {

constexpr int kGuestSlots = 2;
constexpr int kRanksPerNode = 8;

struct Size {
  int ranks = 0;
  int layers = 0;
  int micro_steps = 0;
};

LoadTable one_micro_step(const Size& size, Random& random) {
  LoadTable table{
      .load = Array<Tokens, 4>({1, static_cast<std::size_t>(size.layers), static_cast<std::size_t>(size.ranks),
                                static_cast<std::size_t>(size.ranks)}),
      .top_k = 8,
      .ranks_per_node = kRanksPerNode};
  for (int l = 0; l < size.layers; ++l) {
    std::vector<std::uint64_t> popularity;  // per expert
    for (int e = 0; e < size.ranks; ++e) popularity.push_back(8 + random.below(random.below(8) == 0 ? 200 : 40));
    for (int s = 0; s < size.ranks; ++s) {
      for (int e = 0; e < size.ranks; ++e) {
        table.load(0, l, s, e) =
            Tokens{static_cast<std::int64_t>(random.below(popularity[static_cast<std::size_t>(e)]))};
      }
    }
  }
  return table;
}

class Planner {
 public:
  Planner(const LoadTable& load, const Size& size, Random& random) : load_(load), size_(size), random_(random) {
    const ExecutionOrder order = make_execution_order(size.micro_steps, 1);
    plan_ = {.policy = "drawn",
             .residency = Residency::kResident,
             .guest_slots = kGuestSlots,
             .ranks_per_node = kRanksPerNode,
             .event_micro_step = order.micro_step,
             .event_pass = order.pass,
             .home = contiguous_homes(size.layers, size.ranks, size.ranks)};
    const std::array shape{static_cast<std::size_t>(size.micro_steps), static_cast<std::size_t>(size.layers),
                           static_cast<std::size_t>(size.ranks), std::size_t{1 + kGuestSlots}};
    plan_.slot_expert = Array<ExpertId, 4>(shape, kNoExpert);
    plan_.slot_tokens = Array<Tokens, 4>(shape);
  }

  StepPlan plan() {
    for (int l = 0; l < size_.layers; ++l) {
      std::vector<std::int64_t> load(static_cast<std::size_t>(size_.ranks));
      load_.expert_loads(MicroStepId{0}, LayerId{l}, load);
      for (int m = 0; m < size_.micro_steps; ++m) plan(m, l, load);
    }
    return std::move(plan_);
  }

 private:
  void plan(int m, int l, const std::vector<std::int64_t>& load) {
    std::vector<bool> has_guest(load.size());  // at most one per expert
    for (int r = 0; r < size_.ranks; ++r) {
      plan_.slot_expert(m, l, r, 0) = ExpertId{r};
      plan_.slot_tokens(m, l, r, 0) = Tokens{load[static_cast<std::size_t>(r)]};
    }
    for (int r = 0; r < size_.ranks; ++r) {
      for (int g = 1; g <= kGuestSlots; ++g) {
        const bool stays = m > 0 && random_.below(8) != 0;
        const ExpertId drawn{random_.below(load.size())};
        const ExpertId e = stays ? plan_.slot_expert(m - 1, l, r, g) : drawn;
        const int other = kGuestSlots + 1 - g;
        const bool moves = !stays && m > 0 && plan_.slot_expert(m - 1, l, r, other) == e;  // a guest keeps its slot
        if (e == kNoExpert || e.value == r || has_guest[e.index()] || moves) continue;
        has_guest[e.index()] = true;
        const Tokens half{load[e.index()] / 2};
        plan_.slot_expert(m, l, r, g) = e;
        plan_.slot_tokens(m, l, r, g) = half;
        plan_.slot_tokens(m, l, e.value, 0) -= half;
      }
    }
  }

  const LoadTable& load_;
  Size size_;
  Random& random_;
  StepPlan plan_;
};

CostModel cost_of(const Size& size) {
  ModelShape model = *find_model_shape("DeepSeek-V3");
  model.moe_layers = size.layers;
  model.experts = size.ranks;
  return {find_cluster("h100"), model};
}

void simulate_update(benchmark::State& state) {
  const Size size{static_cast<int>(state.range(0)), static_cast<int>(state.range(1)), static_cast<int>(state.range(2))};
  Random random(1);
  const LoadTable load = one_micro_step(size, random);
  const StepPlan plan = Planner(load, size, random).plan();
  const CostModel cost = cost_of(size);
  ThreadPool pool;
  SimulatedPhase phase;
  for (auto _ : state) {
    phase = simulate_phase({.load = load, .plan = plan, .cost = cost, .repeat_load = true},
                           {.phase = Phase::kPolicyUpdate, .pool = &pool});
  }
  state.counters["modelled_seconds"] = phase.seconds;
  state.counters["copies"] = static_cast<double>(phase.copies);
  state.counters["exposed_seconds"] = phase.parts.exposed_copies;
}

BENCHMARK(simulate_update)
    ->Args({64, 60, 64})
    ->Args({1024, 60, 64})
    ->Unit(benchmark::kSecond)
    ->Iterations(1)
    ->UseRealTime();

}  // namespace
}  // namespace foremoe
