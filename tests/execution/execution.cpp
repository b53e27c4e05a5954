#include "execution.h"

#include <algorithm>

#include "foremoe/core/random.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/reference/tensor_error.h"
#include "foremoe/runtime/threads/threads_communicator.h"

namespace foremoe::test {
namespace {

std::vector<float> sum_of(const std::vector<std::vector<float>>& parts) {
  std::vector<float> sum(parts.front().size());
  for (const std::vector<float>& part : parts) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
  }
  return sum;
}

// Expects that a failed phase left no gradients.
void expect_no_gradients(const Scenario& scenario, const StepPlan& plan, RankId rank, const MoeModel& model) {
  if (scenario.phase == Phase::kRecompute) return;
  for (int l = 0; l < scenario.layers; ++l) {
    for (int e = 0; e < scenario.experts; ++e) {
      if (plan.home(l, e) != rank) continue;
      const std::vector<float> gradient = model.expert_gradient(LayerId{l}, ExpertId{e});
      EXPECT_TRUE(std::ranges::all_of(gradient, [](float x) { return x == 0; })) << scenario.name() << ", expert " << e;
    }
  }
}

RankResult run_rank(const Scenario& scenario, const Execution& execution, const RandomRoutes& routes,
                    const LoadTable& load, Communicator& communicator) {
  const ModelSize size = model_size(scenario);
  MoeModel model(size, execution.plan.home, communicator);
  const RankTurns turns(execution.plan, load, communicator.rank(), execution.schedule);
  const PhaseParts parts{.turns = turns,
                         .layout = swiglu_layout(size.shape.hidden, size.shape.intermediate),
                         .shape = size.shape,
                         .without_route = rows_without_route(routes, load)};
  RankResult result;
  const HomeExperts& homes = model.homes();
  try {
    PhaseExecutor phase(parts, homes, communicator,
                        {.engine = scenario.engine,
                         .decorate = scenario.decorate,
                         .overlap = scenario.overlap,
                         .most_tokens = scenario.most_tokens,
                         .position_independent = scenario.position_independent});
    result.loss = model.run(phase, {.routes = routes, .micro_steps = scenario.micro_steps, .keep_results = true}, {});
    result.figures = phase.figures();
  } catch (const std::exception&) {
    expect_no_gradients(scenario, execution.plan, communicator.rank(), model);
    throw;
  }
  const bool backward = scenario.phase == Phase::kPolicyUpdate;
  for (int m = 0; m < scenario.micro_steps; ++m) {
    result.output.push_back(model.output(MicroStepId{m}));
    if (backward) result.input_gradient.push_back(model.input_gradient(MicroStepId{m}));
  }
  result.routes_used = Array<std::vector<ExpertId>, 2>(
      {static_cast<std::size_t>(scenario.micro_steps), static_cast<std::size_t>(scenario.layers)});
  result.expert_gradient = Array<std::vector<float>, 2>(
      {static_cast<std::size_t>(scenario.layers), static_cast<std::size_t>(scenario.experts)});
  for (int l = 0; l < scenario.layers; ++l) {
    for (int m = 0; m < scenario.micro_steps; ++m) {
      result.routes_used(m, l) = model.routes_used(MicroStepId{m}, LayerId{l});
    }
    if (!backward) continue;
    result.router_gradient.push_back(model.router_gradient(LayerId{l}));
    for (int e = 0; e < scenario.experts; ++e) {
      if (execution.plan.home(l, e) == communicator.rank()) {
        result.expert_gradient(l, e) = model.expert_gradient(LayerId{l}, ExpertId{e});
      }
    }
  }
  return result;
}

}  // namespace

std::string Scenario::name() const {
  return policy + " " + std::string(to_string(residency)) + " " + std::string(to_string(phase)) +
         " K=" + std::to_string(in_flight) + " G=" + std::to_string(guest_slots) + " path " +
         std::to_string(static_cast<int>(path)) + " depth " + std::to_string(depth) + " seed " + std::to_string(seed);
}

RandomRoutes::RandomRoutes(const Scenario& scenario)
    : topology_(scenario.topology),
      top_k_(scenario.top_k),
      experts_(scenario.experts),
      routes_({static_cast<std::size_t>(scenario.micro_steps), static_cast<std::size_t>(scenario.topology.num_ranks),
               static_cast<std::size_t>(scenario.layers)}) {
  Random random(scenario.seed);
  for (int m = 0; m < scenario.micro_steps; ++m) {
    const auto favourite = static_cast<int>(random.below(static_cast<std::uint64_t>(experts_)));
    for (int s = 0; s < topology_.num_ranks; ++s) {
      const auto tokens = static_cast<int>(random.below(static_cast<std::uint64_t>(scenario.most_tokens) + 1));
      for (int t = 0; t < tokens; ++t) {
        for (int l = 0; l < scenario.layers; ++l) {
          std::vector<ExpertId> row;
          while (static_cast<int>(row.size()) < top_k_) {
            const double u = random.uniform();
            const ExpertId e{(favourite + l + static_cast<int>(u * u * u * experts_)) % experts_};
            if (std::ranges::find(row, e) == row.end()) row.push_back(e);
          }
          if (random.uniform() < scenario.missing) row.assign(row.size(), kNoExpert);
          routes_(m, s, l).insert(routes_(m, s, l).end(), row.begin(), row.end());
        }
      }
    }
  }
}

std::int64_t RandomRoutes::num_tokens(MicroStepId m, RankId source) const {
  return static_cast<std::int64_t>(routes_(m, source, 0).size()) / top_k_;
}

void RandomRoutes::gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const {
  routes = routes_(m, source, l);
}

