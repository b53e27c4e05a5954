// foremoe compare: plans one load with several policies, checks each plan and prints the figures.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluation_json.h"
#include "planning_arguments.h"
#include "plot.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kCompareExamples = R"(  foremoe compare step.load.safetensors --guest-slots 1
  foremoe compare step.trace.safetensors --ranks 16 --guest-slots 2 --policy vanilla,eplb,foremoe
  foremoe compare step.load.safetensors --policy all --json
)";

constexpr std::string_view kCompareColumns =
    R"(Columns, over all layers and micro-steps with load:
  residency   how long guests stay in their slots. free*: experts may be on any rank. Such a plan serves forward-only
              phases; it cannot train, since gradients and optimizer state have no home
  ρ           imbalance: tokens of the busiest rank ÷ mean of all ranks. All other ranks wait for the busiest, so the
              experts of a layer take ρ times as long as with perfect balance. 1 is perfect{}
  copies      weights of one expert moved to another rank, per layer and event (a pass of a micro-step), whole group
  per rank    the most copies that one rank receives in one layer at one event
  guests      guests that serve tokens, per layer and event. For residency free, every expert away from its home counts
  home moves  experts whose owner changed, over all layers
  node link   tokens that the busiest node sends or receives, mean over layers and micro-steps
  µs          CPU time of planning one layer of one micro-step, without the work done once per step
foremoe stops when the busiest rank is at most --tolerance above the mean (default {} of it), since further copies cost
more than they gain. static makes no copies within a step, so its ρ may be smaller.
)";

std::string columns_text(const std::string& bound) {
  return fmt::format(kCompareColumns, bound, default_tolerance(Residency::kResident));
}

std::string residency_of(const Evaluation& e) {
  return std::string(to_string(e.plan.residency)) + (e.plan.can_train() ? "" : "*");
}

void print(const JobEvaluation& job, const PlanningSession& session, const EvaluateOptions& options) {
  print_values("{}\n{}\n\n", session.describe_input(), describe(options));
  TextTable table({"policy", "residency", "ρ mean", "ρ p99", "ρ max", "copies", "per rank", "guests", "home moves",
                   "node link", "µs"});
  double bound = 0;  // 0: no plan with load
  for (const Evaluation& e : job.policies) {
    if (!e.planned()) {
      table.add({e.policy, "skipped: " + e.skipped});
    } else if (!e.check.ok()) {
      table.add({e.policy, fmt::format("WRONG, {} violations: {}", e.check.num_violations(),
                                       e.check.violations.front().message)});
    } else if (e.figures.max_rank_tokens == 0) {
      table.add({e.policy, "no load"});
    } else {
      const PlanFigures& f = e.figures;
      bound = f.rho_lower_bound_mean;
      table.add({e.policy, residency_of(e), fmt::format("{:.4f}", f.rho.mean), fmt::format("{:.4f}", f.rho.p99),
                 fmt::format("{:.4f}", f.rho.max), fmt::format("{:.2f}", f.copies_per_layer_event),
                 fmt::format("{}", f.copies_max_per_rank), fmt::format("{:.2f}", f.guests_per_layer),
                 fmt::format("{}", f.home_moves), fmt::format("{:.0f}", f.node_link_tokens.mean),
                 fmt::format("{:.1f}", e.us_per_layer_micro_step())});
    }
  }
  fmt::print("{}\n", table.to_string());
  print_groups(job);
  if (bound > 0) fmt::print("{}", columns_text(fmt::format("; whole tokens permit {:.4f} here", bound)));
  if (session.groups.front().load.num_micro_steps() == 1) {
    fmt::print(
        "The load has one micro-step, so it does not change over time: copies chosen once per step (static) "
        "suffice.\n");
  }
}

struct CompareArguments : PlanningArguments {
  std::string plot;
};

int run(CompareArguments arguments, const Given& given) {
  const bool plots = !arguments.plot.empty();
  if (plots && arguments.cost.cluster.empty()) throw InputError({.field = "plot"}, "needs `cluster`");
  expect_plot(arguments.plot, files_of(arguments));
  PlanningSession session(arguments, given, {.policies = arguments.policies, .simulates = plots});
  arguments.evaluate.simulate = plots;
  const JobEvaluation job = session.each_group([&](const Workload& group, const EvaluationContext& context) {
    if (plots) return evaluate_all(session.policies, group, arguments.evaluate, context);
    std::vector<Evaluation> evaluations;
    for (std::size_t i = 0; i < session.policies.size(); ++i) {
      const EvaluationContext one = one_of(context, i, session.policies.size());
      evaluations.push_back(evaluate(*session.policies[i], group, arguments.evaluate, one));
    }
    return evaluations;
  });
  session.progress.end();
  const std::vector<Evaluation>& evaluations = job.policies;
  expect_residency(evaluations.front(), session.residency);
  if (arguments.json) {
    fmt::print("{}\n", to_json(job, /*checked=*/true).dump(2));
  } else {
    print(job, session, arguments.evaluate);
  }
  const bool ok = std::ranges::all_of(evaluations, [](const Evaluation& e) { return e.check.ok(); });
  const int code = ok ? kOk : kFoundWrong;
  if (plots) {
    draw_plot({arguments.plot, Panels::kStep, session.groups, *session.cost, arguments.evaluate}, evaluations, code);
  }
  return code;
}

}  // namespace

Command compare_command() {
  auto a = std::make_shared<CompareArguments>();
  return {.name = "compare",
          .summary = "Plan with several policies, check each plan, and compare their figures",
          .examples = std::string(kCompareExamples),
          .meaning = fmt::format("Policies:\n{}\n{}", list_of_policies_and_their_options(), columns_text("")),
          .options =
              joined({planning_options(*a, /*residency_auto=*/false),
                      {policies_option(a->policies), plot_option(a->plot),
                       json_option(a->json,
                                   "Print an array of objects with the keys of plan --json; with --plot, also those of "
                                   "simulate --json")}}),
          .run = [a](const Given& given) { return cli::run(*a, given); }};
}

}  // namespace foremoe::cli
