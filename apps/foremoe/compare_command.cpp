// foremoe compare: several policies on one load, each plan proved right before its figures are shown.

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.h"
#include "cost_arguments.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/plan_json.h"
#include "help_text.h"
#include "measured_plan.h"
#include "messages.h"
#include "planner_arguments.h"
#include "text_table.h"
#include "wording.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples = R"(  foremoe compare step.load.safetensors --guest-slots 1
  foremoe compare step.trace.safetensors --ranks 16 --guest-slots 2 --policy vanilla,eplb,foremoe
  foremoe compare step.load.safetensors --policy all --json
)";

constexpr std::string_view kColumns =
    R"(Columns, over all layers and micro-steps with load:
  ρ           imbalance: tokens of the busiest rank ÷ mean of all ranks. All others wait for it, so the experts of a
              layer take ρ times as long as they could. 1 is perfect{}
  copies      weights of one expert moved to another rank, per layer and event (a pass of a micro-step), whole group
  per rank    the most copies that one rank receives in one layer at one event
  guests      copies that serve tokens, per layer and event. Of policies that place freely (eplb, …), which need
              forward-only stages, every expert away from its home counts
  home moves  experts whose owner changed, over all layers
  node link   tokens that the busiest node sends or receives, mean over layers and micro-steps
  µs          CPU time of planning one layer of one micro-step, without what is done once per step
)";

struct CompareArguments {
  InputOptions input;
  PlannerArguments planner;
  CostArguments cost;
  std::vector<std::string> policies{"all"};
  bool json = false;
};

struct Row {
  std::string policy;
  std::variant<MeasuredPlan, Skipped> result;
  CheckReport check;  // of a plan
};

CheckReport checked(const MeasureProblem& problem, const MeasuredPlan& measured) {
  const Activity activity(fmt::format("checking the plan of {}", problem.policy.name()));
  const StepInput& step = problem.input.step;
  return check_plan(measured.plan, step.load,
                    {.initial_home = problem.input.homes,
                     .align = problem.align,
                     .trace = step.trace_or_null(),
                     .batching = step.batching_or_null(),
                     .reported = &measured.figures});
}

nlohmann::ordered_json to_json(const Row& row) {
  if (const auto* skipped = std::get_if<Skipped>(&row.result)) {
    return {{"policy", row.policy}, {"skipped", skipped->reason}};
  }
  nlohmann::ordered_json json = to_json(std::get<MeasuredPlan>(row.result));
  json["ok"] = row.check.ok();
  if (!row.check.ok()) json["violations"] = foremoe::to_json(row.check)["violations"];
  return json;
}

void print(const std::vector<Row>& rows, const LoadTable& load, const PlannerOptions& options) {
  fmt::print("{}: {}\n{} per rank and layer, residency {}, {} in flight\n\n", load.name, describe(load),
             counted(options.guest_slots, "guest slot"), to_string(options.residency),
             counted(options.in_flight, "micro-step"));
  TextTable table(
      {"policy", "ρ mean", "ρ p99", "ρ max", "copies", "per rank", "guests", "home moves", "node link", "µs"});
  double bound = 0;  // 0: no plan of any load
  for (const Row& row : rows) {
    if (const auto* skipped = std::get_if<Skipped>(&row.result)) {
      table.add({row.policy, "skipped: " + skipped->reason});
    } else if (!row.check.ok()) {
      table.add({row.policy, fmt::format("WRONG, {} violations: {}", row.check.num_violations(),
                                         row.check.violations.front().message)});
    } else if (std::get<MeasuredPlan>(row.result).figures.max_rank_tokens == 0) {
      table.add({row.policy, "no load"});
    } else {
      const auto& measured = std::get<MeasuredPlan>(row.result);
      const PlanFigures& f = measured.figures;
      bound = f.rho_lower_bound_mean;
      table.add({row.policy, fmt::format("{:.4f}", f.rho.mean), fmt::format("{:.4f}", f.rho.p99),
                 fmt::format("{:.4f}", f.rho.max), fmt::format("{:.2f}", f.copies_per_layer_event),
                 fmt::format("{}", f.copies_max_per_rank), fmt::format("{:.2f}", f.guests_per_layer),
                 fmt::format("{}", f.home_moves), fmt::format("{:.0f}", f.node_link_tokens.mean),
                 fmt::format("{:.1f}", measured.us_per_layer_micro_step())});
    }
  }
  fmt::print("{}\n", table.to_string());
  if (bound > 0) fmt::print(kColumns, fmt::format("; whole tokens permit {:.4f} here", bound));
}

int run(const CompareArguments& arguments) {
  const std::vector<const Policy*> policies = policies_named(arguments.policies);
  const std::optional<CostModel> cost = cost_model_if_given(arguments.cost);
  ThreadPool pool(static_cast<std::size_t>(arguments.planner.threads));
  InputOptions input_options = arguments.input;
  if (cost) take_nodes_of(cost->cluster(), input_options);
  const PlanningInput input = read_planning_input(input_options, arguments.planner, pool);
  const PlannerOptions options = within_cost(arguments.planner, cost, input.step.load);

  std::vector<Row> rows;
  bool ok = true;
  for (const Policy* policy : policies) {
    const MeasureProblem problem{
        .policy = *policy, .input = input, .options = options, .align = arguments.planner.align};
    Row row{.policy = std::string(policy->name()), .result = measure(problem, pool), .check = {}};
    if (const auto* measured = std::get_if<MeasuredPlan>(&row.result)) row.check = checked(problem, *measured);
    ok = ok && row.check.ok();
    rows.push_back(std::move(row));
  }
  if (arguments.json) {
    nlohmann::ordered_json array = nlohmann::ordered_json::array();
    for (const Row& row : rows) array.push_back(to_json(row));
    fmt::print("{}\n", array.dump(2));
  } else {
    print(rows, input.step.load, arguments.planner.options);
  }
  return ok ? kOk : kFoundWrong;
}

}  // namespace

Command compare_command(CLI::App& parent) {
  auto arguments = std::make_shared<CompareArguments>();
  CLI::App* const command =
      parent.add_subcommand("compare", "Plan with several policies, prove each plan right, show figures side by side");
  add_input_options(*command, arguments->input);
  add_policies_option(*command, arguments->policies);
  arguments->planner.models_cost = true;
  add_planner_options(*command, arguments->planner);
  add_cost_options(*command, arguments->cost, CostUse::kOptional);
  add_align_option(*command, arguments->planner.align);
  add_threads_option(*command, arguments->planner.threads);
  command->add_flag("--json", arguments->json, "Print an array of objects as plan --json prints");
  teach(*command, kExamples, fmt::format("Policies:\n{}\n{}", list_of_policies(), fmt::format(kColumns, "")));
  return {command, [arguments] { return run(*arguments); }};
}

}  // namespace foremoe::cli
