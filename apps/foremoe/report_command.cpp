// foremoe report: what balancing would gain on a cluster, as a page for people.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string_view>

#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/memory_remarks.h"
#include "foremoe/rollout/file_kind.h"
#include "planning_arguments.h"
#include "report_gatherer.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples =
    R"(  foremoe report step.load.safetensors --cluster h100 --model qwen3-30b-a3b --out page.html
  foremoe report step.trace.safetensors --cluster h20 --guest-slots 2,1,4 --policy vanilla,eplb,foremoe --out page.html
  foremoe report step.load.safetensors --cluster h100 --rollout-seconds 120 --memory-budget 80 --out page.html
)";

constexpr std::string_view kMeaning =
    R"(The page is one HTML file without scripts that needs neither network nor anything beside it. It shows, with the numbers
beneath every plot: load per rank before and after, the distribution of ρ by policy, stage times by part beside the
ideal, what each stage of our planner adds, memory against speedup over guest slots and residencies, traffic between
nodes, and what ranks do while one layer runs. Before is vanilla; after is foremoe or, where it was not asked for, the
fastest. Every plan is proved right; what is not is left out and named, and the exit code is 1.
Times, memory and traffic are those of a model of the cluster (foremoe simulate --help), not measured on one.
)";

struct ReportArguments : PlanningArguments {
  std::vector<int> guest_slots{1, 2, 4};
  std::string out;
};

// Vanilla first: everything is compared with it.
std::vector<const Policy*> policies_of(const ReportArguments& arguments) {
  std::vector<const Policy*> policies{&policy_named(std::string(kReportBaseline))};
  for (const Policy* policy : policies_named(arguments.policies)) {
    if (std::ranges::find(policies, policy) == policies.end()) policies.push_back(policy);
  }
  return policies;
}

std::vector<report::Setting> settings(const ReportArguments& arguments, const LoadTable& load, const CostModel& cost,
                                      const PlannerOptions& options) {
  std::vector<report::Setting> all{
      {"input", arguments.input.path},
      {"load", describe(load)},
      {"cluster", cost.cluster().name},
      {"model", cost.model().name},
      {"guest slots per rank and layer", fmt::format("{}", options.guest_slots)},
      {"residency", std::string(to_string(options.residency))},
      {"micro-steps in flight", fmt::format("{}", options.in_flight)},
      {"tokens of a sequence", fmt::format("{}", cost.options().sequence_tokens)},
      {"data-parallel ranks that share optimizer state", fmt::format("{}", cost.options().optimizer_shards)},
      {"memory of a rank", fmt::format("{} GB", gigabytes(cost.cluster().memory))},
      {"activations", cost.options().recompute_activations ? "computed anew in the backward pass" : "kept"}};
  if (load.num_layers() < cost.model().moe_layers) {
    all.push_back(
        {"each layer stands for",
         fmt::format("{:.4g} of the model's {}", static_cast<double>(cost.model().moe_layers) / load.num_layers(),
                     counted(cost.model().moe_layers, "MoE layer"))});
  }
  if (arguments.evaluate.rollout_seconds > 0)
    all.push_back({"rollout", fmt::format("{:g} s", arguments.evaluate.rollout_seconds)});
  if (arguments.evaluate.memory_budget_gigabytes > 0) {
    all.push_back({"memory budget", fmt::format("{:g} GB", arguments.evaluate.memory_budget_gigabytes)});
  }
  return all;
}

std::vector<std::string> remarks(const report::Report& page, const CostModel& cost, std::optional<Bytes> budget) {
  std::vector<NeededMemory> needed;
  for (const report::PolicyResult& p : page.policies) {
    if (p.skipped.empty()) {
      needed.push_back({.who = p.policy, .bytes = Bytes{static_cast<std::int64_t>(p.memory_bytes)}});
    }
  }
  std::vector<std::string> all = memory_remarks(needed, cost, budget);
  for (std::string& remark : all) remark = fmt::format("Memory: {}.", remark);
  return all;
}

