#pragma once

// A cluster and a model with round numbers, and small steps on them, for tests.

#include <algorithm>
#include <utility>
#include <vector>

#include "foremoe/cluster/cost_model.h"
#include "foremoe/core/random.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/planner/planner.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe::sim_test {

// Memory accesses and kernel launches take no time; only arithmetic does. Links are equal and have no latency.
inline Cluster round_cluster(int ranks_per_node = 2) {
  constexpr LinkSpeed kLink{.bytes_per_second = 8000, .latency_seconds = 0};
  return {.name = "round",
          .ranks_per_node = ranks_per_node,
          .flops_per_second = 60'000,  // 100 rows of the experts below per second
          .gemm_efficiency = 1,
          .attention_efficiency = 1,
          .memory_bytes_per_second = 1e30,
          .memory = Bytes{1'000'000},
          .row_tile = 1,
          .kernel_seconds = 0,
          .peers = kLink,
          .network = kLink,
          .host = kLink,
          .ranks_per_switch = 1,
          .switch_bytes_per_second = 1e30,
          .host_memory_bytes_per_second = 1e30};
}

// An expert has 300 parameters, 600 bytes and 600 operations per row. A row has 20 bytes.
inline ModelShape round_model(int layers, int experts, int top_k = 1) {
  return {.name = "round",
          .moe_layers = layers,
          .experts = experts,
          .top_k = top_k,
          .hidden = 10,
          .intermediate = 10,
          .vocabulary = 1,
          .attention = {.heads = 1, .kv_heads = 1, .key_width = 1, .value_width = 1}};
}

// Every row is sent directly to the rank that computes it.
inline CostOptions round_options() { return {.sequence_tokens = 2, .dispatch = Dispatch::kRow}; }

// load: [micro_step][source][expert], rows of the only layer.
inline LoadTable one_layer(const std::vector<std::vector<std::vector<int>>>& load, int ranks_per_node = 2) {
  LoadTable table{.load = Array<Tokens, 4>({load.size(), 1, load[0].size(), load[0][0].size()}),
                  .top_k = 1,
                  .ranks_per_node = ranks_per_node,
                  .name = "one layer"};
  for (std::size_t m = 0; m < load.size(); ++m) {
    for (std::size_t r = 0; r < load[m].size(); ++r) {
      for (std::size_t e = 0; e < load[m][r].size(); ++e) table.load(m, 0, r, e) = Tokens{load[m][r][e]};
    }
  }
  return table;
}

struct LoadShape {
  int micro_steps = 3;
  int layers = 2;
  int ranks = 4;
  int experts = 8;
  int ranks_per_node = 2;
};

inline LoadTable random_load(const LoadShape& shape, Random& random) {
  LoadTable table{
      .load = Array<Tokens, 4>({static_cast<std::size_t>(shape.micro_steps), static_cast<std::size_t>(shape.layers),
                                static_cast<std::size_t>(shape.ranks), static_cast<std::size_t>(shape.experts)}),
      .top_k = 1,
      .ranks_per_node = shape.ranks_per_node,
      .name = "random"};
  for (Tokens& tokens : table.load.flat()) {
    tokens = Tokens{static_cast<std::int64_t>(random.below(4) == 0 ? random.below(90) : random.below(12))};
  }
  return table;
}

// Returns a plan with only homes, each serving its expert's whole load, and G empty guest slots for tests to fill.
inline StepPlan homes_plan(const LoadTable& load, int guest_slots, Residency residency = Residency::kResident,
                           int in_flight = 1) {
  const ExecutionOrder order = make_execution_order(load.num_micro_steps(), in_flight);
  const int homes = load.num_experts() / load.num_ranks();
  StepPlan plan{.policy = "by hand",
                .residency = residency,
                .guest_slots = guest_slots,
                .ranks_per_node = load.ranks_per_node,
                .in_flight = in_flight,
                .event_micro_step = order.micro_step,
                .event_pass = order.pass,
                .home = contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks())};
  const std::array shape{static_cast<std::size_t>(order.num_events()), load.load.extent(1), load.load.extent(2),
                         static_cast<std::size_t>(homes + guest_slots)};
  plan.slot_expert = Array<ExpertId, 4>(shape, kNoExpert);
  plan.slot_tokens = Array<Tokens, 4>(shape);
  for (int t = 0; t < order.num_events(); ++t) {
    for (int l = 0; l < load.num_layers(); ++l) {
      for (int e = 0; e < load.num_experts(); ++e) {
        const int rank = e / homes;
        plan.slot_expert(t, l, rank, e % homes) = ExpertId{e};
        for (int s = 0; s < load.num_ranks(); ++s) {
          plan.slot_tokens(t, l, rank, e % homes) += load.load(order.micro_step[static_cast<std::size_t>(t)], l, s, e);
        }
      }
    }
  }
  return plan;
}

}  // namespace foremoe::sim_test
