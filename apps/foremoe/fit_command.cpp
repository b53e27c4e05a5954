// foremoe fit: whether a step fits into memory, which capacities trainers need, and when copies pay.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "foremoe/evaluate/evaluation_json.h"
#include "foremoe/evaluate/fit.h"
#include "foremoe/evaluate/memory_remarks.h"
#include "planning_arguments.h"
#include "plot.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kFitExamples =
    R"(  foremoe fit step.load.safetensors --cluster h100 --model qwen3-30b-a3b --memory-budget 72
  foremoe fit step.trace.safetensors --ranks 16 --cluster h100 --model qwen3-30b-a3b --guest-slots 2 --json
)";

constexpr std::string_view kFitMeaning =
    R"(now is vanilla: contiguous homes without guests. planned is the policy's plan. Rows are token–expert assignments, as
recorded: a trainer also runs tokens without a route. Memory is that of `simulate` (docs/users/simulation.md). Without
--memory-budget, the limit is the memory of the cluster's device. With --memory-budget, the exit code is 1 if the plan
does not fit, and 0 if it fits.

  most rows         of a rank in one layer of one micro-step
  state             weights, gradients and optimizer state of the rank's own parameters
  running layer     activations of the layer that runs, in the layer with the most rows
  first too large   the first place at which a rank exceeds the limit
  tokens that fit   largest mean tokens per rank and micro-step within the limit, with the imbalance of this load

Capacities are the smallest values with which no row of this load is dropped, rounded up to four decimals. none: no value
suffices. Those of the paged stash assume a model without MTP layers. src/foremoe/evaluate/capacity.h cites each rule.

Break-even, for each path of copies:
  recompute         fewest rows of one expert that take as long as the copy of its weights
  policy update     the same for forward and backward, and the return of the gradient
  hidden            fewest tokens of a rank and micro-step with which a layer hides one copy
)";

constexpr std::size_t kRanksShown = 16;

struct FitArguments : PlanningArguments {
  std::string policy = "foremoe";
  std::string plot;
  int most_guest_slots = 4;
};

std::string text_of(const FitPlace& place, int ep) {
  return fmt::format("{}, {}rank {}, layer {}, micro-step {}",
                     place.phase == Phase::kRecompute ? "recompute" : "policy update",
                     ep != 0 ? fmt::format("group {}, ", place.rank.value / ep) : "", place.rank.value,
                     place.layer.value, place.micro_step.value);
}

std::string text_of(const std::optional<double>& capacity) {
  return capacity ? fmt::format("{:.4f}", *capacity) : "none";
}

void print_memory(const Fit& fit) {
  TextTable table({"", "now", "planned"});
  const auto row = [&](const char* name, auto&& value) { table.add({name, value(fit.now), value(fit.planned)}); };
  const auto size = [&](const char* name, auto&& bytes) {
    row(name, [&](const FitOfPlan& f) { return gigabytes(bytes(f)); });
  };
  row("policy", [](const FitOfPlan& f) { return f.evaluation.policy; });
  row("most rows", [](const FitOfPlan& f) { return fmt::format("{}", f.most_rows.rows.value); });
  size("most memory, GB", [](const FitOfPlan& f) { return f.most_memory.memory; });
  size("  state", [](const FitOfPlan& f) { return f.terms.state; });
  size("  guest weights", [](const FitOfPlan& f) { return f.terms.guest_weights; });
  size("  guest gradients", [](const FitOfPlan& f) { return f.terms.guest_gradients; });
  size("  kept activations", [](const FitOfPlan& f) { return f.activations.kept; });
  size("  running layer", [](const FitOfPlan& f) { return f.activations.working; });
  row("tokens that fit", [](const FitOfPlan& f) { return fmt::format("{}", f.largest_micro_batch.value); });
  fmt::print("{}\n", table.to_string());
}

