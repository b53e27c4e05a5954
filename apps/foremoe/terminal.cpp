#include "terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace foremoe::cli {

bool is_terminal(std::FILE* stream) { return ::isatty(::fileno(stream)) == 1; }

int terminal_columns() {
  winsize size{};
  if (is_terminal(stdout) && ::ioctl(::fileno(stdout), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 100;
}

bool wants_color() {
  const auto is_set = [](const char* value) { return value != nullptr && *value != '\0'; };
  const char* const kind = std::getenv("TERM");  // NOLINT(concurrency-mt-unsafe): nobody sets the environment here
  const char* const no_color = std::getenv("NO_COLOR");  // NOLINT(concurrency-mt-unsafe)
  return is_terminal(stdout) && !is_set(no_color) && is_set(kind) && std::string_view(kind) != "dumb";
}

}  // namespace foremoe::cli
