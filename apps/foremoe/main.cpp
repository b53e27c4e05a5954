// foremoe: plans where the experts of a Mixture-of-Experts model sit while it is trained by reinforcement learning,
// and executes the plans.
// Parse, call, print; everything that has an opinion is in src/foremoe.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <new>
#include <string>
#include <string_view>

#include "command.h"
#include "foremoe/core/error.h"
#include "help_text.h"

namespace foremoe::cli {
namespace {

// Libraries name arguments as their structs do: guest_slots is --guest-slots.
std::string option_named(std::string_view argument) {
  std::string option = "--";
  for (const char c : argument) option += c == '_' ? '-' : c;
  return option;
}

constexpr std::string_view kDescription =
    "Plans where copies of a Mixture-of-Experts model's experts sit while it is trained by reinforcement learning,\n"
    "for every layer of every micro-step, from the routes that a rollout recorded; and executes the plans.";

constexpr std::string_view kFooter = R"(
From a recorded rollout to a verified plan:

  foremoe import sample*.npy --experts 128 --out trace.safetensors       what your engine recorded
  foremoe collect trace.safetensors --ranks 8 --out load.safetensors     its counts: all that planning needs
  foremoe inspect load.safetensors                                       how uneven is it?
  foremoe compare load.safetensors --guest-slots 1                       what would help, and how much?
  foremoe plan load.safetensors --guest-slots 1 --out plan.safetensors   what sits where, and who serves which tokens
  foremoe verify load.safetensors plan.safetensors                       is it right?
  foremoe run trace.safetensors --guest-slots 1                          does it hold when real experts run?
  foremoe simulate load.safetensors --cluster h100 --model qwen3-30b-a3b what would a cluster gain?

No rollout at hand? foremoe synth --out load.safetensors

Words: a *rank* is one accelerator of the expert-parallel group, the *home* of an expert the rank that owns it, a
*guest slot* room on a rank for a copy of somebody else's expert, a *micro-step* one small batch, *tokens* are counted
once per expert that they chose. The imbalance ratio ρ is the busiest rank's tokens ÷ the mean rank's; 1 is perfect.

Exit codes: 0 fine; 1 checked and found wrong; 2 wrong usage or input that cannot be read; 3 a run could not go on.)";

int fail(const std::string& command, const std::string& message, bool usage) {
  std::string line = fmt::format("{}: {}", command, message);
  for (char& c : line) {
    if (c == '\n') c = ' ';
  }
  fmt::print(stderr, "{}{}\n", line, usage ? fmt::format(" (see {} --help)", command) : "");
  return kBadInput;
}

std::string name_of_parsed(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? "foremoe" : "foremoe " + parsed.front()->get_name();
}

int run(int argc, char** argv) {
  CLI::App app{std::string(kDescription), "foremoe"};
  app.formatter(std::make_shared<HelpText>());
  app.footer(std::string(kFooter));
  app.set_version_flag("--version", "foremoe " FOREMOE_VERSION, "Print the version and exit");
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.require_subcommand(1);
  const std::array<Command, 12> commands = {synth_command(app),   import_command(app),    collect_command(app),
                                            inspect_command(app), plan_command(app),      verify_command(app),
                                            compare_command(app), run_command(app),       simulate_command(app),
                                            report_command(app),  calibrate_command(app), reproduce_command(app)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    const bool names_none = app.get_subcommands().empty() && argc > 1 && *argv[1] != '-';
    return fail(name_of_parsed(app), names_none ? fmt::format("'{}' is no subcommand", argv[1]) : error.what(),
                /*usage=*/true);
  }

  for (const Command& command : commands) {
    if (!app.got_subcommand(command.app)) continue;
    try {
      const int code = command.run();
      if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
        return fail(name_of_parsed(app), "standard output cannot be written", /*usage=*/false);
      }
      return code;
    } catch (const InputError& error) {
      return fail(name_of_parsed(app), message_of(error, option_named), /*usage=*/false);
    } catch (const std::bad_alloc&) {
      return fail(name_of_parsed(app), "not enough memory for an input of this size", /*usage=*/false);
    }
  }
  return kBadInput;
}

}  // namespace
}  // namespace foremoe::cli

int main(int argc, char** argv) {
  try {
    return foremoe::cli::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "foremoe: %s\n", error.what());
    return foremoe::cli::kBadInput;
  }
}
