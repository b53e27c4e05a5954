#include "report_gatherer.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "foremoe/core/error.h"
#include "foremoe/plan/step_plan.h"
#include "report_timeline.h"
#include "wording.h"

namespace foremoe::cli {
namespace {

constexpr const char* kOurs = "foremoe";

double mean(const std::vector<double>& values) {
  return values.empty() ? 1 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Of one layer, ρ summed over the micro-steps with load.
double imbalance_of_layer(const Array<Tokens, 3>& loads, LayerId layer) {
  double all = 0;
  for (std::size_t m = 0; m < loads.extent(0); ++m) all += imbalance(loads.row(m, layer)).value_or(0);
  return all;
}

// [micro_step][rank], tokens
Array<std::int64_t, 2> picture(const Array<Tokens, 3>& loads, LayerId layer) {
  Array<std::int64_t, 2> drawn({loads.extent(0), loads.extent(2)});
  for (std::size_t m = 0; m < loads.extent(0); ++m) {
    std::ranges::transform(loads.row(m, layer), drawn.row(m).begin(), &Tokens::value);
  }
  return drawn;
}

report::LoadPictures pictures(const StepPlan& before, const StepPlan& after) {
  const Array<Tokens, 3> loads = planned_loads(before);
  LayerId worst;
  double most = 0;
  for (int l = 0; l < before.num_layers(); ++l) {
    const double here = imbalance_of_layer(loads, LayerId{l});
    if (here > most) {
      most = here;
      worst = LayerId{l};
    }
  }
  return {.layer = worst.value, .before = picture(loads, worst), .after = picture(planned_loads(after), worst)};
}

}  // namespace

ReportGatherer::ReportGatherer(const ReportProblem& problem, const PlannerOptions& options)
    : problem_(problem),
      options_(options),
      baseline_policy_(policy_named(std::string(kReportBaseline))),
      baseline_(simulated(baseline_policy_)) {}

SimulationResult ReportGatherer::checked(const Policy& policy, const PlannerOptions& options) {
  CheckedSimulation simulation = simulate_checked(problem_, policy, options);
  if (simulation.wrong) {
    wrong_.push_back(fmt::format("{}, {}, residency {}: {}", policy.name(), counted(options.guest_slots, "guest slot"),
                                 to_string(options.residency), std::get<Skipped>(simulation.result).reason));
  }
  return std::move(simulation.result);
}

report::PolicyResult ReportGatherer::figures(const Policy& policy, const PlannerOptions& options) {
  SimulationResult result = checked(policy, options);
  if (auto* skipped = std::get_if<Skipped>(&result)) {
    return {.policy = std::string(policy.name()), .skipped = std::move(skipped->reason)};
  }
  return figures_of(std::get<SimulatedPolicy>(result), baseline_.step);
}

SimulatedPolicy ReportGatherer::simulated(const Policy& policy) {
  SimulationResult result = checked(policy, options_);
  if (const auto* skipped = std::get_if<Skipped>(&result)) {
    throw InputError({.file = problem_.input.step.load.name, .field = {}, .index = {}},
                     fmt::format("{}: {}", policy.name(), skipped->reason));
  }
  return std::move(std::get<SimulatedPolicy>(result));
}

void ReportGatherer::compare(const std::vector<const Policy*>& policies, report::Report& out) {
  for (const Policy* policy : policies) {
    out.policies.push_back(policy == &baseline_policy_ ? figures_of(baseline_, baseline_.step)
                                                       : figures(*policy, options_));
  }
  const report::PolicyResult* after = out.find(kOurs);
  if (after == nullptr) {
    for (const report::PolicyResult& p : out.policies) {
      const bool compared = p.policy != kReportBaseline && p.skipped.empty();
      if (compared && (after == nullptr || p.speedup > after->speedup)) after = &p;
    }
  }
  out.before = kReportBaseline;
  out.after = after == nullptr ? out.before : after->policy;
}

void ReportGatherer::look_closer(report::Report& out) {
  const Policy& policy = policy_named(out.after);
  const SimulatedPolicy after = simulated(policy);
  out.loads = pictures(baseline_.measured.plan, after.measured.plan);
  out.traffic = {node_traffic(baseline_), node_traffic(after)};
  const WindowChoice window = choose_window(baseline_.measured.plan);
  out.timelines = {timeline_window(problem_, baseline_, baseline_policy_, window),
                   timeline_window(problem_, after, policy, window)};
}

void ReportGatherer::ablate(report::Report& out) {
  const auto add = [&](const char* stages, const report::PolicyResult& f) {
    if (!f.skipped.empty()) return;
    out.ablation.push_back({.stages = stages,
                            .rho_mean = mean(f.rho),
                            .speedup = f.speedup,
                            .copies_per_layer_event = f.copies_per_layer_event,
                            .exposed_copy_seconds = f.exposed_copy_seconds});
  };
  add("vanilla", figures_of(baseline_, baseline_.step));
  PlannerOptions options = options_;
  options.stages = {.base = true, .relocation = false, .replication = false, .tokens = false};
  add("B", figures(policy_named(kOurs), options));
  options.stages.relocation = true;
  add("BL", figures(policy_named(kOurs), options));
  options.stages.replication = true;
  add("BLP", figures(policy_named(kOurs), options));
  options.stages.tokens = true;
  add("BLPT", figures(policy_named(kOurs), options));
}

void ReportGatherer::weigh_memory(const std::vector<int>& guest_slots, report::Report& out) {
  const auto add = [&](std::string_view residency, int slots, const report::PolicyResult& f) {
    if (!f.skipped.empty()) return;
    out.memory.push_back({.residency = std::string(residency),
                          .guest_slots = slots,
                          .memory_bytes = f.memory_bytes,
                          .guest_bytes = f.guest_bytes,
                          .speedup = f.speedup,
                          .rho_mean = mean(f.rho),
                          .copies_per_layer_event = f.copies_per_layer_event,
                          .exposed_copy_seconds = f.exposed_copy_seconds});
  };
  add("no guests", 0, figures_of(baseline_, baseline_.step));
  for (const Residency residency : {Residency::kStatic, Residency::kResident, Residency::kShared}) {
    for (const int slots : guest_slots) {
      if (slots == 0) continue;
      PlannerOptions options = options_;
      options.residency = residency;
      options.guest_slots = slots;
      add(to_string(residency), slots, figures(policy_named(kOurs), options));
    }
  }
}

}  // namespace foremoe::cli