void print_places(const Fit& fit, int ep) {
  FactList facts;
  for (const auto& [name, f] : {std::pair{"now", &fit.now}, std::pair{"planned", &fit.planned}}) {
    facts.add(fmt::format("{}: most rows", name), text_of(f->most_rows, ep));
    facts.add("  most memory", text_of(f->most_memory, ep));
    facts.add(
        "  first too large",
        f->exceeds ? fmt::format("{}: {} GB", text_of(*f->exceeds, ep), gigabytes(f->exceeds->memory)) : "nowhere");
  }
  fmt::print("{}\n", facts.to_string());
}

// The ranks with the most memory, now or planned.
void print_ranks(const Fit& fit) {
  std::vector<std::size_t> ranks(fit.now.ranks.size());
  std::iota(ranks.begin(), ranks.end(), std::size_t{0});
  const auto most = [&](std::size_t r) { return std::max(fit.now.ranks[r].memory, fit.planned.ranks[r].memory); };
  if (ranks.size() > kRanksShown) {
    std::ranges::stable_sort(ranks, std::greater{}, most);
    fmt::print("the {} of {} ranks with the most memory:\n\n", kRanksShown, ranks.size());
    ranks.resize(kRanksShown);
  }
  TextTable table({"rank", "rows now", "planned", "GB now", "planned"});
  for (const std::size_t r : ranks) {
    const FitPeak& now = fit.now.ranks[r];
    const FitPeak& planned = fit.planned.ranks[r];
    table.add({fmt::format("{}", r), fmt::format("{}", now.rows.value), fmt::format("{}", planned.rows.value),
               gigabytes(now.memory), gigabytes(planned.memory)});
  }
  fmt::print("{}\n", table.to_string());
}

void print_guest_slots(const Fit& fit, const std::string& policy) {
  if (fit.fewest_guest_slots) {
    print_values("fewest guest slots that fit: {}{}\n\n", *fit.fewest_guest_slots,
                 *fit.fewest_guest_slots == 0 ? ", since vanilla fits" : "");
    return;
  }
  const FitTrial least = *std::ranges::min_element(fit.tried, {}, &FitTrial::memory);
  print_values("no number of guest slots up to {} fits with {}; the least memory is {} GB, with {}\n\n",
               fit.tried.back().guest_slots, policy, gigabytes(least.memory),
               least.guest_slots == 0 ? "vanilla" : counted(least.guest_slots, "guest slot"));
}

void print_capacities(const Fit& fit) {
  TextTable table({"smallest capacity without drops", "trainer", "now", "planned"});
  for (std::size_t i = 0; i < fit.now.capacities.size(); ++i) {
    const Capacity& now = fit.now.capacities[i];
    table.add({now.option, now.trainer, text_of(now.rounded()), text_of(fit.planned.capacities[i].rounded())});
  }
  fmt::print("{}\n", table.to_string());
}

void print_break_even(const Fit& fit) {
  TextTable table({"copies pay from", "copy µs", "recompute, rows", "policy update, rows", "hidden, tokens"});
  for (const BreakEven& even : fit.break_even) {
    table.add({std::string(even.path), fmt::format("{:.0f}", 1e6 * even.copy_seconds),
               fmt::format("{}", even.recompute_rows.value), fmt::format("{}", even.policy_update_rows.value),
               even.hiding_tokens ? fmt::format("{}", even.hiding_tokens->value) : "-"});
  }
  fmt::print("{}", table.to_string());
}