std::string conclusion(const report::Report& page) {
  const report::PolicyResult* const after = page.find(page.after);
  const std::string what = fmt::format("{} on {}", page.model, page.cluster);
  if (after->rho.empty()) return fmt::format("{}, no load", what);
  const double of_ideal = 100 * after->ideal_step_seconds / after->step_seconds;
  if (page.after != page.before) {
    return fmt::format("{}, {} {:.3f} times as fast as {}, {:.1f} % of ideal", what, page.after, after->speedup,
                       page.before, of_ideal);
  }
  return fmt::format("{}, {}{}, {:.1f} % of ideal", what,
                     page.policies.size() > 1 ? "nothing could be planned but " : "", page.before, of_ideal);
}

int run(ReportArguments arguments, const Given& given) {
  if (arguments.out.empty()) throw InputError({.field = "out"}, "is an empty name");
  expect_output(arguments.out, files_of(arguments));
  const std::vector<const Policy*> policies = policies_of(arguments);
  arguments.evaluate.planner.guest_slots = arguments.guest_slots.front();
  PlanningSession session(arguments, given, /*simulates=*/true);
  const LoadTable& load = session.input.load;
  const CostModel& cost = *session.cost;
  const PlannerOptions& options = arguments.evaluate.planner;

  report::Report page{.input = fmt::format("{}: {}", load.name, describe(load)),
                      .model = cost.model().name,
                      .cluster = cost.cluster().name,
                      .num_ranks = load.num_ranks(),
                      .ranks_per_node = load.ranks_per_node,
                      .guest_slots = options.guest_slots,
                      .settings = settings(arguments, load, cost, options)};
  ReportGatherer gatherer(session.input, arguments.evaluate, session.context());
  gatherer.compare(policies, page);
  gatherer.look_closer(page);
  gatherer.ablate(page);
  gatherer.weigh_memory(arguments.guest_slots, page);
  session.progress.end();
  page.remarks = remarks(page, cost, arguments.evaluate.memory_budget());
  write_file(arguments.out, report::to_html(page));
  fmt::print("{}: {}\n", arguments.out, conclusion(page));
  for (const std::string& wrong : gatherer.wrong()) fmt::print(stderr, "foremoe report: {}\n", wrong);
  return gatherer.wrong().empty() ? kOk : kFoundWrong;
}

}  // namespace

Command report_command() {
  auto a = std::make_shared<ReportArguments>();
  std::vector<Option> planning = planning_options(*a, /*residency_auto=*/false);
  option_named(planning, "cluster").required = true;
  option_named(planning, "model").initial = "the one that fits the input";
  Option& slots = option_named(planning, "guest_slots");
  slots.value = "G,G,…";
  slots.help =
      "Copies that a rank has room for in one layer. Policies are compared at the first number; memory is "
      "weighed against speedup at all of them and without any";
  slots.initial = "1,2,4";
  slots.type = "list";
  slots.set = [a](const std::string& text) {
    a->guest_slots.clear();
    for (const std::string& part : split_list(text)) {
      a->guest_slots.push_back(static_cast<int>(parse_integer("guest_slots", part, {0, kMaxExperts})));
    }
    if (a->guest_slots.empty()) throw InputError({.field = "guest_slots"}, "lists no number");
  };
  Option out = out_option(a->out, "FILE.html", "Where the page goes; a file there is replaced");
  out.required = true;
  return {
      .name = "report",
      .summary = "Show what each policy would gain on a cluster, as a page with plots and tables",
      .examples = std::string(kExamples),
      .meaning = fmt::format("{}\nPolicies:\n{}", kMeaning, list_of_policies()),
      .options = joined(
          {std::move(planning), simulation_options_of(a->evaluate), {std::move(out), policies_option(a->policies)}}),
      .run = [a](const Given& given) { return cli::run(*a, given); }};
}

}  // namespace foremoe::cli
