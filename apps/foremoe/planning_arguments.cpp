#include "planning_arguments.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "foremoe/core/error.h"
#include "foremoe/policy/own_options.h"

namespace foremoe::cli {

std::vector<Option> planning_options(PlanningArguments& a, bool residency_auto) {
  std::vector<Option> planning = planning_options_of(a.evaluate);
  if (!residency_auto)
    option_named(planning, "residency") = only(options_of(a.evaluate.planner), {"residency"}).front();
  return joined({{input_option(a.input.path, "Trace or load file (made by import, collect or synth)")},
                 options_of(a.input),
                 {ep_option(a.input)},
                 std::move(planning),
                 options_of(a.cost),
                 {values_option({.name = "policy_option",
                                 .value = "NAME=VALUE",
                                 .help = "Option of a single policy, as listed at the end of --help-all; may be given "
                                         "several times"},
                                a.policy_options)},
                 {align_option(a.evaluate.align), threads_option(a.threads)}});
}

std::vector<std::string> files_of(const InputOptions& input) {
  return {input.path, input.homes, input.previous, input.previous_load};
}

std::string describe_layers(const LoadTable& load, const CostModel& cost) {
  const int layers = cost.model().moe_layers;
  if (load.num_layers() >= layers) return "";
  return fmt::format("each layer of the input represents {:.4g} of the model's {}",
                     static_cast<double>(layers) / load.num_layers(), layers);
}

std::vector<std::string> files_of(const PlanningArguments& a) {
  std::vector<std::string> files = files_of(a.input);
  files.insert(files.end(), {a.cost.cluster, a.cost.model});
  return files;
}

PlanningSession::PlanningSession(const PlanningArguments& a, const Given& given, const SessionRequest& request)
    : pool(static_cast<std::size_t>(a.threads)) {
  const std::vector<std::string> files = files_of(a);
  const std::string& name = request.policies.front();
  if (request.one_policy && (name.find(',') != std::string::npos || policies_named({name}).size() > 1)) {
    throw InputError({.field = "policy"},
                     fmt::format("'{}', expected one policy; foremoe compare takes several", name));
  }
  const std::vector<const Policy*> named_policies = policies_named(request.policies);
  for (const PolicyWithOptions& with : policies_with_options(named_policies, a.policy_options)) {
    owned.push_back(with.policy);
    policies.push_back(with.policy.get());
  }
  expect_output(request.output, files, request.output_option);

  NamedCost named = read_cost(a.cost);
  InputOptions asked = a.input;
  if (named.cluster && asked.ranks_per_node == 0) asked.ranks_per_node = named.cluster->ranks_per_node;
  progress(fmt::format("reading {}", asked.path));
  groups = read_groups(asked, pool);
  progress.end();
  const Workload& first = groups.front();
  for (std::size_t g = 0; asked.ep != 0 && !request.output.empty() && g < groups.size(); ++g) {
    expect_output(group_path(request.output, g), files, request.output_option);
  }
  named.options.ep_groups = first.num_groups_of_job();
  named.options.groups_share_node = first.groups_share_node();
  cost = request.simulates ? find_cost_model(named, first.load) : find_cost_model_if_asked(named, first.load);

  const EvaluateOptions& options = a.evaluate;
  const int others = first.load.num_experts() - first.load.num_experts() / first.load.num_ranks();
  if (options.planner.guest_slots > others) {
    note(fmt::format("--guest-slots {}: a rank can use {}, one for each expert of other ranks",
                     options.planner.guest_slots, others));
  }
  note_all(first.remarks);
  if (given("residency") && options.choose != ChooseAmong::kAll && policies.size() == 1) {
    residency = options.planner.residency;
  }
}

std::string PlanningSession::describe_input() const {
  return fmt::format("{}: {}", groups.front().load.name, describe(groups));
}

std::string PlanningSession::output_of(const std::string& path, std::size_t group) const {
  return path.empty() || groups.front().asked.ep == 0 ? path : group_path(path, group);
}

std::string describe_ranks(std::size_t group, int ep) {
  const auto first = static_cast<int>(group) * ep;
  return fmt::format("{}–{}", first, first + ep - 1);
}

void print_groups(const JobEvaluation& job) {
  if (job.groups.empty()) return;
  const bool timed = std::ranges::any_of(job.policies, [](const Evaluation& e) { return e.step.has_value(); });
  std::vector<std::string> head{"group", "ranks"};
  for (const Evaluation& e : job.policies) {
    head.insert(head.end(), {e.policy + " ρ", timed ? "step s" : "most rows"});
  }
  TextTable table(head);
  for (std::size_t g = 0; g < job.groups.size(); ++g) {
    std::vector<std::string> cells{fmt::format("{}", g), describe_ranks(g, job.ep)};
    for (const Evaluation& e : job.groups[g]) {
      const bool known = e.planned() && e.check.ok() && (e.step || !timed);
      cells.push_back(known ? fmt::format("{:.4f}", e.figures.rho.mean) : "-");
      cells.push_back(!known  ? "-"
                      : timed ? fmt::format("{:.4g}", e.step->step_seconds)
                              : fmt::format("{}", e.figures.max_rank_tokens));
    }
    table.add(std::move(cells));
  }
  fmt::print(
      "{}\nAbove, ρ covers all groups, rows and memory of a rank are the largest, and all else is the slowest "
      "group's.\n",
      table.to_string());
  for (std::size_t p = 0; p < job.policies.size(); ++p) {
    const SlowestGroup& slowest = job.slowest[p];
    if (slowest.why.empty()) continue;
    print_values("{}: the slowest is group {}, ranks {}: {}\n", job.policies[p].policy, slowest.group,
                 describe_ranks(slowest.group, job.ep), slowest.why);
  }
  fmt::print("\n");
}

std::string describe(const PlanChoice& choice) {
  return fmt::format("{}: {}, with estimated planning{}", to_string(choice.best()), choice.why(),
                     choice.fits ? "" : "; none fits the memory budget, and this one needs the least");
}

std::string describe(const EvaluateOptions& options) {
  const PlannerOptions& planner = options.planner;
  return fmt::format("{} per rank and layer, residency {}, {} in flight", counted(planner.guest_slots, "guest slot"),
                     options.choose == ChooseAmong::kAll ? "auto" : to_string(planner.residency),
                     counted(planner.in_flight, "micro-step"));
}

Option json_option(bool& json, std::string help) {
  return flag_option({.name = "json", .help = std::move(help), .main = true}, json);
}

Option out_option(std::string& out, std::string value, std::string help) {
  return text_option({.name = "out", .letter = 'o', .value = std::move(value), .help = std::move(help), .main = true},
                     out);
}

Option threads_option(int& threads) {
  return integer_option({.name = "threads",
                         .value = "N",
                         .help = "Number of threads. The result does not depend on it",
                         .initial = "one per processor"},
                        threads, {1, 4096});
}

Option align_option(int& align) {
  return integer_option({.name = "align",
                         .value = "TOKENS",
                         .help = "Tile height for rho_padded: a grouped matrix product pads each replica's tokens to a "
                                 "multiple of this"},
                        align, {1, 1 << 20});
}

Option input_option(std::string& path, std::string help) {
  return text_option({.name = "input", .value = "INPUT", .help = std::move(help), .required = true, .positional = true},
                     path);
}

Option policies_option(std::vector<std::string>& policies) {
  return list_option({.name = "policy",
                      .value = "A,B,…",
                      .help = "Policies to use: all, or names separated by commas; see --help-all",
                      .main = true},
                     policies);
}

std::vector<Option> only(std::vector<Option> options, std::initializer_list<std::string_view> names) {
  std::vector<Option> chosen;
  for (const std::string_view name : names) chosen.push_back(std::move(option_named(options, name)));
  return chosen;
}

std::vector<Option> without(std::vector<Option> options, std::initializer_list<std::string_view> names) {
  std::erase_if(options, [&](const Option& o) { return std::ranges::find(names, o.name) != names.end(); });
  return options;
}

std::vector<Option> joined(std::initializer_list<std::vector<Option>> lists) {
  std::vector<Option> all;
  for (const std::vector<Option>& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

std::string list_of_policies() {
  std::size_t width = 0;
  for (const Policy* policy : all_policies()) width = std::max(width, policy->name().size());
  std::string list;
  for (const Policy* policy : all_policies()) {
    list += fmt::format("  {:<{}}  {}\n", policy->name(), width, policy->summary());
  }
  return list;
}

std::string list_of_policies_and_their_options() {
  return fmt::format("{}\nOptions of single policies (--policy-option NAME=VALUE):\n{}", list_of_policies(),
                     list_of_own_options());
}

}  // namespace foremoe::cli
