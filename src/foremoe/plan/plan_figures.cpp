#include "foremoe/plan/plan_figures.h"

#include <algorithm>
#include <cmath>

#include "foremoe/core/error.h"
#include "foremoe/plan/assign_rows.h"
#include "foremoe/rollout/load_statistics.h"

namespace foremoe {
namespace {

// One (layer, micro-step) pair.
struct Pair {
  LayerQuotas quotas;
  ArrayView<const Tokens, 2> load;  // [source rank][expert]
  Topology topology;
};

struct RankLoads {
  std::int64_t largest = 0;
  std::int64_t largest_padded = 0;  // each replica's tokens rounded up to a multiple of align
  std::int64_t total = 0;
};

RankLoads rank_loads(const Pair& pair, std::int64_t align) {
  RankLoads loads;
  for (int r = 0; r < pair.topology.num_ranks; ++r) {
    std::int64_t sum = 0;
    std::int64_t padded = 0;
    for (const Tokens quota : pair.quotas.slot_tokens.row(r)) {
      sum += quota.value;
      padded += (quota.value + align - 1) / align * align;
    }
    loads.largest = std::max(loads.largest, sum);
    loads.largest_padded = std::max(loads.largest_padded, padded);
    loads.total += sum;
  }
  return loads;
}

// Tokens that the busiest node must send (sum of its surpluses) or receive (sum of its deficits), whichever is more.
std::int64_t busiest_node_link(const Pair& pair) {
  const std::size_t num_experts = pair.load.extent(1);
  Array<Tokens, 2> surplus({static_cast<std::size_t>(pair.topology.num_nodes()), num_experts});  // load − quota
  for (int r = 0; r < pair.topology.num_ranks; ++r) {
    const std::span<Tokens> of_node = surplus.row(pair.topology.node_of(RankId{r}));
    for (std::size_t e = 0; e < num_experts; ++e) of_node[e] += pair.load(r, e);
    const std::span<const ExpertId> experts = pair.quotas.slot_expert.row(r);
    for (std::size_t s = 0; s < experts.size(); ++s) {
      if (experts[s] != kNoExpert) of_node[experts[s].index()] -= pair.quotas.slot_tokens(r, s);
    }
  }
  std::int64_t busiest = 0;
  for (int n = 0; n < pair.topology.num_nodes(); ++n) {
    std::int64_t sent = 0;
    std::int64_t received = 0;
    for (const Tokens x : surplus.row(n)) (x.value > 0 ? sent : received) += std::abs(x.value);
    busiest = std::max({busiest, sent, received});
  }
  return busiest;
}

std::int64_t busiest_node_link_rows(const Pair& pair, const SourceTokens& tokens, MicroStepId m, LayerId l) {
  const RoutedLayer routed = route_tokens({pair.load, pair.quotas, pair.topology});
  const TokenDispatch dispatch = token_dispatch(routed, {tokens, m, l, pair.topology});
  const std::size_t num_nodes = static_cast<std::size_t>(pair.topology.num_nodes());
  std::vector<std::int64_t> sent(num_nodes);
  std::vector<std::int64_t> received(num_nodes);
  for (int r = 0; r < pair.topology.num_ranks; ++r) {
    const std::size_t from = pair.topology.node_of(RankId{r}).index();
    for (std::size_t to = 0; to < num_nodes; ++to) {
      if (to == from) continue;
      sent[from] += dispatch.to_node(r, to).value;
      received[to] += dispatch.to_node(r, to).value;
    }
  }
  return std::max(std::ranges::max(sent), std::ranges::max(received));
}

void add_balance_and_traffic(const StepPlan& plan, const LoadTable& load, const FiguresOptions& options,
                             PlanFigures& figures) {
  std::optional<SourceTokens> tokens;
  if (options.tokens) tokens.emplace(options.tokens->trace, options.tokens->batching);
  const Topology topology{.num_ranks = plan.num_ranks(), .ranks_per_node = plan.ranks_per_node};

  std::vector<double> max_vio, avg_vio, rho, rho_lower_bound, rho_padded, node_link_tokens, node_link_rows;  // [pair]
  std::vector<std::int64_t> of_expert(static_cast<std::size_t>(load.num_experts()));
  for (int t = 0; t < plan.num_events(); ++t) {
    if (plan.in_flight > 1 && plan.event_pass[t] == Pass::kBackward) continue;  // counted at its forward event
    const MicroStepId m = plan.event_micro_step[t];
    for (int l = 0; l < plan.num_layers(); ++l) {
      if (options.pool != nullptr) options.pool->throw_if_cancelled();
      const Pair pair{layer_quotas(plan, EventId{t}, LayerId{l}), load.load[m][l], topology};
      const RankLoads loads = rank_loads(pair, options.align);
      if (loads.total == 0) continue;
      load.expert_loads(m, LayerId{l}, of_expert);
      const LoadViolation violation =
          load_violation(std::span(of_expert).first(static_cast<std::size_t>(load.experts_in(LayerId{l}))));
      max_vio.push_back(violation.max_vio);
      avg_vio.push_back(violation.avg_vio);
      const double mean = static_cast<double>(loads.total) / topology.num_ranks;
      rho.push_back(static_cast<double>(loads.largest) / mean);
      rho_lower_bound.push_back(std::ceil(mean) / mean);
      rho_padded.push_back(static_cast<double>(loads.largest_padded) / mean);
      figures.max_rank_tokens = std::max(figures.max_rank_tokens, loads.largest);
      node_link_tokens.push_back(static_cast<double>(busiest_node_link(pair)));
      if (tokens) {
        node_link_rows.push_back(static_cast<double>(busiest_node_link_rows(pair, *tokens, m, LayerId{l})));
      }
    }
  }
  figures.max_vio = spread_of(std::move(max_vio), 0).mean;
  figures.avg_vio = spread_of(std::move(avg_vio), 0).mean;
  figures.rho = spread_of(std::move(rho), 1);
  figures.rho_lower_bound_mean = spread_of(std::move(rho_lower_bound), 1).mean;
  figures.rho_padded = spread_of(std::move(rho_padded), 1);
  figures.node_link_tokens = spread_of(std::move(node_link_tokens), 0);
  if (tokens) figures.node_link_rows = spread_of(std::move(node_link_rows), 0);
}

void add_copies_and_guests(const StepPlan& plan, const ThreadPool* pool, PlanFigures& figures) {
  std::int64_t guests = 0;  // with quota, over all events, layers and ranks
  for (int l = 0; l < plan.num_layers(); ++l) {
    if (pool != nullptr) pool->throw_if_cancelled();
    CopyFinder copies(plan, LayerId{l});
    for (int t = 0; t < plan.num_events(); ++t) {
      for (int r = 0; r < plan.num_ranks(); ++r) {
        const int copied = static_cast<int>(copies.into(EventId{t}, RankId{r}).size());
        figures.copies += copied;
        figures.copies_max_per_rank = std::max(figures.copies_max_per_rank, copied);
        for (int s = 0; s < plan.num_slots(); ++s) {
          const ExpertId e = plan.slot_expert(t, l, r, s);
          guests += e != kNoExpert && plan.home(l, e) != RankId{r} && plan.slot_tokens(t, l, r, s) > Tokens{0};
        }
      }
    }
  }
  const double layer_events = std::max(1.0, static_cast<double>(plan.num_events()) * plan.num_layers());
  figures.copies_per_layer_event = static_cast<double>(figures.copies) / layer_events;
  figures.guests_per_layer = static_cast<double>(guests) / layer_events;
}

int count_home_moves(const StepPlan& plan, const LoadTable& load, ArrayView<const RankId, 2> initial_home) {
  int moves = 0;
  for (int l = 0; l < plan.num_layers(); ++l) {
    for (int e = 0; e < plan.num_experts(); ++e) {
      const RankId initial = initial_home.data() ? initial_home(l, e) : load.contiguous_home(LayerId{l}, ExpertId{e});
      moves += plan.home(l, e) != initial;
    }
  }
  return moves;
}

}  // namespace

Spread spread_of(std::vector<double> samples, double empty) {
  if (samples.empty()) return {empty, empty, empty};
  std::ranges::sort(samples);
  double sum = 0;
  for (const double x : samples) sum += x;
  const double position = 0.99 * static_cast<double>(samples.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const auto above = std::min(below + 1, samples.size() - 1);
  const double fraction = position - static_cast<double>(below);
  return {.mean = sum / static_cast<double>(samples.size()),
          .p99 = samples[below] + (samples[above] - samples[below]) * fraction,
          .max = samples.back()};
}

PlanFigures plan_figures(const StepPlan& plan, const LoadTable& load, const FiguresOptions& options) {
  expect_valid(plan, load);
  if (options.align < 1) throw InputError({.field = "align"}, "must be at least 1");
  if (options.initial_home.data() != nullptr && options.initial_home.shape() != plan.home.shape()) {
    throw InputError({.field = "initial_home"}, "is not [layers, experts] of the plan");
  }
  PlanFigures figures{.policy = plan.policy,
                      .residency = plan.residency,
                      .events = plan.num_events(),
                      .micro_steps = plan.num_micro_steps(),
                      .layers = plan.num_layers(),
                      .ranks = plan.num_ranks(),
                      .ranks_per_node = plan.ranks_per_node,
                      .experts = plan.num_experts(),
                      .guest_slots = plan.guest_slots,
                      .in_flight = plan.in_flight,
                      .align = options.align};
  add_balance_and_traffic(plan, load, options, figures);
  add_copies_and_guests(plan, options.pool, figures);
  figures.home_moves = count_home_moves(plan, load, options.initial_home);
  return figures;
}

}  // namespace foremoe
