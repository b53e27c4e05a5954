#include "run_options.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

#include "option_checks.h"

namespace foremoe::cli {
namespace {

// A number such as 2e9, at most `most`, and above 0 or not below it.
CLI::Validator number(double most, bool zero_too = false) {
  return {[most, zero_too](std::string& text) -> std::string {
            double value = 0;
            if (!CLI::detail::lexical_cast(text, value) || !std::isfinite(value)) {
              return fmt::format("'{}' is no number", text);
            }
            if (value < 0 || (value == 0 && !zero_too)) {
              return fmt::format("{} is {} 0", text, zero_too ? "less than" : "not above");
            }
            return value <= most ? std::string{} : fmt::format("{} is more than {}", text, most);
          },
          std::string{}};
}

// One of a few words.
template <class T, std::size_t N>
CLI::Option* add_choice(CLI::App& command, const char* name, T& chosen, std::array<std::pair<const char*, T>, N> words,
                        const char* text) {
  std::string expected;
  std::string type;
  const char* initial = "";
  for (std::size_t i = 0; i < N; ++i) {
    expected += fmt::format("{}{}", i == 0 ? "" : i + 1 == N ? " or " : ", ", words[i].first);
    type += fmt::format("{}{}", i == 0 ? "" : "|", words[i].first);
    if (words[i].second == chosen) initial = words[i].first;
  }
  return command
      .add_option_function<std::string>(
          name,
          [=, &chosen](const std::string& given) {
            for (const auto& [word, value] : words) {
              if (given == word) {
                chosen = value;
                return;
              }
            }
            throw CLI::ValidationError(name, fmt::format("'{}', expected {}", given, expected));
          },
          text)
      ->type_name(type)
      ->default_str(initial);
}

}  // namespace

Optimizer RunArguments::optimizer_options() const {
  const double initial = optimizer == Optimizer::Kind::kSgd ? 1e-2 : 1e-3;
  return {.kind = optimizer, .rate = static_cast<float>(rate > 0 ? rate : initial)};
}

static void add_model_options(CLI::App& command, RunArguments& arguments) {
  const std::string group = "Model";
  command.add_option("--hidden", arguments.shape.hidden, "Width of a token")
      ->type_name("H")
      ->capture_default_str()
      ->check(in_range(1, 1 << 16))
      ->group(group);
  command.add_option("--intermediate", arguments.shape.intermediate, "Width inside an expert")
      ->type_name("F")
      ->capture_default_str()
      ->check(in_range(1, 1 << 16))
      ->group(group);
  add_choice<Optimizer::Kind, 2>(command, "--optimizer", arguments.optimizer,
                                 {{{"sgd", Optimizer::Kind::kSgd}, {"adam", Optimizer::Kind::kAdam}}},
                                 "Steps the weights after a policy update")
      ->group(group);
  command.add_option("--learning-rate", arguments.rate, "Learning rate")
      ->type_name("X")
      ->default_str("0.01; 0.001 with adam")
      ->check(number(1e6))
      ->group(group);
  command
      .add_option("--steps", arguments.steps,
                  "Steps on the same batch, with the optimizer between; prints their losses")
      ->type_name("N")
      ->capture_default_str()
      ->check(in_range(1, 100'000))
      ->group(group);
}

static void add_copy_options(CLI::App& command, RunArguments& arguments) {
  const std::string group = "Copies";
  add_choice<PathChoice, 3>(command, "--path", arguments.path,
                            {{{"auto", PathChoice::kAuto}, {"host", PathChoice::kHost}, {"peer", PathChoice::kPeer}}},
                            "Where copies come from. host: the node's arena in shared memory. peer: the rank that owns "
                            "the expert. auto: whichever path is less busy")
      ->group(group);
  command
      .add_option("--prefetch-depth", arguments.depth,
                  "A copy may start so many layers before the one that needs it; under --residency shared, also the "
                  "sets of guest slots that layers borrow in turn")
      ->type_name("D")
      ->capture_default_str()
      ->check(in_range(1, 1024))
      ->group(group);
  command
      .add_option(
          "--link-throttle", arguments.link_throttle,
          "Lets each path of each rank carry no more than this, to see what slow links expose (default: as fast "
          "as memory is)")
      ->type_name("BYTES/S")
      ->check(number(1e18))
      ->group(group);
  CLI::Option* const flops =
      command
          .add_option("--work-flops", arguments.work.flops,
                      "The work between MoE layers, in the product attention: a dense matrix product of so many "
                      "floating point operations, before each layer of each pass")
          ->type_name("N")
          ->default_str("1e6")
          ->check(number(1e11, true))
          ->group(group);
  command
      .add_option("--work-ms", arguments.work.wait_ms,
                  "Instead, a wait of so many milliseconds, as for a device that computes")
      ->type_name("T")
      ->check(number(1e5))
      ->excludes(flops)
      ->group(group);
}

static void add_execution_options(CLI::App& command, RunArguments& arguments) {
  const std::string group = "Execution";
  add_choice<Comm, 2>(command, "--comm", arguments.comm, {{{"threads", Comm::kThreads}, {"mpi", Comm::kMpi}}},
                      "Ranks are threads of this process, or the processes that mpirun started, one each")
      ->group(group);
  command
      .add_option("--timeout", arguments.timeout_seconds,
                  "A rank that waits longer for another ends the run, with exit code 3")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(number(86'400))
      ->group(group);
  command
      .add_option("--repeats", arguments.repeats,
                  "Each stage runs so often, with copies overlapped and not in turns: times are the least, results "
                  "must be the same bits")
      ->type_name("N")
      ->capture_default_str()
      ->check(in_range(1, 1000))
      ->group(group);
  command
      .add_flag("--bitwise", arguments.bitwise,
                "Matrix products whose bits do not depend on where a token stands: outputs of all policies must be "
                "identical to the bit. What that costs is told")
      ->group(group);
  command
      .add_flag("--no-reference", arguments.no_reference, "Do not compute the reference, which is slow on large inputs")
      ->group(group);
  command
      .add_option(
          "--timeline", arguments.timeline,
          "Write what every rank did when, of each stage's first repeat, for ui.perfetto.dev or chrome://tracing")
      ->type_name("JSON")
      ->group(group);
}

void add_run_options(CLI::App& command, RunArguments& arguments) {
  add_input_options(command, arguments.input);
  add_policies_option(command, arguments.policies);
  add_planner_options(command, arguments.planner);
  CLI::Option* const plan =
      command.add_option("--plan", arguments.plan, "Execute this plan instead of making one")->type_name("PLAN");
  plan->excludes(command.get_option("--policy"));
  for (CLI::Option* const option :
       command.get_options([](const CLI::Option* o) { return o->get_group() == "Planning"; })) {
    const std::string name = option->get_name();
    if (name != "--seed" && name != "--homes" && name != "--in-flight") plan->excludes(option);
  }
  add_choice<RunArguments::Phases, 3>(command, "--stage", arguments.phases,
                                      {{{"both", RunArguments::Phases::kBoth},
                                        {"recompute", RunArguments::Phases::kRecompute},
                                        {"policy_update", RunArguments::Phases::kPolicyUpdate}}},
                                      "Which stages of a step run");
  add_model_options(command, arguments);
  add_execution_options(command, arguments);
  add_copy_options(command, arguments);
  add_threads_option(command, arguments.planner.threads);
  command.add_flag("--json", arguments.json, "Print an array with one object per policy and stage");
}

}  // namespace foremoe::cli
