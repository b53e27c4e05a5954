// foremoe verify: is this plan right for that load? By check_plan, which shares no code with any planner.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "command.h"
#include "foremoe/plan/check_plan.h"
#include "foremoe/plan/plan_file.h"
#include "help_text.h"
#include "messages.h"
#include "option_checks.h"
#include "planner_arguments.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples = R"(  foremoe verify step.load.safetensors plan.safetensors
  foremoe verify step.trace.safetensors plan.safetensors --json && echo proved
)";

constexpr std::string_view kMeaning =
    R"(Checked, by code that shares nothing with the planner: that the plan was made for this load (digest); that every token is
served by a replica that is there (coverage, quotas, slots); that homes, residency, execution order and the budgets in the
plan's own options are kept; that routing tokens by the plan delivers what it says; that recorded figures are right.
Ranks, nodes and batching are taken from the plan unless told otherwise.
Exit code 0: all of it holds. 1: something does not; violations say what, where. 2: a file could not be read.)";

struct VerifyArguments {
  InputOptions input;
  std::string plan;
  std::string homes{kContiguous};
  int align = 128;
  int max_listed = 20;
  bool homes_given = false;
  bool json = false;
};

void print(const CheckReport& report, const VerifyArguments& arguments) {
  for (const Violation& v : report.violations) {
    std::string where;
    const auto add = [&](const char* what, const auto& id) {
      if (id) where += fmt::format("{}{} {}", where.empty() ? " at " : ", ", what, id->value);
    };
    add("event", v.event);
    add("layer", v.layer);
    add("rank", v.rank);
    add("slot", v.slot);
    add("expert", v.expert);
    fmt::print("{}{}: {}\n", to_string(v.kind), where, v.message);
  }
  const auto listed = static_cast<std::int64_t>(report.violations.size());
  if (report.num_violations() > listed) fmt::print("… and {} more\n", report.num_violations() - listed);
  for (const std::string& what : report.not_checked) fmt::print("not checked: {}\n", what);
  if (!report.ok()) {
    fmt::print("{} is NOT a plan for {}: {} violation{}\n", arguments.plan, arguments.input.path,
               report.num_violations(), report.num_violations() == 1 ? "" : "s");
    return;
  }
  fmt::print("{} is right for {}", arguments.plan, arguments.input.path);
  if (report.figures && report.figures->max_rank_tokens == 0) {
    fmt::print(": no load");
  } else if (report.figures) {
    fmt::print(": imbalance ρ mean {:.4f}, max {:.4f}; {:.2f} copies per layer and event", report.figures->rho.mean,
               report.figures->rho.max, report.figures->copies_per_layer_event);
  }
  fmt::print("\n");
}

int run(const VerifyArguments& arguments) {
  const StepPlan plan = read_plan(arguments.plan);
  ThreadPool pool;
  const StepInput step = read_step(input_as_planned(plan, arguments.input), pool);
  Array<RankId, 2> homes;  // none: as the plan's options say
  if (arguments.homes_given) homes = initial_homes(arguments.homes, step.load);

  auto activity = std::make_optional<Activity>("checking the plan");
  const CheckReport report = check_plan(plan, step.load,
                                        {.initial_home = homes.empty() ? ArrayView<const RankId, 2>{} : homes.view(),
                                         .align = arguments.align,
                                         .trace = step.trace_or_null(),
                                         .batching = step.batching_or_null(),
                                         .max_listed = arguments.max_listed});
  activity.reset();
  if (arguments.json) {
    fmt::print("{}\n", to_json(report).dump(2));
  } else {
    print(report, arguments);
  }
  return report.ok() ? kOk : kFoundWrong;
}

}  // namespace

Command verify_command(CLI::App& parent) {
  auto arguments = std::make_shared<VerifyArguments>();
  CLI::App* const command =
      parent.add_subcommand("verify", "Prove that a plan is right for a load, or say what is wrong");
  add_input_options(*command, arguments->input);
  command->add_option("PLAN", arguments->plan, "A plan file")->required();
  add_homes_option(*command, arguments->homes);
  add_align_option(*command, arguments->align);
  command->add_option("--max-listed", arguments->max_listed, "Violations listed; all are counted")
      ->type_name("N")
      ->capture_default_str()
      ->check(at_least(0));
  command->add_flag("--json", arguments->json, "Print {ok, violations, …} as JSON");
  teach(*command, kExamples, kMeaning);
  const CLI::Option* const homes = command->get_option("--homes");
  return {command, [arguments, homes] {
            arguments->homes_given = homes->count() > 0;
            return run(*arguments);
          }};
}

}  // namespace foremoe::cli
