#include "foremoe/evaluate/pair_figures.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "foremoe/plan/step_plan.h"
#include "foremoe/policy/systems/finemoe/token_scheduler.h"

namespace foremoe {

namespace {

double mean_of(double sum, std::size_t n) { return n == 0 ? 0 : sum / static_cast<double>(n); }

void add_pair(std::span<const Tokens> loads, Tokens total, PairFigures& sums) {
  const double mean = mean_of(static_cast<double>(total.value), loads.size());
  const auto most = static_cast<double>(std::ranges::max(loads).value);
  sums.share_of_bucket[rho_bucket(most / mean)] += 1;
  sums.straggler += most - mean;
  sums.waste += (most - mean) / most;
}

void add_routing(const RoutingProblem& problem, PairFigures& sums) {
  using finemoe::Locality;
  const auto volume = [&](Locality locality) {
    return finemoe::communication_volume(finemoe::route_by_algorithm_1(problem, locality), problem.topology);
  };
  sums.sent_without_locality += static_cast<double>(volume(Locality::kNone).ranks);
  sums.sent_with_rank_locality += static_cast<double>(volume(Locality::kRank).ranks);
  const finemoe::CommunicationVolume by_node = volume(Locality::kNode);
  sums.sent_with_node_locality += static_cast<double>(by_node.ranks);
  sums.between_nodes += static_cast<double>(by_node.nodes);
}

void add_copies(const StepPlan& plan, LayerId layer, PairFigures& sums) {
  CopyFinder copies(plan, layer);
  for (int event = 0; event < plan.num_events(); ++event) {
    std::size_t of_event = 0;
    std::size_t most = 0;
    for (int r = 0; r < plan.num_ranks(); ++r) {
      const std::size_t into_rank = copies.into(EventId{event}, RankId{r}).size();
      of_event += into_rank;
      most = std::max(most, into_rank);
    }
    if (event > 0) sums.copies_after_first_event += static_cast<double>(of_event);
    sums.busiest_receiver += static_cast<double>(most);
  }
}

}  // namespace

PairFigures pair_figures(const StepPlan& plan, const LoadTable& load, bool routed) {
  const Array<Tokens, 3> loads = planned_loads(plan);
  PairFigures figures;
  std::size_t pairs = 0;
  for (int l = 0; l < plan.num_layers(); ++l) {
    add_copies(plan, LayerId{l}, figures);
    std::vector<bool> seen(static_cast<std::size_t>(load.num_micro_steps()));
    for (int event = 0; event < plan.num_events(); ++event) {
      const MicroStepId m = plan.event_micro_step[static_cast<std::size_t>(event)];
      if (seen[m.index()]) continue;  // the other pass has the same quotas
      seen[m.index()] = true;
      const std::span<const Tokens> of_ranks = loads.row(m, l);
      const Tokens total = std::accumulate(of_ranks.begin(), of_ranks.end(), Tokens{});
      if (total == Tokens{0}) continue;
      ++pairs;
      add_pair(of_ranks, total, figures);
      if (!routed) continue;
      add_routing({.load = load.load.view()[m][LayerId{l}],
                   .quotas = layer_quotas(plan, EventId{event}, LayerId{l}),
                   .topology = load.topology()},
                  figures);
    }
  }
  const auto layers = static_cast<std::size_t>(plan.num_layers());
  const auto events = static_cast<std::size_t>(plan.num_events());
  for (double& share : figures.share_of_bucket) share = mean_of(share, pairs);
  for (double* const sum :
       {&figures.straggler, &figures.waste, &figures.sent_without_locality, &figures.sent_with_rank_locality,
        &figures.sent_with_node_locality, &figures.between_nodes}) {
    *sum = mean_of(*sum, pairs);
  }
  figures.copies_after_first_event = mean_of(figures.copies_after_first_event, layers * (events - 1));
  figures.busiest_receiver = mean_of(figures.busiest_receiver, layers * events);
  return figures;
}

LoadStability load_stability(const LoadTable& load, int steps) {
  const auto experts = static_cast<std::size_t>(load.num_experts());
  const int per_step = load.num_micro_steps() / steps;
  // Half the sum of |p − q| over two loads' shares.
  const auto change = [](std::span<const std::int64_t> a, std::span<const std::int64_t> b) {
    const auto of_a = static_cast<double>(std::reduce(a.begin(), a.end()));
    const auto of_b = static_cast<double>(std::reduce(b.begin(), b.end()));
    if (of_a == 0 || of_b == 0) return 0.0;
    double sum = 0;
    for (std::size_t e = 0; e < a.size(); ++e) {
      sum += std::abs(static_cast<double>(a[e]) / of_a - static_cast<double>(b[e]) / of_b);
    }
    return sum / 2;
  };
  LoadStability stability;
  for (int l = 0; l < load.num_layers(); ++l) {
    std::vector<std::int64_t> step_before, before(experts), now(experts);
    for (int step = 0; step < steps; ++step) {
      std::vector<std::int64_t> sum(experts);
      for (int i = 0; i < per_step; ++i) {
        load.expert_loads(MicroStepId{step * per_step + i}, LayerId{l}, now);
        for (std::size_t e = 0; e < experts; ++e) sum[e] += now[e];
        if (i > 0) stability.micro_step_change += change(before, now);
        before = now;
      }
      const auto total = static_cast<double>(std::reduce(sum.begin(), sum.end()));
      if (total > 0) stability.hottest += static_cast<double>(std::ranges::max(sum)) * load.num_experts() / total;
      if (step > 0) stability.step_change += change(step_before, sum);
      step_before = std::move(sum);
    }
  }
  const auto layers = static_cast<std::size_t>(load.num_layers());
  const auto of_steps = static_cast<std::size_t>(steps);
  stability.hottest = mean_of(stability.hottest, layers * of_steps);
  stability.step_change =
      steps == 1 ? std::numeric_limits<double>::quiet_NaN() : mean_of(stability.step_change, layers * (of_steps - 1));
  stability.micro_step_change =
      mean_of(stability.micro_step_change, layers * of_steps * static_cast<std::size_t>(per_step - 1));
  return stability;
}

}  // namespace foremoe
