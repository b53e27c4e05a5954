// foremoe plan: plans a trace or a load, writes the plan and prints its figures.

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluation_json.h"
#include "foremoe/evaluate/memory_remarks.h"
#include "foremoe/plan/plan_file.h"
#include "planning_arguments.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kPlanExamples =
    R"(  foremoe plan step.load.safetensors --guest-slots 2 --out plan.safetensors
  foremoe plan step.trace.safetensors --ranks 16 --residency static --out plan.safetensors
  foremoe plan step.load.safetensors --in-flight 4 --json   plan forward and backward in 1F1B order; print JSON
  foremoe plan step.load.safetensors --stages BLT           move whole experts instead of replicating them
)";

constexpr std::string_view kPlanMeaning =
    R"(Figures: ρ is the busiest rank's tokens ÷ the mean rank's, in one layer of one micro-step. The layer takes ρ times as
long as with perfect balance. mean, p99 and max are over all (layer, micro-step) pairs with load. A copy moves one
expert's weights into one guest slot. An event is a pass (forward or backward) of a micro-step; with one micro-step in
flight, an event covers both passes. foremoe verify checks a plan. In --json, tokens are token–expert assignments,
plan_seconds is wall time, and plan_us_per_layer_micro_step is CPU time in µs without the work done once per step.
)";

struct PlanArguments : PlanningArguments {
  std::string policy = "foremoe";
  std::string out;
};

void print(const JobEvaluation& job, const PlanningSession& session, const std::string& out) {
  const Evaluation& e = job.policies.front();
  const LoadTable& load = session.groups.front().load;
  const PlanFigures& f = e.figures;
  print_values("{}\n", session.describe_input());
  print_values("Planned by {}: residency {}, {} per rank and layer, {} in flight\n\n", f.policy, to_string(f.residency),
               counted(f.guest_slots, "guest slot"), counted(f.in_flight, "micro-step"));
  FactList facts;
  if (f.max_rank_tokens == 0) {
    facts.add("imbalance ρ", "no load");
  } else {
    facts.add("imbalance ρ",
              fmt::format("mean {:.4f}, p99 {:.4f}, max {:.4f}; 1 is perfect, whole tokens permit {:.4f}", f.rho.mean,
                          f.rho.p99, f.rho.max, f.rho_lower_bound_mean));
    facts.add("ρ, padded", fmt::format("mean {:.4f}, max {:.4f}: each replica's tokens rounded up to a multiple of {}",
                                       f.rho_padded.mean, f.rho_padded.max, f.align));
    facts.add("busiest rank", fmt::format("{} tokens in one layer of one micro-step", f.max_rank_tokens));
  }
  facts.add("copies", fmt::format("{:.2f} per layer and event in the whole group, at most {} into one rank",
                                  f.copies_per_layer_event, f.copies_max_per_rank));
  facts.add("guests", fmt::format("{:.2f} copies serve tokens, per layer and event", f.guests_per_layer));
  if (f.home_moves > 0) facts.add("homes", fmt::format("{} moved, over all layers", f.home_moves));
  if (load.topology().num_nodes() > 1) {
    facts.add("busiest node", fmt::format("sends or receives {:.0f} tokens per layer and micro-step, at most {:.0f}",
                                          f.node_link_tokens.mean, f.node_link_tokens.max));
    if (f.node_link_rows) {
      facts.add("", fmt::format("in {:.0f} rows, at most {:.0f}, one per token and node", f.node_link_rows->mean,
                                f.node_link_rows->max));
    }
  }
  facts.add("planning", fmt::format("{:.3f} s on {}; {:.1f} µs of CPU per layer and micro-step, {:.3f} s once per step",
                                    e.times.wall_seconds, counted(e.threads, "thread"), e.us_per_layer_micro_step(),
                                    e.times.base_cpu_seconds));
  if (e.choice) facts.add("plan", describe(*e.choice));
  if (!out.empty()) {
    const std::size_t last = session.groups.size() - 1;
    const std::string first = session.output_of(out, 0);
    facts.add("written", last == 0 ? first : fmt::format("{} … {}", first, session.output_of(out, last)));
  }
  fmt::print("{}{}", facts.to_string(), job.groups.empty() ? "" : "\n");
  print_groups(job);
}

int run(PlanArguments arguments, const Given& given) {
  EvaluateOptions& options = arguments.evaluate;
  if (options.memory_budget_gigabytes > 0 && options.choose != ChooseAmong::kAll) {
    throw InputError({.field = "memory_budget"}, "has an effect only with --residency auto");
  }
  PlanningSession session(arguments, given,
                          {.policies = {arguments.policy}, .one_policy = true, .output = arguments.out});

  options.check = false;  // foremoe verify checks plans
  options.simulate = options.choose != ChooseAmong::kGiven;
  std::vector<std::string> remarks;
  const JobEvaluation job = session.each_group([&](const Workload& group, const EvaluationContext& context) {
    Evaluation e = evaluate(*session.policies.front(), group, options, context);
    if (!e.planned()) {
      throw InputError({.file = group.load.name},
                       fmt::format("policy {} cannot plan it: {}", arguments.policy, e.skipped));
    }
    expect_residency(e, session.residency);
    if (e.step) {
      const NeededMemory needed{.who = fmt::format("residency {}", to_string(e.plan.residency)),
                                .bytes = e.step->memory_bytes_per_rank};
      std::ranges::move(memory_remarks({needed}, *session.cost, options.memory_budget()), std::back_inserter(remarks));
      e.step.reset();
    }
    return std::vector{std::move(e)};
  });
  session.progress.end();
  note_all(remarks);
  for (std::size_t g = 0; !arguments.out.empty() && g < session.groups.size(); ++g) {
    const Evaluation& planned = (job.groups.empty() ? job.policies : job.groups[g]).front();
    write_plan(planned.plan, session.output_of(arguments.out, g));
  }
  if (arguments.json) {
    fmt::print("{}\n", to_json(job, /*checked=*/false).front().dump(2));
  } else {
    print(job, session, arguments.out);
  }
  return kOk;
}

}  // namespace

Command plan_command() {
  auto a = std::make_shared<PlanArguments>();
  std::vector<Option> budget = only(simulation_options_of(a->evaluate), {"memory_budget"});
  budget.front().help = "Memory of one rank in 10⁹ bytes: the bound for --residency auto";
  return {
      .name = "plan",
      .summary = "Plan the placement of replicas and the tokens that each serves, for every layer of every micro-step",
      .examples = std::string(kPlanExamples),
      .meaning = fmt::format("Policies:\n{}\n{}", list_of_policies_and_their_options(), kPlanMeaning),
      .options = joined(
          {planning_options(*a, /*residency_auto=*/true),
           std::move(budget),
           {text_option({.name = "policy", .value = "NAME", .help = "Policy that plans", .main = true}, a->policy),
            out_option(a->out, "PLAN", "Write the plan here, atomically"),
            json_option(a->json, "Print the figures as one JSON object")}}),
      .run = [a](const Given& given) { return cli::run(*a, given); }};
}

}  // namespace foremoe::cli
