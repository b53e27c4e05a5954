// The program foremoe: plans expert placement for reinforcement-learning training of Mixture-of-Experts models, and
// executes plans. apps/ only parses arguments, calls the library and prints results. The algorithms are in src/foremoe.

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <span>
#include <string_view>

#include "command.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe::cli {
namespace {

// After one of these signals, the process removes its shared memory before it ends.
constexpr std::array kEndingSignals{SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU};

extern "C" void end_cleanly(int signal_number) {
  remove_own_shared_memory();
  ::signal(signal_number, SIG_DFL);
  ::raise(signal_number);
}

// Files of more than MappedFile::kMostCopied bytes are mapped.
extern "C" void refuse_truncated_file(int) {
  constexpr std::string_view kProblem =
      "foremoe: an input file was truncated while it was read: write files under another name, and rename them\n";
  remove_own_shared_memory();
  [[maybe_unused]] const ::ssize_t written = ::write(STDERR_FILENO, kProblem.data(), kProblem.size());
  ::_exit(kBadInput);
}

// Opens closed standard streams on /dev/null. Otherwise, a file opened later could become stdout and receive our text.
// Printing to a closed stream still fails.
void occupy_closed_streams() {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    if (::fcntl(stream, F_GETFD) == -1) ::open("/dev/null", O_RDONLY);  // takes the lowest free descriptor, `stream`
  }
}

constexpr std::array<CommandEntry, 18> kCommands{{
    {"synth", synth_command},
    {"import", import_command},
    {"routes", routes_command},
    {"collect", collect_command},
    {"pack", pack_command},
    {"inspect", inspect_command},
    {"homes", homes_command},
    {"plan", plan_command},
    {"verify", verify_command},
    {"compare", compare_command},
    {"run", run_command},
    {"simulate", simulate_command},
    {"fit", fit_command},
    {"layout", layout_command},
    {"calibrate", calibrate_command},
    {"maps", maps_command},
    {"report", report_command},
    {"options", options_command},
}};

}  // namespace

std::span<const CommandEntry> command_entries() { return kCommands; }
}  // namespace foremoe::cli

int main(int argc, char** argv) {
  foremoe::cli::occupy_closed_streams();
  ::signal(SIGXFSZ, SIG_IGN);  // exceeding the file size limit becomes a write error
  ::signal(SIGBUS, foremoe::cli::refuse_truncated_file);
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
  // A regular exit can hang: CLP loads OpenBLAS, whose worker threads spin forever at exit if the address space is
  // small. Our own resources have been closed. (Sanitizers need the regular exit for their final checks.)
  std::fflush(nullptr);
  std::_Exit(code);
#endif
  return code;
}
