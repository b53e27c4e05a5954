// foremoe report: parses the arguments. The Python package writes the report.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "planning_arguments.h"
#include "run_in_python.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kReportExamples =
    R"(  foremoe report step.load.safetensors --cluster h100 --model qwen3-30b-a3b --out page.html
  foremoe report step.trace.safetensors --cluster h20 --model qwen3-30b-a3b --policy vanilla,foremoe --out page.html
  foremoe report step.load.safetensors --cluster h100 --model qwen3-30b-a3b --guest-slots 2,1,4 --out page.html
)";

constexpr std::string_view kReportMeaning =
    R"(The page is one self-contained HTML file. It shows, with the numbers below every plot: load per rank before and after
planning, the distribution of ρ by policy, phase times by part compared with the ideal, the gain of each stage of our
planner, memory and speedup for several numbers of guest slots and residencies, traffic between nodes, and the activity of
ranks while one layer runs. "Before" is vanilla; "after" is foremoe or, if it is not among the policies, the fastest one.
Plans that cannot train (residency free) appear for recompute only. Every plan is checked; wrong plans are listed and
left out. Times, memory and traffic are modelled (foremoe simulate --help), not measured on a cluster.
)";

struct ReportArguments {
  PlanningArguments planning;
  std::vector<std::string> slots{"1", "2", "4"};
  std::string out;
  bool without_measured = false;
};

std::vector<Option> options_of(ReportArguments& a) {
  std::vector<Option> options = joined(
      {without(planning_options(a.planning, /*residency_auto=*/false), {"policy_option"}),
       {out_option(a.out, "FILE.html", "Write the page here; an existing file is replaced"),
        policies_option(a.planning.policies),
        flag_option({.name = "without_measured",
                     .help = "Omit the planning time, which is measured. Equal input then produces an equal page"},
                    a.without_measured)},
       simulation_options_of(a.planning.evaluate)});
  option_named(options, "guest_slots") =
      list_option({.name = "guest_slots",
                   .letter = 'G',
                   .value = "G,G,…",
                   .help = "Guest slots per rank and layer. Policies are compared with the first number. Memory and "
                           "speedup are shown for all numbers and for no guest slots",
                   .main = true},
                  a.slots);
  option_named(options, "out").required = true;
  option_named(options, "cluster").required = true;
  option_named(options, "model").initial = "the known model that fits the input";
  return options;
}

}  // namespace

Command report_command() {
  auto a = std::make_shared<ReportArguments>();
  return {.name = "report",
          .summary = "Write an HTML page with plots and tables of each policy's gain on a cluster (Python package)",
          .examples = std::string(kReportExamples),
          .meaning = fmt::format("{}\nPolicies:\n{}", kReportMeaning, list_of_policies()),
          .options = options_of(*a),
          .run = [a](const Given& given) -> int {
            run_in_python("_report", texts_of(options_of(*a), given).dump(), {});
            throw InputError({}, "requires the Python package: pip install '.[report]'");
          }};
}

}  // namespace foremoe::cli
