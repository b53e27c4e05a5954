#pragma once

// What is told beside the result: on stderr, so that a pipe or `--json` stays clean.

#include <string>
#include <string_view>
#include <thread>

namespace foremoe::cli {

// "foremoe: rebatched for 16 ranks …": one line that the user did not ask for but should know.
void note(std::string_view text);

// From now on nothing is told: of several processes that do the same, one speaks.
void say_nothing();

// Long work in progress: while it lives, a line on stderr that tells what is done and for how long; only on a
// terminal, only after the first second, and gone when the work is.
class Activity {
 public:
  explicit Activity(std::string what);

 private:
  std::jthread line_;
};

}  // namespace foremoe::cli
