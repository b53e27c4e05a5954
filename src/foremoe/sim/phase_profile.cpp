#include "foremoe/sim/phase_profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/plan/assign_rows.h"
#include "foremoe/plan/expected_dispatch.h"

namespace foremoe {

namespace {

void refuse(const std::string& field, const std::string& what) { throw InputError({.field = field}, what); }

void expect_same(const char* field, int plan, int other, const char* who) {
  if (plan != other) refuse(field, fmt::format("the plan has {}, {} has {}", plan, who, other));
}

void expect_fit(const SimulationInput& input) {
  const StepPlan& plan = input.plan;
  const LoadTable& load = input.load;
  const ModelShape& model = input.cost.model();
  expect_valid(load, load.name);
  expect_valid(plan);
  const int micro_steps = plan.num_micro_steps();
  if (input.rows == Rows::kToken && input.tokens == nullptr) {
    refuse("rows", fmt::format("token needs the routes of a trace; {} is a load or a part of a trace", load.name));
  }
  if (input.rows == Rows::kToken && input.cost.options().dispatch == Dispatch::kRow) {
    refuse("rows", "token has no effect with `dispatch` row");
  }
  if (input.repeat_load ? load.num_micro_steps() < 1 : micro_steps != load.num_micro_steps()) {
    refuse("micro_steps", fmt::format("the plan has {}, the load has {}", micro_steps, load.num_micro_steps()));
  }
  expect_same("layers", plan.num_layers(), load.num_layers(), "the load");
  expect_same("ranks", plan.num_ranks(), load.num_ranks(), "the load");
  expect_same("experts", plan.num_experts(), load.num_experts(), "the load");
  expect_same("experts", plan.num_experts(), model.experts, "the model");
  if (load.top_k != model.top_k) {
    refuse("top_k",
           fmt::format("a token of the load chooses {} experts, a token of the model {}", load.top_k, model.top_k));
  }
  if (plan.num_layers() > model.moe_layers) {
    refuse("layers",
           fmt::format("the plan has {}, but the model has only {} MoE layers", plan.num_layers(), model.moe_layers));
  }
}

void expect_lengths_fit(const SimulationInput& input) {
  const auto [micro_steps, ranks] = input.squared_lengths.shape();
  const auto needed = static_cast<std::size_t>(input.load.num_micro_steps());
  if (micro_steps >= needed && ranks == input.load.load.extent(2)) return;
  refuse("squared_lengths", fmt::format("[{}, {}], the load has {} micro-steps and {} ranks", micro_steps, ranks,
                                        needed, input.load.num_ranks()));
}

// Returns the first event of each micro-step. The micro-step has the slots and quotas of this event.
std::vector<EventId> event_of_micro_step(const StepPlan& plan) {
  std::vector<EventId> event(static_cast<std::size_t>(plan.num_micro_steps()));
  for (int t = plan.num_events() - 1; t >= 0; --t)
    event[plan.event_micro_step[static_cast<std::size_t>(t)].index()] = EventId{t};
  return event;
}

RankRows mean_of(const std::vector<RankRows>& rows) {
  RankRows sum;
  for (const RankRows& r : rows) {
    sum.sent_to_peers += r.sent_to_peers;
    sum.received_from_peers += r.received_from_peers;
    sum.sent_to_nodes += r.sent_to_nodes;
    sum.received_from_nodes += r.received_from_nodes;
  }
  const auto ranks = static_cast<std::int64_t>(rows.size());
  return {sum.sent_to_peers / ranks, sum.received_from_peers / ranks, sum.sent_to_nodes / ranks,
          sum.received_from_nodes / ranks};
}

// Seconds to launch the experts' kernels, independent of the number of rows; the rest of their time is work.
double kernels(const CostModel& cost, Pass direction) {
  Cluster cluster = cost.cluster();
  cluster.kernel_seconds = 0;
  const Tokens one{1};
  return cost.experts({&one, 1}, direction) -
         CostModel(cluster, cost.model(), cost.options()).experts({&one, 1}, direction);
}

// Mean number of experts of the rows with a route, rounded, [layer]: fewer than top-k if rows are short.
std::vector<int> experts_of_row(const LoadTable& load) {
  std::int64_t tokens = 0;
  for (const Tokens of_rank : load.tokens.flat()) tokens += of_rank.value;
  const std::int64_t rows = tokens - load.missing_rows / load.num_layers();  // with a route, in one layer
  std::vector<int> experts;
  for (int l = 0; l < load.num_layers(); ++l) {
    experts.push_back(load.top_k_in(LayerId{l}));
    std::int64_t assignments = 0;
    for (int m = 0; m < load.num_micro_steps(); ++m) {
      for (const Tokens of_expert : load.load[m][l].flat()) assignments += of_expert.value;
    }
    if (rows > 0) experts.back() = std::clamp(static_cast<int>((assignments + rows / 2) / rows), 1, experts.back());
  }
  return experts;
}

class Profiler {
 public:
  Profiler(const SimulationInput& input, Phase phase, const OnlineWork& online, ThreadPool& pool)
      : input_(input),
        phase_(phase),
        online_(online),
        pool_(pool),
        experts_of_row_(experts_of_row(input.load)),
        event_(event_of_micro_step(input.plan)),
        kernels_forward_(kernels(input.cost, Pass::kForward)),
        kernels_backward_(kernels(input.cost, Pass::kBackward)) {
    if (input.tokens != nullptr && input.cost.options().dispatch == Dispatch::kToken)
      tokens_.emplace(input.tokens->trace, input.tokens->batching);
  }

