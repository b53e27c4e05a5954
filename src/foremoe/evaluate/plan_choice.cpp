#include "foremoe/evaluate/plan_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <tuple>

namespace foremoe {

std::string to_string(const PlanTrial& trial) {
  return trial.planned ? fmt::format("{}, {}", to_string(trial.residency), to_string(trial.prefer)) : "no plan";
}

std::string PlanChoice::why() const {
  std::string text;
  for (const PlanTrial& trial : trials) {
    text += fmt::format("{}{} {:.4g} s", text.empty() ? "" : "; ", to_string(trial), trial.seconds);
  }
  return text;
}

std::vector<PlanTrial> trials_among(ChooseAmong among, const PlannerOptions& options) {
  std::vector<PlanTrial> trials;
  if (among != ChooseAmong::kPlans) trials.push_back({.planned = false});
  const auto add = [&](Residency residency, Prefer prefer) {
    trials.push_back({.residency = residency, .prefer = prefer});
  };
  if (among == ChooseAmong::kGiven || among == ChooseAmong::kDefault) {
    add(options.residency, preference(options));
    if (among == ChooseAmong::kGiven) return trials;
    if (!options.prefer) add(options.residency, Prefer::kLinks);
    if (options.residency != Residency::kStatic) add(Residency::kStatic, preference(options));
    return trials;
  }
  for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared}) {
    if (options.prefer) {
      add(residency, *options.prefer);
    } else {
      for (const Prefer prefer : {Prefer::kBalance, Prefer::kLinks, Prefer::kTime}) add(residency, prefer);
    }
  }
  return trials;
}

PlannerOptions options_of(const PlanTrial& trial, PlannerOptions options) {
  options.residency = trial.residency;
  options.prefer = trial.prefer;
  if (trial.prefer != Prefer::kTime) options.copy_price = options.free_copies = std::nullopt;
  return options;
}

PlanChoice choose_plan(std::vector<PlanTrial> trials, std::optional<Bytes> budget) {
  assert(!trials.empty());
  const auto fits = [&](const PlanTrial& trial) { return !budget || trial.memory <= *budget; };
  const bool any = std::ranges::any_of(trials, fits);
  const auto before = [&](const PlanTrial& a, const PlanTrial& b) {
    if (any && fits(a) != fits(b)) return fits(a);
    return any ? std::tuple(a.seconds, a.memory) < std::tuple(b.seconds, b.memory) : a.memory < b.memory;
  };
  const auto best = static_cast<std::size_t>(std::ranges::min_element(trials, before) - trials.begin());
  return {.trials = std::move(trials), .chosen = best, .fits = any};
}

double estimated_planning_seconds(const LoadTable& load, Residency residency, bool fills_arena) {
  // Seconds per rank, from the times of the 58 cases of lab/regret.py.
  constexpr double kOfMicroStep = 60e-6;
  constexpr double kOfSharedMicroStep = 250e-6;
  constexpr double kUntilSharedStarts = 1e-3;
  double per_rank = kUntilSharedStarts;
  if (residency != Residency::kShared) {
    per_rank = kOfMicroStep * load.num_micro_steps();
  } else if (fills_arena) {
    per_rank = std::max(per_rank, kOfSharedMicroStep * load.num_micro_steps());
  }
  return per_rank * load.num_ranks();
}

}  // namespace foremoe
