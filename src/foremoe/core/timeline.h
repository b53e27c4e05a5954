#pragma once

// What took how long: spans on lanes, written as a Chrome/Perfetto trace (pid = rank, tid = lane), and a thread's
// CPU time.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "foremoe/core/ids.h"

namespace foremoe {

enum class Lane : std::uint8_t { kWork, kExperts, kDispatch, kWait, kHostPath, kPeerPath, kPlanner };

class Timeline {
 public:
  static constexpr std::size_t kMaxSpans = 2'000'000;

  explicit Timeline(std::size_t most_spans = kMaxSpans);
  ~Timeline();

  static std::int64_t now_ns();  // steady clock
  // Any thread may add. At most `most_spans` are kept; how many were not is told in the file.
  void add(RankId rank, Lane lane, const std::string& name, std::int64_t begin_ns, std::int64_t end_ns);
  // The trace as JSON text, spans by rank, lane, begin; times count from the first.
  std::string to_json() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// CPU time of the calling thread, for figures that must not depend on what else the machine does.
double thread_cpu_seconds();

}  // namespace foremoe