  PhaseProfile profile() {
    const StepPlan& plan = input_.plan;
    const auto micro_steps = static_cast<std::size_t>(plan.num_micro_steps());
    const auto layers = static_cast<std::size_t>(plan.num_layers());
    const auto ranks = static_cast<std::size_t>(plan.num_ranks());
    result_.layers.resize(micro_steps * layers);
    result_.tokens = Array<Tokens, 2>({micro_steps, ranks});
    const Array<Tokens, 2> of_load = tokens_of_ranks(input_.load);
    for (std::size_t m = 0; m < micro_steps; ++m) {
      std::ranges::copy(of_load.row(m % of_load.extent(0)), result_.tokens.row(m).begin());
    }
    result_.most_rows = Array<Tokens, 2>({micro_steps, ranks});
    result_.total_rows = Array<Tokens, 2>({micro_steps, ranks});
    scratch_.resize(pool_.num_threads());
    pool_.parts().begin(std::ssize(result_.layers));
    pool_.for_each_index(micro_steps, [&](std::size_t m, std::size_t worker) {
      for (std::size_t l = 0; l < layers; ++l) {
        profile(MicroStepId{m}, LayerId{l}, scratch_[worker]);
        pool_.parts().add();
      }
    });
    add_rows_between();
    add_squared_lengths();
    return std::move(result_);
  }

 private:
  struct Scratch {
    RowWorkspace workspace;
    LayerRows rows;
    std::vector<Tokens> replicas;
    std::vector<Tokens> guests;  // for own_experts_first
    std::vector<Tokens> of_expert;
    Array<std::int64_t, 2> between;     // [from][to] node, counted by this thread
    Array<ExpertId, 2> home_expert;     // [rank][expert of the rank], for plans_after_dispatch
    Array<Tokens, 2> home_tokens;       // the same shape
    std::vector<std::size_t> num_home;  // [rank]
  };

