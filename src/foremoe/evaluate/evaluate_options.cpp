#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluate.h"

namespace foremoe {
namespace {

// Lets the option also accept `word`. Calls choose(whether the word was given). Error messages list the word.
void admit(Option& option, const char* word, std::function<void(bool)> choose) {
  option.words.emplace_back(word);
  const char* const also = option.type == "word" ? "or" : "nor";
  option.set = [word, also, choose = std::move(choose), set = option.set](const std::string& text) {
    choose(text == word);
    if (text == word) return;
    try {
      set(text);
    } catch (const InputError& error) {
      std::string problem = error.problem();
      problem.insert(std::min(problem.find("; did you mean"), problem.size()), fmt::format(", {} {}", also, word));
      throw InputError(error.where(), problem);
    }
  };
}

}  // namespace

std::vector<Option> planning_options_of(EvaluateOptions& o) {
  std::vector<Option> options = options_of(o.planner);
  for (Option& option : options) {
    if (option.name == "residency") {
      option.help +=
          ". auto: whichever of no plan, static, resident and shared gives the fastest simulated step within "
          "--memory-budget";
      admit(option, "auto", [&o](bool all) { o.choose = all ? ChooseAmong::kAll : ChooseAmong::kGiven; });
    } else if (option.name == "prefer" || option.name == "copy_price") {
      option.set = [&o, set = option.set](const std::string& text) {
        set(text);
        if (o.choose == ChooseAmong::kDefault) o.choose = ChooseAmong::kGiven;
      };
    } else if (option.name == "max_copies_per_rank") {
      option.help += ". hidden: as many as the links of --cluster can transfer while one layer of --model computes";
      admit(option, "hidden", [&o](bool hidden) { o.hidden_copies = hidden; });
    }
  }
  return options;
}

std::vector<Option> simulation_options_of(EvaluateOptions& o) {
  const std::string group = "Simulation";
  return {
      number_option({.name = "rollout_seconds",
                     .value = "S",
                     .help = "Duration of the rollout, for the speedup of the whole RL step",
                     .group = group},
                    o.rollout_seconds, {.least = 0}),
      number_option({.name = "rollout_tail_seconds",
                     .value = "S",
                     .help = "Duration of the rollout's tail, during which the planner places experts. Placement time "
                             "beyond it, measured on this machine, is added to the modelled step",
                     .group = group},
                    o.rollout_tail_seconds, {.least = 0}),
      integer_option({.name = "planners",
                      .value = "N",
                      .help = "Number of processes that share the placement, each for some layers. 0: all ranks",
                      .group = group},
                     o.planners, {0, 1 << 20}),
      integer_option({.name = "planning_threads", .value = "T", .help = "Threads of each planner", .group = group},
                     o.planning_threads, {1, 1 << 10}),
      number_option({.name = "plan_gather_seconds",
                     .value = "S",
                     .help = "Time to gather the planners' parts. If one planner is faster alone, it places all layers",
                     .group = group},
                    o.plan_gather_seconds, {.least = 0}),
      number_option({.name = "memory_budget",
                     .value = "GB",
                     .help = "Memory of one rank in 10⁹ bytes. Prints the largest micro-batch that fits, and bounds "
                             "--residency auto",
                     .initial = "none",
                     .group = group},
                    o.memory_budget_gigabytes, {.least = 0, .above = true}),
      word_option<Rows>({.name = "rows",
                         .value = "WORD",
                         .help = "Assignment of a rank's rows to replicas. order: in row order, as executors that "
                                 "dispatch by row do. token: minimises the nodes that each token is sent to; needs a "
                                 "trace and --dispatch token",
                         .group = group},
                        o.rows, {{"order", Rows::kOrder}, {"token", Rows::kToken}}),
      integer_option(
          {.name = "prefetch_depth",
           .value = "TURNS",
           .help = "Number of turns (one layer of one pass of one micro-step) by which copies may start ahead",
           .group = group},
          o.depth, {1, 1 << 16}),
      word_option<PathChoice>({.name = "path",
                               .value = "WORD",
                               .help = "Source of copies. host: the node's cache of experts in host memory. peer: the "
                                       "rank that owns the expert. auto: the less busy path",
                               .group = group},
                              o.path,
                              {{"auto", PathChoice::kAuto}, {"host", PathChoice::kHost}, {"peer", PathChoice::kPeer}}),
  };
}

}  // namespace foremoe
