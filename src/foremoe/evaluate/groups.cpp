#include "foremoe/evaluate/groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace foremoe {
namespace {

// One policy's rows in one group.
struct GroupRows {
  std::vector<double> rho;  // of the pairs of layer and micro-step with load
  double busiest = 0;       // Σ over layers and micro-steps of the busiest rank's
  double sum = 0;
};

GroupRows rows_of(const StepPlan& plan) {
  GroupRows rows;
  const Array<Tokens, 3> loads = planned_loads(plan);
  for (std::size_t m = 0; m < loads.extent(0); ++m) {
    for (std::size_t l = 0; l < loads.extent(1); ++l) {
      const std::span<const Tokens> ranks = loads.row(m, l);
      if (const auto rho = imbalance(ranks)) rows.rho.push_back(*rho);
      rows.busiest += static_cast<double>(std::ranges::max(ranks).value);
      for (const Tokens tokens : ranks) rows.sum += static_cast<double>(tokens.value);
    }
  }
  return rows;
}

// Completes the slowest group's simulated step, of one policy.
void complete_step(const std::vector<const Evaluation*>& groups, Evaluation& whole) {
  SimulatedStep& step = *whole.step;
  double vanilla = 0;
  double vanilla_rl = 0;
  double vanilla_framework = 0;
  for (const Evaluation* e : groups) {
    vanilla = std::max(vanilla, e->speedup_over_vanilla * e->step->step_seconds);
    vanilla_rl = std::max(vanilla_rl, e->rl_step_speedup * e->step->rl_step_seconds);
    if (e->framework_step_seconds) {
      vanilla_framework = std::max(vanilla_framework, e->framework_speedup * *e->framework_step_seconds);
      whole.framework_step_seconds = std::max(*whole.framework_step_seconds, *e->framework_step_seconds);
    }
    step.peak_tokens_per_rank = std::max(step.peak_tokens_per_rank, e->step->peak_tokens_per_rank);
    step.memory_bytes_per_rank = std::max(step.memory_bytes_per_rank, e->step->memory_bytes_per_rank);
    whole.largest_micro_batch_tokens = std::min(whole.largest_micro_batch_tokens, e->largest_micro_batch_tokens);
  }
  whole.speedup_over_vanilla = speedup(vanilla, step.step_seconds);
  whole.placed_speedup = speedup(vanilla, step.placed_step_seconds);
  whole.rl_step_speedup = speedup(vanilla_rl, step.rl_step_seconds);
  if (whole.framework_step_seconds) {
    whole.framework_speedup = speedup(vanilla_framework, *whole.framework_step_seconds);
  }
}

void add_policy(std::size_t policy, JobEvaluation& job) {
  std::vector<const Evaluation*> groups;
  for (const std::vector<Evaluation>& group : job.groups) groups.push_back(&group[policy]);
  const auto failed = std::ranges::find_if(groups, [](const auto* e) { return !e->planned() || !e->check.ok(); });
  if (failed != groups.end()) {
    job.policies.push_back(**failed);
    job.slowest.push_back({.group = static_cast<std::size_t>(failed - groups.begin())});
    return;
  }
  std::vector<double> rho;
  std::vector<GroupRows> rows;
  std::vector<double> durations;
  for (const Evaluation* e : groups) {
    rows.push_back(rows_of(e->plan));
    rho.insert(rho.end(), rows.back().rho.begin(), rows.back().rho.end());
    durations.push_back(e->step ? e->step->step_seconds : rows.back().busiest);
  }
  const auto slowest = static_cast<std::size_t>(std::ranges::max_element(durations) - durations.begin());
  Evaluation& whole = job.policies.emplace_back(*groups[slowest]);
  whole.figures.rho = spread_of(std::move(rho), 1);
  double duration = 0;  // mean of the groups
  double sum = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    whole.figures.max_rank_tokens = std::max(whole.figures.max_rank_tokens, groups[g]->figures.max_rank_tokens);
    duration += durations[g] / static_cast<double>(groups.size());
    sum += rows[g].sum / static_cast<double>(groups.size());
  }
  if (whole.step) complete_step(groups, whole);
  job.slowest.push_back(
      {.group = slowest,
       .why = fmt::format("{:.3f}× the mean group's {}, {:.3f}× its tokens, ρ {:.4f} (all: {:.4f})",
                          speedup(durations[slowest], duration), whole.step ? "step" : "busiest ranks",
                          speedup(rows[slowest].sum, sum), groups[slowest]->figures.rho.mean, whole.figures.rho.mean)});
}