  void profile(MicroStepId m, LayerId l, Scratch& scratch) {
    const LoadTable& load = input_.load;
    const MicroStepId of_load{m.value % load.num_micro_steps()};
    const StepPlan& plan = input_.plan;
    const LayerQuotas quotas = layer_quotas(plan, event_[m.index()], l);
    const RoutingProblem problem{.load = load.load[of_load][l],
                                 .quotas = online_.plans_after_dispatch ? quotas_of_homes(l, quotas, scratch) : quotas,
                                 .topology = {.num_ranks = plan.num_ranks(), .ranks_per_node = plan.ranks_per_node},
                                 .rows = input_.rows};
    count_rows_of(problem, of_load, l, scratch);
    LayerProfile& layer = result_.layers[m.index() * static_cast<std::size_t>(plan.num_layers()) + l.index()];
    if (online_.plans_after_dispatch) pass_on(l, quotas, layer);
    add(scratch);
    layer.rows = scratch.rows.ranks;
    for (const RankRows& rows : layer.rows) layer.exchange = std::max(layer.exchange, input_.cost.exchange(rows));
    layer.ideal_exchange = input_.cost.exchange(mean_of(layer.rows));
    if (input_.cost.options().dispatch == Dispatch::kRow) {
      layer.sorting = input_.cost.sort(Tokens{std::ranges::max(scratch.rows.assignments)});
    }
    count_computed(m, quotas, layer);
    time_experts(Pass::kForward, l, quotas, scratch, layer.forward);
    if (phase_ == Phase::kPolicyUpdate) time_experts(Pass::kBackward, l, quotas, scratch, layer.backward);
  }

  void count_rows_of(const RoutingProblem& problem, MicroStepId m, LayerId l, Scratch& scratch) const {
    if (input_.cost.options().dispatch == Dispatch::kRow) {
      count_rows(problem, scratch.workspace, scratch.rows);
      return;
    }
    const RoutedLayer routed = route_tokens(problem);
    count_token_rows(problem,
                     tokens_ ? token_dispatch(routed, {*tokens_, m, l, problem.topology, problem.rows})
                             : expected_token_dispatch(routed, {.load = problem.load,
                                                                .top_k = experts_of_row_[l.index()],
                                                                .groups = input_.cost.model().groups,
                                                                .topology = problem.topology,
                                                                .fitted = input_.fitted}),
                     scratch.rows);
  }

  // Quotas for an exchange without guests: all rows of an expert go to its home.
  LayerQuotas quotas_of_homes(LayerId l, const LayerQuotas& quotas, Scratch& scratch) const {
    const StepPlan& plan = input_.plan;
    const auto ranks = static_cast<std::size_t>(plan.num_ranks());
    scratch.of_expert.assign(static_cast<std::size_t>(plan.num_experts()), Tokens{});
    for (std::size_t i = 0; i < quotas.slot_tokens.size(); ++i) {
      const ExpertId expert = quotas.slot_expert.flat()[i];
      if (expert != kNoExpert) scratch.of_expert[expert.index()] += quotas.slot_tokens.flat()[i];
    }
    const std::array shape{ranks, scratch.of_expert.size() / ranks};
    if (scratch.home_expert.shape() != shape) {
      scratch.home_expert = Array<ExpertId, 2>(shape);
      scratch.home_tokens = Array<Tokens, 2>(shape);
    }
    scratch.num_home.assign(ranks, 0);
    for (int e = 0; e < plan.num_experts(); ++e) {
      const RankId home = plan.home(l, e);
      const std::size_t at = scratch.num_home[home.index()]++;
      scratch.home_expert(home, at) = ExpertId{e};
      scratch.home_tokens(home, at) = scratch.of_expert[static_cast<std::size_t>(e)];
    }
    return {.slot_expert = scratch.home_expert, .slot_tokens = scratch.home_tokens};
  }

  void pass_on(LayerId l, const LayerQuotas& quotas, LayerProfile& layer) const {
    for (std::size_t r = 0; r < quotas.slot_tokens.extent(0); ++r) {
      for (std::size_t s = 0; s < quotas.slot_tokens.extent(1); ++s) {
        const std::int64_t rows = quotas.slot_tokens(r, s).value;
        if (rows == 0) continue;
        const RankId home = input_.plan.home(l, quotas.slot_expert(r, s));
        if (home == RankId{r}) continue;
        layer.passed_on.push_back({.home = home, .guest = RankId{r}, .rows = rows});
      }
    }
  }

