// foremoe layout: which expert-parallel size and how many pipeline stages a job should use.

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/layout_report.h"
#include "foremoe/evaluate/memory_remarks.h"
#include "planning_arguments.h"
#include "plot.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kLayoutExamples =
    R"(  foremoe layout step.trace.safetensors --gpus 128 --cluster h100 --model qwen3-235b-a22b
  foremoe layout step.load.safetensors --gpus 64 --cluster h100 --model qwen3-30b-a3b --memory-budget 72 --plot layout.png
)";

constexpr std::string_view kLayoutMeaning =
    R"(All layouts run the same tokens in micro-steps of the same size. With S pipeline stages there are 1 ÷ S as many
data-parallel ranks, and each has S times as many micro-steps. Ranks of a stage are consecutive, and so are those of an
expert-parallel group. The schedule is 1F1B without virtual stages. Seconds and memory are those of `simulate`;
docs/users/simulation.md describes pipeline stages.

  EP, stages    expert-parallel size and pipeline stages; groups: expert-parallel groups of a stage
  micro-steps   of a rank
  unplanned s   seconds of a step without a plan (vanilla)
  GB            memory of the rank that uses the most; * exceeds the limit
  planned s     seconds with the plan of foremoe in the last column, and its memory
  gain          unplanned ÷ planned seconds

A layout is not planned if even with every rank at the mean load, without copies and exchanges, it is not faster than the
best found.
)";

struct LayoutArguments {
  InputOptions input;
  EvaluateOptions evaluate;
  CostRequest cost;
  int gpus = 0;
  int threads = 0;
  std::string plot;
  bool json = false;
};

// Reads the load of all ranks. Every layout splits it in another way.
Workload read_job(const LayoutArguments& a, const NamedCost& named, ThreadPool& pool) {
  InputOptions input = a.input;
  input.ep = 1;  // the experts need not divide among all ranks
  if (input.ranks_per_node == 0) input.ranks_per_node = named.cluster->ranks_per_node;
  input.wanted_ranks = a.gpus;
  Workload whole = read_load_or_trace(input, pool);
  if (whole.load.num_ranks() == a.gpus) return whole;
  throw InputError({.field = "gpus"},
                   fmt::format("{}, but {} is a load of {}: give the trace, which can be batched for "
                               "any number of ranks, or --gpus {}",
                               a.gpus, a.input.path, counted(whole.load.num_ranks(), "rank"), whole.load.num_ranks()));
}

void print(const LayoutChoice& choice, const Workload& whole, const CostModel& cost) {
  print_values("{}: {}\n{}; limit {} GB per rank; {} tokens per rank and micro-step on average\n\n", whole.load.name,
               describe(whole.load), describe(cost), gigabytes(choice.limit), choice.mean_tokens.value);
  TextTable table({"EP", "stages", "groups", "micro-steps", "unplanned s", "GB", "planned s", "GB", "gain", "plan"});
  const auto memory = [&](const LayoutStep& step) { return gigabytes(step.memory) + (choice.fits(step) ? " " : "*"); };
  for (const LayoutResult& result : choice.layouts) {
    const JobLayout& layout = result.layout;
    std::vector<std::string> cells{fmt::format("{}", layout.ep),
                                   fmt::format("{}", layout.stages),
                                   fmt::format("{}", layout.groups),
                                   fmt::format("{}", result.micro_steps),
                                   fmt::format("{:.4g}", result.unplanned.seconds),
                                   memory(result.unplanned)};
    if (result.planned) {
      const LayoutStep& step = result.planned->step;
      cells.insert(cells.end(), {fmt::format("{:.4g}", step.seconds), memory(step),
                                 fmt::format("{:.3f}", speedup(result.unplanned.seconds, step.seconds)),
                                 describe_plan(result.planned->planner)});
    } else {
      cells.insert(cells.end(), {"-", "-", "-", result.not_planned});
    }
    table.add(std::move(cells));
  }
  fmt::print("{}\n", table.to_string());
  print_values("Recommended: {}\n", recommendation(choice));
  for (const std::string& options : trainer_options(choice, cost.model())) print_values("  {}\n", options);
  for (const std::string& remark : layout_remarks(whole, cost)) print_values("{}.\n", remark);
}

int run(const LayoutArguments& a) {
  const std::vector<std::string> files{a.input.path, a.cost.cluster, a.cost.model};
  expect_plot(a.plot, files);
  ThreadPool pool(static_cast<std::size_t>(a.threads));
  Progress progress{&pool.parts()};
  const NamedCost named = read_cost(a.cost);
  progress(fmt::format("reading {}", a.input.path));
  const Workload whole = read_job(a, named, pool);
  progress.end();
  note_all(whole.remarks);
  const CostModel cost = find_cost_model(named, whole.load);
  const LayoutChoice choice =
      choose_layout(whole, a.evaluate, {.pool = pool, .cost = &cost, .progress = std::ref(progress)});
  progress.end();
  if (a.json) {
    fmt::print("{}\n", to_json(choice, whole, cost).dump(2));
  } else {
    print(choice, whole, cost);
  }
  draw_layout(a.plot, choice, whole, cost);
  return kOk;
}

}  // namespace

Command layout_command() {
  auto a = std::make_shared<LayoutArguments>();
  std::vector<Option> cost = options_of(a->cost);
  option_named(cost, "cluster").required = true;
  option_named(cost, "model").initial = "the known model that fits the input";
  std::vector<Option> simulation =
      only(simulation_options_of(a->evaluate), {"memory_budget", "path", "rows", "prefetch_depth"});
  simulation.front().help = "Memory of one rank in 10⁹ bytes";
  simulation.front().initial = "the memory of the cluster's device";
  simulation.front().main = true;
  std::vector<Option> planning = only(planning_options_of(a->evaluate), {"residency"});
  planning.front().help =
      "How long guests stay in their slots: static, resident or shared. auto: whichever is the fastest";
  planning.front().initial = "auto";
  std::erase(planning.front().words, "free");  // it serves forward-only phases
  return {.name = "layout",
          .summary = "Find the expert-parallel size and the number of pipeline stages with the fastest step",
          .examples = std::string(kLayoutExamples),
          .meaning = std::string(kLayoutMeaning),
          .options = joined(
              {{input_option(a->input.path, "Trace, or load of all GPUs"),
                integer_option({.name = "gpus",
                                .value = "N",
                                .help = "Ranks of the job. A trace is batched for them; a load must have as many",
                                .main = true,
                                .required = true},
                               a->gpus, {1, kMaxRanks})},
               only(options_of(a->input), {"ranks_per_node", "tokens_per_rank", "layers", "micro_steps"}),
               std::move(cost),
               std::move(planning),
               std::move(simulation),
               {threads_option(a->threads), plot_option(a->plot, "seconds of all layouts, planned and unplanned,", ""),
                json_option(a->json, "Print all figures as one JSON object")}}),
          .run = [a](const Given&) { return cli::run(*a); }};
}

}  // namespace foremoe::cli
