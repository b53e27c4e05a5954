#include "planner_arguments.h"

#include <fmt/format.h>

#include "foremoe/core/error.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/planner/planner.h"
#include "foremoe/rollout/file_kind.h"
#include "option_checks.h"

namespace foremoe::cli {
namespace {

void parse_residency(const std::string& text, PlannerArguments& arguments) {
  arguments.choose_residency = arguments.simulates && text == "auto";
  if (arguments.choose_residency) return;
  const auto residency = residency_from_string(text);
  if (!residency) {
    throw CLI::ValidationError("--residency", fmt::format("'{}', expected static, resident, shared{}", text,
                                                          arguments.simulates ? ", free or auto" : " or free"));
  }
  arguments.options.residency = *residency;
}

PlannerStages parse_stages(const std::string& text) {
  PlannerStages stages{.base = false, .relocation = false, .replication = false, .tokens = false};
  if (text == "none") return stages;
  for (const char c : text) {
    bool* const stage = c == 'B'   ? &stages.base
                        : c == 'L' ? &stages.relocation
                        : c == 'P' ? &stages.replication
                        : c == 'T' ? &stages.tokens
                                   : nullptr;
    if (stage == nullptr || *stage) {
      throw CLI::ValidationError("--stages", fmt::format("'{}', expected some of B, L, P and T, or none", text));
    }
    *stage = true;
  }
  return stages;
}

Prefer parse_prefer(const std::string& text) {
  if (text == "balance") return Prefer::kBalance;
  if (text == "links") return Prefer::kLinks;
  throw CLI::ValidationError("--prefer", fmt::format("'{}', expected balance or links", text));
}

// A count, or the word for no limit.
int parse_limit(const char* option, const std::string& text, std::string_view unlimited) {
  if (text == unlimited) return kNoLimit;
  int value = 0;
  if (!CLI::detail::lexical_cast(text, value) || value < 0) {
    throw CLI::ValidationError(option, fmt::format("'{}', expected a count or {}", text, unlimited));
  }
  return value;
}

void expect_shape(const std::string& path, const LoadTable& load, int layers, int ranks, int experts) {
  if (layers == load.num_layers() && ranks == load.num_ranks() && experts == load.num_experts()) return;
  throw InputError({.file = path, .field = {}, .index = {}},
                   fmt::format("has {} layers, {} ranks and {} experts; {} has {}, {} and {}", layers, ranks, experts,
                               load.name, load.num_layers(), load.num_ranks(), load.num_experts()));
}

FormerStep read_former_step(const PlannerArguments& arguments, const InputOptions& input, const LoadTable& load,
                            ThreadPool& pool) {
  FormerStep former;
  if (!arguments.previous.empty()) {
    former.plan = read_plan(arguments.previous);
    expect_shape(arguments.previous, load, former.plan->num_layers(), former.plan->num_ranks(),
                 former.plan->num_experts());
  }
  if (!arguments.previous_load.empty()) {
    InputOptions same = input;
    same.path = arguments.previous_load;
    same.ranks = load.num_ranks();
    same.micro_steps = 0;
    former.load = read_step(same, pool).load;
    expect_shape(same.path, load, former.load->num_layers(), former.load->num_ranks(), former.load->num_experts());
  }
  return former;
}

}  // namespace

void add_homes_option(CLI::App& command, std::string& homes) {
  command
      .add_option(
          "--homes", homes,
          "Which rank owns which expert before planning: contiguous (E/R experts after the other on each rank), "
          "or a plan file, whose homes are taken")
      ->type_name("contiguous|PLAN")
      ->capture_default_str();
}

void add_policies_option(CLI::App& command, std::vector<std::string>& policies) {
  command.add_option("--policy", policies, "Who plans: all, or names from below between commas")
      ->type_name("A,B,…")
      ->delimiter(',')
      ->default_str(fmt::format("{}", fmt::join(policies, ",")));
}

void add_align_option(CLI::App& command, int& align) {
  command
      .add_option("--align", align,
                  "For rho_padded: grouped matrix products round each replica's tokens up to a multiple of this")
      ->type_name("TOKENS")
      ->capture_default_str()
      ->check(in_range(1, 1 << 20));
}

void add_threads_option(CLI::App& command, int& threads) {
  command
      .add_option("--threads", threads, "Threads; the result does not depend on it (default: as many as processors)")
      ->type_name("N")
      ->check(in_range(1, 4096));
}

void add_planner_options(CLI::App& command, PlannerArguments& arguments) {
  PlannerOptions& options = arguments.options;
  const std::string group = "Planning";
  const auto words = [&](const char* name, const char* type, const char* initial, auto&& parse,
                         const std::string& text) {
    command.add_option_function<std::string>(name, parse, text)->type_name(type)->default_str(initial)->group(group);
  };
  command.add_option("-G,--guest-slots", options.guest_slots, "Copies that a rank has room for in one layer")
      ->type_name("G")
      ->capture_default_str()
      ->check(in_range(0, kMaxExperts))
      ->group(group);
  words(
      "--residency", "WORD", "resident", [&arguments](const std::string& s) { parse_residency(s, arguments); },
      "static: copies are chosen once per step. resident: each layer's copies stay until replaced. shared: layers "
      "lend each other the room, so copies are fetched at every use. free: any expert anywhere (forward-only stages)" +
          std::string(arguments.simulates ? ". auto: of static, resident and shared the one with which a step is "
                                            "quickest within --memory-budget, free in recompute where that is quicker"
                                          : ""));
  words(
      "--rehome", "N|free", "0", [&](const std::string& s) { options.rehome = parse_limit("--rehome", s, "free"); },
      "Homes that may move to another rank, per layer");
  add_homes_option(command, arguments.homes);
  command.get_option("--homes")->group(group);
  command
      .add_option("--in-flight", options.in_flight,
                  "Micro-steps whose forward has run and whose backward has not, at most (1F1B)")
      ->type_name("K")
      ->capture_default_str()
      ->check(at_least(1))
      ->group(group);
  words(
      "--stages", "BLPT", "BLPT", [&](const std::string& s) { options.stages = parse_stages(s); },
      "Stages that run: B base placement, L relocation, P replication, T exact token assignment; none for no stage");
  words(
      "--prefer", "WORD", "balance", [&](const std::string& s) { options.prefer = parse_prefer(s); },
      "balance: the least loaded busiest rank. links: also less traffic between nodes, within --tolerance");
  command
      .add_option("--tolerance", options.tolerance,
                  "A micro-step is balanced when its busiest rank is at most this fraction above the mean")
      ->type_name("X")
      ->default_str(fmt::format("{}; {} where residency is shared", default_tolerance(Residency::kResident),
                                default_tolerance(Residency::kShared)))
      ->check(fraction(1))
      ->group(group);
  words(
      "--max-copies-per-rank", arguments.models_cost ? "N|none|hidden" : "N|none", "G",
      [&](const std::string& s) {
        arguments.hidden_copies = s == "hidden";
        if (arguments.hidden_copies && !arguments.models_cost) {
          throw CLI::ValidationError("--max-copies-per-rank",
                                     "'hidden' needs a modelled cluster, which this command does not have");
        }
        if (!arguments.hidden_copies) options.max_copies_per_rank = parse_limit("--max-copies-per-rank", s, "none");
      },
      arguments.models_cost
          ? "Copies into a rank, per event (a pass of a micro-step) and layer; hidden: as many as the "
            "links of --cluster carry while one layer of --model computes"
          : "Copies into a rank, per event (a pass of a micro-step) and layer");
  words(
      "--max-copies-per-source", "N|none", "none",
      [&](const std::string& s) { options.max_copies_per_source = parse_limit("--max-copies-per-source", s, "none"); },
      "Copies of experts at home on a rank, per event and layer");
  command
      .add_option("--min-tokens-per-guest", options.min_tokens_per_guest,
                  "A copy serves no tokens or at least so many; above 0 the assignment is no longer exact")
      ->type_name("TOKENS")
      ->capture_default_str()
      ->check(at_least(0))
      ->group(group);
  command.add_option("--previous", arguments.previous, "The former step's plan, to start from")
      ->type_name("PLAN")
      ->group(group);
  command
      .add_option("--previous-load", arguments.previous_load,
                  "The former step's trace or load, for policies that predict from it")
      ->type_name("INPUT")
      ->group(group);
  command.add_option("--seed", options.seed, "Of whatever is drawn; same seed, same plan")
      ->type_name("N")
      ->capture_default_str()
      ->group(group);
}

Array<RankId, 2> initial_homes(const std::string& homes, const LoadTable& load) {
  if (homes == kContiguous) return contiguous_homes(load.num_layers(), load.num_experts(), load.num_ranks());
  StepPlan plan = read_plan(homes);
  expect_shape(homes, load, plan.num_layers(), plan.num_ranks(), plan.num_experts());
  return std::move(plan.home);
}

PolicyInput PlanningInput::for_policy(const PlannerOptions& options) const {
  return {.load = step.load,
          .home = homes,
          .options = options,
          .previous = former.plan ? &*former.plan : nullptr,
          .previous_load = former.load ? &*former.load : nullptr};
}

PlanningInput read_planning_input(const InputOptions& input, const PlannerArguments& arguments, ThreadPool& pool) {
  PlanningInput planning{.step = read_step(input, pool), .homes = {}, .former = {}};
  planning.homes = initial_homes(arguments.homes, planning.step.load);
  planning.former = read_former_step(arguments, input, planning.step.load, pool);
  return planning;
}

}  // namespace foremoe::cli