  void add(Scratch& scratch) const {
    const auto from = scratch.rows.between_nodes.flat();
    if (scratch.between.empty()) scratch.between = Array<std::int64_t, 2>(scratch.rows.between_nodes.shape());
    const auto to = scratch.between.flat();
    for (std::size_t i = 0; i < from.size(); ++i) to[i] += from[i];
  }

  void count_computed(MicroStepId m, const LayerQuotas& quotas, LayerProfile& layer) {
    for (std::size_t r = 0; r < layer.rows.size(); ++r) {
      Tokens computed;
      for (const Tokens quota : quotas.slot_tokens.row(r)) computed += quota;
      result_.most_rows(m, r) = std::max(result_.most_rows(m, r), computed);
      result_.total_rows(m, r) += computed;
      layer.most_tokens = std::max(layer.most_tokens, computed);
    }
  }

  void time_experts(Pass direction, LayerId l, const LayerQuotas& quotas, Scratch& scratch,
                    LayerProfile::Experts& experts) {
    const std::size_t ranks = quotas.slot_tokens.extent(0);
    experts.seconds.resize(ranks);
    if (online_.own_experts_first) experts.own_first.resize(ranks);
    scratch.of_expert.assign(static_cast<std::size_t>(input_.plan.num_experts()), Tokens{});
    for (std::size_t r = 0; r < ranks; ++r) {
      scratch.replicas.clear();
      scratch.guests.clear();
      for (std::size_t s = 0; s < quotas.slot_tokens.extent(1); ++s) {
        const Tokens quota = quotas.slot_tokens(r, s);
        if (quota == Tokens{0}) continue;
        const ExpertId expert = quotas.slot_expert(r, s);
        const bool apart = online_.own_experts_first && input_.plan.home(l, expert) != RankId{r};
        (apart ? scratch.guests : scratch.replicas).push_back(quota);
        scratch.of_expert[expert.index()] += quota;
      }
      experts.seconds[r] = input_.cost.experts(scratch.replicas, direction);
      if (online_.own_experts_first) {
        experts.own_first[r] = experts.seconds[r];
        experts.seconds[r] += input_.cost.experts(scratch.guests, direction);
      }
      experts.slowest = std::max(experts.slowest, experts.seconds[r]);
      experts.sum += experts.seconds[r];
    }
    experts.ideal = ideal_experts(direction, scratch);
  }

  // Seconds if all products were divided equally among the ranks.
  double ideal_experts(Pass direction, Scratch& scratch) const {
    std::erase(scratch.of_expert, Tokens{0});
    if (scratch.of_expert.empty()) return 0;
    const double kernels = direction == Pass::kForward ? kernels_forward_ : kernels_backward_;
    return (input_.cost.experts(scratch.of_expert, direction) - kernels) / input_.plan.num_ranks() + kernels;
  }

  void add_squared_lengths() {
    const bool known = attention_of(input_.squared_lengths.size() > 0, input_.cost) == Attention::kSequences;
    if (known) expect_lengths_fit(input_);
    result_.squared_lengths = Array<double, 2>(result_.tokens.shape());
    for (std::size_t m = 0; m < result_.tokens.extent(0); ++m) {
      const std::size_t of_load = m % static_cast<std::size_t>(input_.load.num_micro_steps());
      for (std::size_t r = 0; r < result_.tokens.extent(1); ++r) {
        result_.squared_lengths(m, r) =
            known ? input_.squared_lengths(of_load, r) : input_.cost.squared_lengths(result_.tokens(m, r));
      }
    }
  }

