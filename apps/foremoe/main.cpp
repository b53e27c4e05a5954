// foremoe: plans where the experts of a Mixture-of-Experts model sit while it is trained by reinforcement learning,
// and executes the plans. Parse, call, print; everything that has an opinion is in src/foremoe.

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <span>

#include "command.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe::cli {
namespace {

// Signals that end a process leave no shared memory.
constexpr std::array kEndingSignals{SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU};

extern "C" void end_cleanly(int signal_number) {
  remove_own_shared_memory();
  ::signal(signal_number, SIG_DFL);
  ::raise(signal_number);
}

// A file that is opened must not become standard output: whatever is printed would go into it. What is printed to a
// stream that was closed fails, as it should.
void occupy_closed_streams() {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    if (::fcntl(stream, F_GETFD) == -1) ::open("/dev/null", O_RDONLY);  // takes the lowest number that is free
  }
}

constexpr std::array<CommandEntry, 12> kCommands{{
    {"synth", synth_command},
    {"import", import_command},
    {"collect", collect_command},
    {"inspect", inspect_command},
    {"plan", plan_command},
    {"verify", verify_command},
    {"compare", compare_command},
    {"run", run_command},
    {"simulate", simulate_command},
    {"calibrate", calibrate_command},
    {"report", report_command},
    {"options", options_command},
}};

}  // namespace

std::span<const CommandEntry> command_entries() { return kCommands; }
}  // namespace foremoe::cli

int main(int argc, char** argv) {
  foremoe::cli::occupy_closed_streams();
  ::signal(SIGXFSZ, SIG_IGN);  // a file beyond the limit is an error of the write
  struct sigaction action {};
  action.sa_handler = foremoe::cli::end_cleanly;
  for (const int signal_number : foremoe::cli::kEndingSignals) {
    struct sigaction before {};
    if (::sigaction(signal_number, nullptr, &before) == 0 && before.sa_handler != SIG_DFL) continue;  // nohup, or `&`
    ::sigaction(signal_number, &action, nullptr);
  }
  int code = foremoe::cli::kBadInput;
  try {
    code = foremoe::cli::run_command_line(argc, argv);
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
