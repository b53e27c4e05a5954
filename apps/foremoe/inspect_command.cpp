// foremoe inspect: what is in a trace, a load or a plan.

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "command.h"
#include "foremoe/core/safetensors.h"
#include "foremoe/rollout/file_kind.h"
#include "help_text.h"
#include "inspection.h"
#include "option_checks.h"
#include "planner_arguments.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples =
    R"(  foremoe inspect step.trace.safetensors --ranks 8      how uneven would this rollout be on 8 ranks?
  foremoe inspect step.load.safetensors --layer 0        the picture of layer 0
  foremoe inspect plan.safetensors                       the same after planning
)";

constexpr std::string_view kMeaning =
    R"(The picture shows one layer (the most uneven unless --layer tells): how many tokens each rank serves, over the whole step
and in each micro-step. RL steps are skewed but steady; their micro-steps are wild, which is what planning cures.
Per layer, experts at home:
  step, mean, max   imbalance ρ, busiest rank ÷ mean rank: of the whole step, and mean and max over its micro-steps
  max_vio …         verl's violations of the experts' loads over the step, d = load ÷ mean − 1: the largest d, the smallest
                    (−1: an expert that nobody chose), and the mean of |d|
  fluctuation       how much an expert's share varies over the micro-steps: standard deviation ÷ mean, mean over experts
  micro-steps       ρ of each, from 1 (▁) to the largest of all (█)
Of a plan, ranks' loads are those that it gives them.)";

int run(const InspectArguments& arguments) {
  const Safetensors file = open_input(arguments.input.path);
  const nlohmann::ordered_json json = file_kind(file) == FileKind::kPlan
                                          ? inspect_plan(file, arguments)
                                          : inspect_rollout(file, file_kind(file) == FileKind::kTrace, arguments);
  if (arguments.json) fmt::print("{}\n", json.dump(2));
  return kOk;
}

}  // namespace

Command inspect_command(CLI::App& parent) {
  auto arguments = std::make_shared<InspectArguments>();
  CLI::App* const command = parent.add_subcommand("inspect", "Show what a file holds, and how uneven its loads are");
  add_input_options(*command, arguments->input);
  command->get_option("INPUT")->description("A trace, a load or a plan file");
  command->add_option("--layer", arguments->layer, "The layer to draw (default: the most uneven)")
      ->type_name("L")
      ->check(at_least(0));
  command->add_option("--rows", arguments->rows, "Micro-steps to draw")
      ->type_name("N")
      ->capture_default_str()
      ->check(at_least(0));
  add_homes_option(*command, arguments->homes);
  command->add_flag("--json", arguments->json, "Print all figures as one JSON object");
  teach(*command, kExamples, kMeaning);
  return {command, [arguments] { return run(*arguments); }};
}

}  // namespace foremoe::cli