  void add_rows_between() {
    for (const Scratch& scratch : scratch_) {
      if (scratch.between.empty()) continue;
      if (result_.rows_between.empty()) result_.rows_between = Array<std::int64_t, 2>(scratch.between.shape());
      for (std::size_t i = 0; i < scratch.between.size(); ++i) {
        result_.rows_between.flat()[i] += scratch.between.flat()[i];
      }
    }
  }

  const SimulationInput& input_;
  Phase phase_;
  const OnlineWork& online_;
  ThreadPool& pool_;
  std::optional<SourceTokens> tokens_;
  std::vector<int> experts_of_row_;  // [layer]
  std::vector<EventId> event_;       // [micro_step]
  double kernels_forward_;
  double kernels_backward_;
  std::vector<Scratch> scratch_;  // [worker]
  PhaseProfile result_;
};

}  // namespace

PhaseProfile profile_phase(const SimulationInput& input, Phase phase, const OnlineWork& online, ThreadPool& pool) {
  expect_fit(input);
  return Profiler(input, phase, online, pool).profile();
}

bool same_profile(const StepPlan& a, const StepPlan& b) {
  const std::vector<EventId> of_a = event_of_micro_step(a);
  const std::vector<EventId> of_b = event_of_micro_step(b);
  if (of_a.size() != of_b.size() || a.home != b.home || a.ranks_per_node != b.ranks_per_node) return false;
  for (std::size_t m = 0; m < of_a.size(); ++m) {
    if (!std::ranges::equal(a.slot_expert[of_a[m]].flat(), b.slot_expert[of_b[m]].flat())) return false;
    if (!std::ranges::equal(a.slot_tokens[of_a[m]].flat(), b.slot_tokens[of_b[m]].flat())) return false;
  }
  return true;
}

StepProfile profile_step(const SimulationInput& input, const StepPlan* recompute_plan, const OnlineWork& online,
                         ThreadPool& pool) {
  const auto profile = [&](const SimulationInput& planned, Phase phase) {
    return std::make_shared<const PhaseProfile>(profile_phase(planned, phase, online, pool));
  };
  if (recompute_plan != nullptr) {
    const SimulationInput recompute = with_plan(input, *recompute_plan);
    expect_fit(recompute);
    expect_fit(input);
    if (!same_profile(*recompute_plan, input.plan)) {
      return {profile(recompute, Phase::kRecompute), profile(input, Phase::kPolicyUpdate)};
    }
  }
  const std::shared_ptr<const PhaseProfile> both = profile(input, Phase::kPolicyUpdate);
  return {both, both};
}

PhaseProfile in_more_micro_steps(std::span<const PhaseProfile* const> groups) {
  PhaseProfile all{.rows_between = Array<std::int64_t, 2>(groups.front()->rows_between.shape())};
  const std::size_t factor = groups.size();
  const std::size_t micro_steps = groups.front()->tokens.extent(0);
  const std::size_t layers = groups.front()->layers.size() / micro_steps;
  const auto interleave = [&](auto PhaseProfile::*table) {
    auto& to = all.*table;
    to = std::remove_reference_t<decltype(to)>({micro_steps * factor, (groups.front()->*table).extent(1)});
    for (std::size_t m = 0; m < to.extent(0); ++m) {
      std::ranges::copy((groups[m % factor]->*table).row(m / factor), to.row(m).begin());
    }
  };
  interleave(&PhaseProfile::tokens);
  interleave(&PhaseProfile::squared_lengths);
  interleave(&PhaseProfile::most_rows);
  interleave(&PhaseProfile::total_rows);
  for (std::size_t m = 0; m < micro_steps * factor; ++m) {
    const auto first = groups[m % factor]->layers.begin() + static_cast<std::ptrdiff_t>(m / factor * layers);
    all.layers.insert(all.layers.end(), first, first + static_cast<std::ptrdiff_t>(layers));
  }
  for (const PhaseProfile* group : groups) {
    std::ranges::transform(all.rows_between.flat(), group->rows_between.flat(), all.rows_between.flat().begin(),
                           std::plus{});
  }
  return all;
}

}  // namespace foremoe
