#pragma once

// Records spans on lanes and writes them as a Chrome/Perfetto trace (pid = rank, tid = lane). Also measures a thread's
// CPU time.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "foremoe/core/ids.h"

namespace foremoe {

enum class Lane : std::uint8_t { kWork, kExperts, kDispatch, kWait, kHostPath, kPeerPath, kPlanner };

class Timeline {
 public:
  static constexpr std::size_t kMaxSpans = 2'000'000;

  explicit Timeline(std::size_t most_spans = kMaxSpans);
  ~Timeline();

  static std::int64_t now_ns();  // steady clock
  // Thread-safe. Records at most `most_spans` spans and counts those that it drops. The trace contains this count.
  void add(RankId rank, Lane lane, const std::string& name, std::int64_t begin_ns, std::int64_t end_ns);
  // Returns the trace as JSON text. Spans are sorted by rank, lane and begin; times are relative to the earliest begin.
  std::string to_json() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// CPU time of the calling thread, for measurements that must not depend on other processes.
double thread_cpu_seconds();

// Joins what to_json() returned in several processes. texts: at least one.
std::string merged_timelines(std::span<const std::vector<std::byte>> texts);

}  // namespace foremoe
