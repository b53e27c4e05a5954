#pragma once

// The attempts of a rank that are under way: from the choice of a path to what has become of it.
//
// Method. An attempt first waits until its source has the version that the phase uses, is then with its link, and has
//   arrived when the link says so, the source's version is still the same and, on the host path, checksums agree. It
//   has failed when the link says so, when any of this is not true, when the source has gone on to a later version, or
//   when it is late; then the link has forgotten it and nothing writes to its buffer any more.
// Complexity. step() is linear in the attempts under way, of which there are at most kMaxCopiesUnderWay.

#include <chrono>
#include <span>
#include <vector>

#include "foremoe/transfer/layer_turns.h"
#include "foremoe/transfer/transfer_engine.h"

namespace foremoe {

using EngineClock = std::chrono::steady_clock;

class CopyAttempts {
 public:
  CopyAttempts(EngineParts& parts, const EngineOptions& options);

  struct Start {
    std::size_t copy = 0;  // of the schedule
    Path path = Path::kHost;
    Event after;
  };
  struct End {
    std::size_t copy = 0;
    Path path = Path::kHost;
    bool arrived = false;
    Bytes bytes;
  };

  // Can the copy come this way? A peer whose memory is not mapped only answers what the schedule says that it will be
  // asked.
  bool possible(std::size_t copy, Path path) const;
  bool any() const { return num_under_way_ > 0; }
  bool full() const { return num_under_way_ == kMaxCopiesUnderWay; }
  void start(const Start& start, EngineClock::time_point now);  // possible, not full
  // Asks links and sources; what has ended until the next call.
  std::span<const End> step(EngineClock::time_point now);
  void cancel_all();

 private:
  struct Attempt {
    bool under_way = false;
    bool with_link = false;
    CopyId id;
    std::size_t copy = 0;
    Path path = Path::kHost;
    Event after;
    EngineClock::time_point deadline;
    std::int64_t begin_ns = 0;
    std::vector<std::size_t> segments;
    std::vector<Chunk> chunks;             // [i] of segments[i]
    std::vector<std::uint64_t> checksums;  // [i], as the link saw them
  };
  enum class Outcome : std::uint8_t { kUnderWay, kArrived, kFailed };

  const ScheduledCopy& scheduled(const Attempt& attempt) const { return parts_.schedule.copies[attempt.copy]; }
  CopyLink& link(const Attempt& attempt) const { return attempt.path == Path::kHost ? *parts_.host : *parts_.peer; }
  int arena_index(const ScheduledCopy& copy) const;
  std::uint64_t version(const Attempt& attempt) const;
  void submit(Attempt& attempt);
  Outcome outcome(Attempt& attempt);
  bool sound(const Attempt& attempt) const;
  End end(Attempt& attempt, bool arrived);

  EngineParts& parts_;
  const EngineOptions& options_;
  LayerTurns turns_;
  std::vector<Attempt> attempts_;  // [kMaxCopiesUnderWay]
  int num_under_way_ = 0;
  int next_id_ = 0;
  std::vector<End> ended_;
};

}  // namespace foremoe
