#pragma once

// The subcommands of `foremoe`: each declares its options to the parser and says what to run once they are parsed.

#include <functional>

namespace CLI {
class App;
}

namespace foremoe::cli {

inline constexpr int kOk = 0;
inline constexpr int kFoundWrong = 1;  // checked, and it is not right
inline constexpr int kBadInput = 2;    // wrong usage, or input that cannot be read
inline constexpr int kGaveUp = 3;      // a run that could not go on

struct Command {
  const CLI::App* app = nullptr;
  std::function<int()> run;  // the exit code; throws InputError
};

Command synth_command(CLI::App& parent);
Command import_command(CLI::App& parent);
Command collect_command(CLI::App& parent);
Command inspect_command(CLI::App& parent);
Command plan_command(CLI::App& parent);
Command verify_command(CLI::App& parent);
Command compare_command(CLI::App& parent);
Command run_command(CLI::App& parent);
Command calibrate_command(CLI::App& parent);
Command reproduce_command(CLI::App& parent);
Command simulate_command(CLI::App& parent);
Command report_command(CLI::App& parent);

}  // namespace foremoe::cli
