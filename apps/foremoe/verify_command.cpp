// foremoe verify: checks a plan against a load with check_plan, which shares no code with any planner.

#include <fmt/format.h>

#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "console.h"
#include "foremoe/evaluate/evaluate.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/plan/plan_json.h"
#include "progress.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kVerifyExamples = R"(  foremoe verify step.load.safetensors plan.safetensors
  foremoe verify step.trace.safetensors plan.safetensors --json && echo proved
)";

constexpr std::string_view kVerifyMeaning =
    R"(The checker shares no code with the planner. It checks that the plan was made for this load (digest); that a replica
serves every token (coverage, quotas, slots); that the plan respects homes, residency, execution order and the budgets in
its options; that routing tokens by the plan gives the planned loads; and that recorded figures are right.
Ranks, nodes and batching are the plan's unless options override them.
Exit code 0: the plan is valid. 1: it is not; each violation names its place and reason. 2: a file could not be read.
)";

struct VerifyArguments {
  InputOptions input;
  std::string plan;
  int align = 128;
  int max_listed = 20;
  bool json = false;
};

void print(const CheckReport& report, const VerifyArguments& arguments) {
  for (const Violation& v : report.violations) {
    const std::string place = place_of(v);
    print_values("{}{}{}: {}\n", to_string(v.kind), place.empty() ? "" : " at ", place, v.message);
  }
  const auto listed = static_cast<std::int64_t>(report.violations.size());
  if (report.num_violations() > listed) fmt::print("… and {} more\n", report.num_violations() - listed);
  for (const std::string& what : report.not_checked) print_values("not checked: {}\n", what);
  if (!report.ok()) {
    print_values("{} is NOT a plan for {}: {} violation{}\n", arguments.plan, arguments.input.path,
                 report.num_violations(), report.num_violations() == 1 ? "" : "s");
    return;
  }
  print_values("{} is right for {}", arguments.plan, arguments.input.path);
  if (report.figures && report.figures->max_rank_tokens == 0) {
    fmt::print(": no load");
  } else if (report.figures) {
    fmt::print(": imbalance ρ mean {:.4f}, max {:.4f}; {:.2f} copies per layer and event", report.figures->rho.mean,
               report.figures->rho.max, report.figures->copies_per_layer_event);
  }
  fmt::print("\n");
}

int run(const VerifyArguments& arguments, const Given& given) {
  const StepPlan plan = read_plan(arguments.plan);
  ThreadPool pool;
  Workload input = read_load_or_trace(input_as_planned(plan, arguments.input), pool);
  note_all(input.remarks);
  if (given("homes"))
    input.homes = initial_homes(arguments.input.homes, input.load);  // otherwise taken from the plan's options
  Progress progress;
  progress("checking the plan");
  CheckOptions options = check_options(input, nullptr, arguments.align);
  options.max_listed = arguments.max_listed;
  const CheckReport report = check_plan(plan, input.load, options);
  progress.end();
  if (arguments.json) {
    fmt::print("{}\n", to_json(report).dump(2));
  } else {
    print(report, arguments);
  }
  return report.ok() ? kOk : kFoundWrong;
}

}  // namespace

Command verify_command() {
  auto a = std::make_shared<VerifyArguments>();
  return {
      .name = "verify",
      .summary = "Check that a plan is valid for a load, and list all violations",
      .examples = std::string(kVerifyExamples),
      .meaning = std::string(kVerifyMeaning),
      .options = joined(
          {{input_option(a->input.path, "Trace or load file for which the plan was made"),
            text_option({.name = "plan", .value = "PLAN", .help = "Plan file", .required = true, .positional = true},
                        a->plan)},
           without(options_of(a->input), {"fold", "previous", "previous_load"}),
           {align_option(a->align),
            integer_option({.name = "max_listed",
                            .value = "N",
                            .help = "Number of violations to list; all are counted",
                            .main = true},
                           a->max_listed, {0, std::numeric_limits<int>::max()}),
            json_option(a->json, "Print {ok, violations, …} as JSON")}}),
      .run = [a](const Given& given) { return cli::run(*a, given); },
      .any_process = true};
}

}  // namespace foremoe::cli
