#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/evaluate/evaluate.h"

namespace foremoe {
namespace {

// Lets the option also accept `word`, which sets `chosen`. Errors for other texts list the word.
void admit(Option& option, const char* word, bool& chosen) {
  option.words.emplace_back(word);
  const char* const also = option.type == "word" ? "or" : "nor";
  option.set = [word, also, &chosen, set = option.set](const std::string& text) {
    chosen = text == word;
    if (chosen) return;
    try {
      set(text);
    } catch (const InputError& error) {
      throw InputError(error.where(), fmt::format("{}, {} {}", error.problem(), also, word));
    }
  };
}

}  // namespace

std::vector<Option> planning_options_of(EvaluateOptions& o) {
  std::vector<Option> options = options_of(o.planner);
  for (Option& option : options) {
    if (option.name == "residency") {
      option.help +=
          ". auto: of static, resident and shared the one with which a simulated step is quickest within "
          "--memory-budget; free in recompute where that is quicker";
      admit(option, "auto", o.choose_residency);
    } else if (option.name == "max_copies_per_rank") {
      option.help += ". hidden: as many as the links of --cluster carry while one layer of --model computes";
      admit(option, "hidden", o.hidden_copies);
    }
  }
  return options;
}

std::vector<Option> simulation_options_of(EvaluateOptions& o) {
  const std::string group = "Simulation";
  return {
      number_option({.name = "rollout_seconds",
                     .value = "S",
                     .help = "Duration of the step's rollout, for the speedup of the whole RL step",
                     .group = group},
                    o.rollout_seconds, {.least = 0}),
      number_option({.name = "rollout_tail_seconds",
                     .value = "S",
                     .help = "How long the rollout's last sequences leave the planner to place experts. What placement "
                             "takes beyond that, measured here, is charged beside the modelled step",
                     .group = group},
                    o.rollout_tail_seconds, {.least = 0}),
      integer_option({.name = "planners",
                      .value = "N",
                      .help = "Who places experts together, each some of the model's layers. 0: all ranks",
                      .group = group},
                     o.planners, {0, 1 << 20}),
      integer_option({.name = "planning_threads", .value = "T", .help = "Threads of each planner", .group = group},
                     o.planning_threads, {1, 1 << 10}),
      number_option({.name = "plan_gather_seconds",
                     .value = "S",
                     .help = "What it takes to gather the planners' parts, unless one places all layers in less",
                     .group = group},
                    o.plan_gather_seconds, {.least = 0}),
      number_option({.name = "memory_budget",
                     .value = "GB",
                     .help = "Memory of one rank, 10⁹ bytes. The largest micro-batch that fits is printed, and "
                             "--residency auto stays within it",
                     .initial = "none",
                     .group = group},
                    o.memory_budget_gigabytes, {.least = 0, .above = true}),
      word_option<Rows>(
          {.name = "rows",
           .value = "WORD",
           .help = "Which of a rank's rows go to which replica. order: in row order. token: such that each "
                   "token's rows lie on few nodes; needs a trace and --dispatch token",
           .group = group},
          o.rows, {{"order", Rows::kOrder}, {"token", Rows::kToken}}),
      integer_option({.name = "prefetch_depth",
                      .value = "TURNS",
                      .help = "How many turns (one layer of one pass of one micro-step) ahead copies may begin",
                      .group = group},
                     o.depth, {1, 1 << 16}),
      word_option<PathChoice>({.name = "path",
                               .value = "WORD",
                               .help = "Source of copies. host: the node's cache of experts in host memory. peer: the "
                                       "rank that owns the expert. auto: whichever path is less busy",
                               .group = group},
                              o.path,
                              {{"auto", PathChoice::kAuto}, {"host", PathChoice::kHost}, {"peer", PathChoice::kPeer}}),
  };
}

}  // namespace foremoe
