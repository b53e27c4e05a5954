// foremoe: plans where the experts of a Mixture-of-Experts model sit while it is trained by reinforcement learning,
// and executes the plans. Parse, call, print; everything that has an opinion is in src/foremoe.

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "command.h"
#include "foremoe/core/atomic_file.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe::cli {
namespace {

// Ctrl-C and SIGTERM leave no half-written file beside an output and no shared memory.
extern "C" void end_cleanly(int signal_number) {
  remove_unfinished_files();
  remove_own_shared_memory();
  ::signal(signal_number, SIG_DFL);
  ::raise(signal_number);
}

std::vector<Command> all_commands() {
  std::vector<Command> commands{synth_command(),    import_command(), collect_command(),   inspect_command(),
                                plan_command(),     verify_command(), compare_command(),   run_command(),
                                simulate_command(), report_command(), calibrate_command(), reproduce_command()};
  commands.push_back(options_command(commands));
  return commands;
}

}  // namespace
}  // namespace foremoe::cli

int main(int argc, char** argv) {
  struct sigaction action {};
  action.sa_handler = foremoe::cli::end_cleanly;
  for (const int signal_number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before {};
    if (::sigaction(signal_number, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) continue;  // nohup, or `&`
    ::sigaction(signal_number, &action, nullptr);
  }
  int code = foremoe::cli::kBadInput;
  try {
    code = foremoe::cli::run_command_line(foremoe::cli::all_commands(), argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "foremoe: %s\n", error.what());
  }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // CLP brings OpenBLAS, whose worker threads spin for ever at an orderly end where the address space is small. All
  // that is ours has been closed. (What sanitizers find at the end needs the orderly end.)
  std::fflush(nullptr);
  std::_Exit(code);
#endif
  return code;
}
