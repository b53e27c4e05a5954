#include "messages.h"

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>

#include "terminal.h"

namespace foremoe::cli {

namespace {
bool silent = false;
}  // namespace

void note(std::string_view text) {
  if (!silent) fmt::print(stderr, "foremoe: {}\n", text);
}

void say_nothing() { silent = true; }

Activity::Activity(std::string what) {
  if (silent || !is_terminal(stderr)) return;
  line_ = std::jthread([what = std::move(what)](const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any stopped;
    std::unique_lock lock(mutex);
    for (int seconds = 1;; ++seconds) {
      stopped.wait_for(lock, stop, std::chrono::seconds(1), [] { return false; });
      if (stop.stop_requested()) {
        if (seconds > 1) fmt::print(stderr, "\r\x1b[K");
        return;
      }
      fmt::print(stderr, "\r{} … {} s\x1b[K", what, seconds);
    }
  });
}

}  // namespace foremoe::cli
