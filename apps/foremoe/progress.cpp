#include "progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "console.h"

namespace foremoe::cli {
namespace {

// Estimates the time left from the parts done since the count began.
class TimeLeft {
 public:
  // Describes the parts done `seconds` after the activity began: "37 %, 12 s left". Returns an empty text as long as
  // the total is unknown or no part is done. A new count restarts the estimate.
  std::string describe(PartCount::Parts parts, double seconds) {
    if (parts.total != last_.total || parts.done < last_.done) began_ = seconds_;
    last_ = parts;
    seconds_ = seconds;
    if (parts.total <= 0 || parts.done <= 0) return "";
    const double done = static_cast<double>(std::min(parts.done, parts.total)) / static_cast<double>(parts.total);
    return fmt::format("{:.0f} %, {} left", 100 * done, duration((seconds - began_) * (1 - done) / done));
  }

 private:
  static std::string duration(double seconds) {
    if (seconds < 100) return fmt::format("{:.0f} s", seconds);
    return seconds < 6000 ? fmt::format("{:.0f} min", seconds / 60) : fmt::format("{:.1f} h", seconds / 3600);
  }

  PartCount::Parts last_;
  double seconds_ = 0;  // of the last call
  double began_ = 0;    // the last call before the count began
};

}  // namespace

Activity::Activity(std::string what, PartCount* parts) : parts_(parts) {
  if (is_quiet() || !is_terminal(stderr)) return;
  line_ = std::jthread([what = std::move(what), parts](const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any stopped;
    std::unique_lock lock(mutex);
    TimeLeft time_left;
    for (int seconds = 1;; ++seconds) {
      stopped.wait_for(lock, stop, std::chrono::seconds(1), [] { return false; });
      if (stop.stop_requested()) {
        if (seconds > 1) fmt::print(stderr, "\r\x1b[K");
        return;
      }
      std::string state = parts != nullptr ? time_left.describe(parts->read(), seconds) : "";
      if (state.empty()) state = fmt::format("{} s", seconds);
      fmt::print(stderr, "\r{} … {}\x1b[K", printable(what), state);
    }
  });
}

Activity::~Activity() {
  if (parts_ != nullptr) parts_->begin(0);  // the next activity may not count
}

void Progress::operator()(const std::string& what) {
  activity_.reset();
  activity_.emplace(what, parts_);
}

}  // namespace foremoe::cli
