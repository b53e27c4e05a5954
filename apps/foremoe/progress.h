#pragma once

// Progress of long work: one line on stderr, if that is a terminal. The line appears after one second and is rewritten
// every second. It shows the percentage and the time left if the work counts its parts, otherwise the elapsed time:
//
//   planning with foremoe … 37 %, 12 s left
//   checking the plan of foremoe … 3 s

#include <optional>
#include <string>
#include <thread>

#include "foremoe/core/parallel.h"

namespace foremoe::cli {

// Shows the line from the constructor to the destructor, which removes it.
class Activity {
 public:
  // parts: the count to show; the destructor resets it. Null: show the elapsed time. Must outlive this object.
  explicit Activity(std::string what, PartCount* parts = nullptr);
  ~Activity();

 private:
  PartCount* parts_;
  std::jthread line_;
};

// A progress callback. Each call ends the previous activity and starts the next. The destructor ends the last activity.
class Progress {
 public:
  explicit Progress(PartCount* parts = nullptr) : parts_(parts) {}
  void operator()(const std::string& what);
  void end() { activity_.reset(); }

 private:
  PartCount* parts_;
  std::optional<Activity> activity_;
};

}  // namespace foremoe::cli