FitPlace in_job(FitPlace place, int first_rank) {
  place.rank = RankId{place.rank.value + first_rank};
  return place;
}

void raise_peaks(const std::vector<FitPeak>& group, std::vector<FitPeak>& all) {
  for (std::size_t i = 0; i < group.size(); ++i) {
    all[i].rows = std::max(all[i].rows, group[i].rows);
    all[i].memory = std::max(all[i].memory, group[i].memory);
  }
}

FitOfPlan whole_of(const JobFit& job, FitOfPlan Fit::*of) {
  const auto memory = [&](const Fit& f) { return (f.*of).most_memory.memory; };
  const auto most = std::ranges::max_element(job.groups, {}, memory) - job.groups.begin();
  FitOfPlan all = job.groups[static_cast<std::size_t>(most)].*of;
  all.most_memory = in_job(all.most_memory, static_cast<int>(most) * job.ep);
  all.most_rows.rows = Tokens{-1};
  all.exceeds.reset();
  all.ranks.clear();
  const auto order = [](const FitPlace& p) { return std::tuple(p.phase, p.micro_step, -p.memory.value); };
  for (int first_rank = 0; const Fit& fit : job.groups) {
    const FitOfPlan& group = fit.*of;
    if (group.most_rows.rows > all.most_rows.rows) all.most_rows = in_job(group.most_rows, first_rank);
    if (group.exceeds && (!all.exceeds || order(*group.exceeds) < order(*all.exceeds))) {
      all.exceeds = in_job(*group.exceeds, first_rank);
    }
    all.largest_micro_batch = std::min(all.largest_micro_batch, group.largest_micro_batch);
    all.ranks.insert(all.ranks.end(), group.ranks.begin(), group.ranks.end());
    raise_peaks(group.layers, all.layers);
    raise_peaks(group.micro_steps, all.micro_steps);
    for (std::size_t i = 0; i < all.capacities.size(); ++i) {
      std::optional<double>& smallest = all.capacities[i].smallest;  // none: no value suffices for some group
      const std::optional<double>& other = group.capacities[i].smallest;
      smallest = smallest && other ? std::max(smallest, other) : std::nullopt;
    }
    first_rank += job.ep;
  }
  return all;
}

}  // namespace

JobEvaluation over_groups(std::vector<std::vector<Evaluation>> evaluations, int ep) {
  if (ep == 0) return {.policies = std::move(evaluations.front())};
  JobEvaluation job{.ep = ep, .groups = std::move(evaluations)};
  for (std::size_t p = 0; p < job.groups.front().size(); ++p) add_policy(p, job);
  return job;
}

JobFit over_groups(std::vector<Fit> fits, int ep) {
  if (ep == 0) return {.whole = std::move(fits.front())};
  JobFit job{.ep = ep, .groups = std::move(fits)};
  const auto fewest = [](const Fit& f) { return f.fewest_guest_slots.value_or(kUnlimited); };
  job.whole = *std::ranges::max_element(job.groups, {}, fewest);  // its trials are the ones of the job
  job.whole.now = whole_of(job, &Fit::now);
  job.whole.planned = whole_of(job, &Fit::planned);
  job.whole.mean_tokens = {};
  for (const Fit& fit : job.groups) job.whole.mean_tokens += fit.mean_tokens;
  job.whole.mean_tokens = Tokens{job.whole.mean_tokens.value / static_cast<std::int64_t>(job.groups.size())};
  return job;
}

}  // namespace foremoe
