#pragma once

// A rank's copies, on the engine's thread: which are due (CopyFetcher), and the attempts that fetch them
// (CopyAttempts).

#include <chrono>
#include <span>
#include <vector>

#include "foremoe/transfer/transfer_engine.h"

namespace foremoe {

using EngineClock = std::chrono::steady_clock;

// The attempts that are under way: from the choice of a path to what has become of it.
//
// Method. An attempt first waits until its source has the version that the phase uses, is then with its link, and has
//   arrived when the link says so, the source's version is still the same and, on the host path, checksums agree. It
//   has failed when the link says so, when any of this is not true, when the source has gone on to a later version, or
//   when it is late; then the link has forgotten it and nothing writes to its buffer any more.
// Complexity. step() is linear in the attempts under way, of which there are at most kMaxCopiesUnderWay.
class CopyAttempts {
 public:
  CopyAttempts(EngineParts& parts, const EngineOptions& options);

  struct End {
    std::size_t copy = 0;  // of the schedule
    Path path = Path::kHost;
    bool arrived = false;
    Bytes bytes;
  };

  // Can the copy come this way? A peer whose memory is not mapped only answers what the schedule says that it will be
  // asked.
  bool possible(std::size_t copy, Path path) const;
  bool any() const { return num_under_way_ > 0; }
  bool full() const { return num_under_way_ == kMaxCopiesUnderWay; }
  void start(std::size_t copy, Path path, EngineClock::time_point now);  // possible, not full
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

// How far the rank has come. Turns that have not begun are beyond `submitted`.
struct EnginePosition {
  int submitted = -1;
  int released = -1;
  int waiting = -1;  // the latest turn that is, or was, waited for
  EngineClock::time_point waiting_since;
};

// Which copies may start, which attempt is next, which are there.
//
// Method. Copies wait in order of the turn that needs them. One starts when its buffer is free (its `opens` has begun
//   and the former lease's last reader was released), its turn is near and there is room among the attempts. The first
//   attempt takes the planned path, the others alternate where both are possible. After `attempts` failures the copy
//   is missing; whoever counts the turns may ask for it again. Under `must_arrive` it is tried on until
//   timeout × attempts have passed, then PhaseFailed; only by the planned path, as homes are not pinned there.
class CopyFetcher {
 public:
  CopyFetcher(EngineParts& parts, const EngineOptions& options);

  // Looks after attempts and starts at most one. True when anything changed.
  bool step(const EnginePosition& position, EngineClock::time_point now);
  bool under_way() const { return attempts_.any() || backing_off_; }  // step() is to be called soon again
  void cancel_all() { attempts_.cancel_all(); }

  // This rank's copies that arrive at a turn; indices into the schedule's copies.
  std::span<const std::size_t> arriving(TurnId turn) const;
  bool held(std::size_t copy) const { return state(copy) == State::kHeld; }
  bool missing(std::size_t copy) const { return state(copy) == State::kMissing; }
  void fetch_again(std::size_t copy, TurnId needed);  // a missing one
  const TransferFigures& figures() const { return figures_; }

 private:
  enum class State : std::uint8_t { kWaiting, kUnderWay, kHeld, kMissing };
  struct Fetch {
    State state = State::kWaiting;
    TurnId needed;
    int attempts = 0;  // failed ones
    EngineClock::time_point first_start;
    EngineClock::time_point not_before;
  };

  const ScheduledCopy& scheduled(std::size_t copy) const { return parts_.schedule.copies[copy]; }
  State state(std::size_t copy) const { return fetches_[copy].state; }
  void enqueue(std::size_t copy);
  bool start_one(const EnginePosition& position, EngineClock::time_point now);
  void start(std::size_t copy, EngineClock::time_point now);
  void take(const CopyAttempts::End& end, EngineClock::time_point now);
  void failed(std::size_t copy, EngineClock::time_point now);

  EngineParts& parts_;
  const EngineOptions& options_;
  CopyAttempts attempts_;
  std::vector<Fetch> fetches_;              // [copy of the schedule]; those of other ranks are not used
  std::vector<std::size_t> mine_;           // this rank's copies, by arrives
  std::vector<std::size_t> first_of_turn_;  // [num_turns() + 1], into mine_
  std::vector<std::size_t> queue_;          // waiting, by needed turn, then copy
  bool backing_off_ = false;
  TransferFigures figures_;
};

}  // namespace foremoe