LoadTable RandomRoutes::load() const {
  LoadTable table{.top_k = top_k_, .ranks_per_node = topology_.ranks_per_node, .name = "random"};
  table.load =
      Array<Tokens, 4>({routes_.extent(0), routes_.extent(2), routes_.extent(1), static_cast<std::size_t>(experts_)});
  for (std::size_t m = 0; m < routes_.extent(0); ++m) {
    for (std::size_t s = 0; s < routes_.extent(1); ++s) {
      for (std::size_t l = 0; l < routes_.extent(2); ++l) {
        for (const ExpertId e : routes_(m, s, l)) {
          if (e != kNoExpert) table.load(m, l, s, e) += Tokens{1};
        }
      }
    }
  }
  return table;
}

ModelSize model_size(const Scenario& scenario) {
  return {.layers = scenario.layers,
          .experts = scenario.experts,
          .top_k = scenario.top_k,
          .shape = {.hidden = scenario.hidden, .intermediate = scenario.intermediate},
          .seed = scenario.seed};
}

StepPlan make_plan(const Scenario& scenario, const LoadTable& load) {
  ThreadPool pool(1);
  const Array<RankId, 2> homes = contiguous_homes(scenario.layers, scenario.experts, scenario.topology.num_ranks);
  const bool vanilla = scenario.policy == "vanilla";
  PlannerOptions options{.guest_slots = vanilla ? 0 : scenario.guest_slots,
                         .residency = scenario.residency,
                         .in_flight = scenario.in_flight};
  StepPlan plan = plan_step({.load = load, .home = homes, .options = options}, pool).plan;
  EXPECT_TRUE(check_plan(plan, load).ok()) << scenario.name();
  return plan;
}

Execution execute(const Scenario& scenario) {
  const RandomRoutes routes(scenario);
  const LoadTable load = routes.load();
  Execution execution{.plan = make_plan(scenario, load), .schedule = {}, .ranks = {}};
  execution.schedule = std::make_shared<const TransferSchedule>(
      make_transfer_schedule(execution.plan, swiglu_layout(scenario.hidden, scenario.intermediate),
                             {.phase = scenario.phase, .path = scenario.path, .depth = scenario.depth}));
  EXPECT_TRUE(check_leases(*execution.schedule, execution.plan).empty()) << scenario.name();

  const int ranks = scenario.topology.num_ranks;
  auto communicators = make_threads_communicators(scenario.topology, std::chrono::seconds(30));
  execution.ranks.resize(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](RankId r) {
    Communicator& communicator = *communicators[r.index()];
    try {
      execution.ranks[r.index()] = run_rank(scenario, execution, routes, load, communicator);
    } catch (const std::exception& error) {
      communicator.give_up(error.what());
      throw;
    }
  });
  return execution;
}

ReferenceResult reference_of(const Scenario& scenario, const Execution& execution) {
  ThreadPool pool(1);
  return ReferenceModel(model_size(scenario), pool)
      .run({.micro_steps = scenario.micro_steps,
            .ranks = scenario.topology.num_ranks,
            .routes = [&](MicroStepId m, RankId s, LayerId l) { return execution.ranks[s.index()].routes_used(m, l); },
            .backward = scenario.phase == Phase::kPolicyUpdate},
           pool);
}

double largest_error(const Execution& execution, const ReferenceResult& reference, const Scenario& scenario) {
  double worst = 0;
  const auto hold = [&](std::span<const float> x, std::span<const double> expected) {
    EXPECT_EQ(x.size(), expected.size());
    worst = std::max(worst, relative_error(x, expected));
  };
  const bool backward = scenario.phase == Phase::kPolicyUpdate;
  for (int m = 0; m < scenario.micro_steps; ++m) {
    for (int r = 0; r < scenario.topology.num_ranks; ++r) {
      const RankResult& result = execution.ranks[static_cast<std::size_t>(r)];
      hold(result.output[static_cast<std::size_t>(m)], reference.output(m, r));
      if (backward) hold(result.input_gradient[static_cast<std::size_t>(m)], reference.input_gradient(m, r));
    }
  }
  if (!backward) return worst;
  for (int l = 0; l < scenario.layers; ++l) {
    for (int e = 0; e < scenario.experts; ++e) {
      hold(execution.ranks[execution.plan.home(l, e).index()].expert_gradient(l, e), reference.expert_gradient(l, e));
    }
    std::vector<std::vector<float>> router;
    for (const RankResult& result : execution.ranks)
      router.push_back(result.router_gradient[static_cast<std::size_t>(l)]);
    hold(sum_of(router), reference.router_gradient[static_cast<std::size_t>(l)]);
  }
  return worst;
}

void expect_same_bits(const Execution& a, const Execution& b, const std::string& what) {
  ASSERT_EQ(a.ranks.size(), b.ranks.size());
  for (std::size_t r = 0; r < a.ranks.size(); ++r) {
    EXPECT_EQ(a.ranks[r].output, b.ranks[r].output) << what << ", outputs of rank " << r;
    EXPECT_EQ(a.ranks[r].input_gradient, b.ranks[r].input_gradient) << what << ", input gradients of rank " << r;
    EXPECT_EQ(a.ranks[r].expert_gradient, b.ranks[r].expert_gradient) << what << ", expert gradients of rank " << r;
    EXPECT_EQ(a.ranks[r].router_gradient, b.ranks[r].router_gradient) << what << ", router gradients of rank " << r;
    EXPECT_EQ(a.ranks[r].loss, b.ranks[r].loss) << what << ", loss of rank " << r;
  }
}

}  // namespace foremoe::test