void print_groups(const JobFit& job) {
  if (job.groups.empty()) return;
  TextTable table({"group", "ranks", "rows now", "planned", "GB now", "planned", "too large now", "planned"});
  const auto place = [&](const std::optional<FitPlace>& exceeds, std::size_t g) {
    return exceeds ? fmt::format("rank {}", static_cast<int>(g) * job.ep + exceeds->rank.value) : "-";
  };
  for (std::size_t g = 0; g < job.groups.size(); ++g) {
    const Fit& fit = job.groups[g];
    table.add({fmt::format("{}", g), describe_ranks(g, job.ep), fmt::format("{}", fit.now.most_rows.rows.value),
               fmt::format("{}", fit.planned.most_rows.rows.value), gigabytes(fit.now.most_memory.memory),
               gigabytes(fit.planned.most_memory.memory), place(fit.now.exceeds, g), place(fit.planned.exceeds, g)});
  }
  fmt::print("{}\n", table.to_string());
}

void print(const JobFit& job, const PlanningSession& session, const FitArguments& arguments) {
  const Fit& fit = job.whole;
  print_values("{}\n{}; {}\n", session.describe_input(), describe(*session.cost), describe(arguments.evaluate));
  print_values("limit {} GB per rank ({}); {} tokens per rank and micro-step on average\n\n", gigabytes(fit.limit),
               arguments.evaluate.memory_budget() ? "budget" : "device", fit.mean_tokens.value);
  print_memory(fit);
  print_places(fit, job.ep);
  print_groups(job);
  print_ranks(fit);
  print_guest_slots(fit, arguments.policy);
  const std::string sharding = optimizer_remark(*session.cost, session.groups.front().load.num_ranks());
  if (!sharding.empty()) print_values("{}\n\n", sharding);
  print_capacities(fit);
  print_break_even(fit);
}

int run(FitArguments arguments, const Given& given) {
  expect_plot(arguments.plot, files_of(arguments));
  PlanningSession session(arguments, given, {.policies = {arguments.policy}, .one_policy = true, .simulates = true});
  const JobFit job = session.each_group([&](const Workload& group, const EvaluationContext& context) {
    return fit({.policy = *session.policies.front(), .workload = group, .most_guest_slots = arguments.most_guest_slots},
               arguments.evaluate, context);
  });
  session.progress.end();
  const Fit& found = job.whole;
  expect_residency(found.planned.evaluation, session.residency);
  const std::optional<Bytes> budget = arguments.evaluate.memory_budget();
  if (arguments.json) {
    fmt::print("{}\n", to_json(job, budget).dump(2));
  } else {
    print(job, session, arguments);
  }
  const int code = budget && found.planned.exceeds ? kFoundWrong : kOk;
  draw_fit({.path = arguments.plot, .groups = session.groups, .cost = *session.cost, .options = arguments.evaluate},
           found, code);
  return code;
}

}  // namespace

Command fit_command() {
  auto a = std::make_shared<FitArguments>();
  std::vector<Option> planning = planning_options(*a, /*residency_auto=*/true);
  option_named(planning, "cluster").required = true;
  option_named(planning, "model").initial = "the known model that fits the input";
  std::vector<Option> simulation =
      only(simulation_options_of(a->evaluate), {"memory_budget", "path", "prefetch_depth"});
  simulation.front().help = "Memory of one rank in 10⁹ bytes. If the plan needs more, the exit code is 1";
  simulation.front().main = true;
  return {.name = "fit",
          .summary = "Find out before a step whether it fits into memory, and which capacities trainers need",
          .examples = std::string(kFitExamples),
          .meaning = fmt::format("{}\nPolicies:\n{}", kFitMeaning, list_of_policies_and_their_options()),
          .options = joined(
              {std::move(planning),
               std::move(simulation),
               {text_option({.name = "policy", .value = "NAME", .help = "Policy that plans", .main = true}, a->policy),
                integer_option({.name = "most_guest_slots",
                                .value = "G",
                                .help = "If vanilla does not fit, try up to this number of guest slots"},
                               a->most_guest_slots, {0, 64}),
                plot_option(a->plot, "rows and memory of the busiest rank by micro-step, with the limit,"),
                json_option(a->json, "Print all figures as one JSON object")}}),
          .run = [a](const Given& given) { return cli::run(*a, given); }};
}

}  // namespace foremoe::cli
