#pragma once

// Copies of one rank on the engine's thread: CopyFetcher decides which copies start, CopyAttempts runs the attempts.

#include <chrono>
#include <span>
#include <vector>

#include "foremoe/transfer/transfer_engine.h"

namespace foremoe {

using EngineClock = std::chrono::steady_clock;

// Attempts in progress, from the choice of a path to the result.
//
// Method. An attempt first waits until its source has the phase's version, and is then submitted to its link. An
//   attempt succeeds if the link reports completion, the source still has this version and, on the host path, checksums
//   match. An attempt fails if the link reports failure, a check fails, the source has a later version, or it times
//   out. After a failure, the link has dropped the copy and no longer writes to its buffer.
// Complexity. step() is linear in the number of attempts in progress, at most kMaxCopiesUnderWay.
class CopyAttempts {
 public:
  CopyAttempts(EngineParts& parts, const EngineOptions& options);

  struct End {
    std::size_t copy = 0;  // index in the schedule's copies
    Path path = Path::kHost;
    bool arrived = false;
    Bytes bytes;
  };

  // Returns whether the copy can take this path. A peer whose memory is not mapped serves only scheduled requests.
  bool possible(std::size_t copy, Path path) const;
  bool any() const { return num_under_way_ > 0; }
  bool full() const { return num_under_way_ == kMaxCopiesUnderWay; }
  void start(std::size_t copy, Path path, EngineClock::time_point now);  // requires possible() and not full()
  // Polls links and sources. Returns the attempts that ended; the result is valid until the next call.
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
    std::vector<std::uint64_t> checksums;  // [i], from the link
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

// Progress of the rank: the last turn begun and the last turn released, −1 before the first.
struct EnginePosition {
  int submitted = -1;
  int released = -1;
  int waiting = -1;  // latest turn for which the rank has waited
  EngineClock::time_point waiting_since;
};

// Decides which copies start, and on which path, and tracks which have arrived.
//
// Method. Copies wait in order of the turn that needs them. A copy starts when its buffer is free (turn `opens` has
//   begun and the last reader of the previous lease was released), its turn is at most `depth` turns ahead and an
//   attempt is free. The first attempt uses the planned path; later ones alternate if both paths are possible. After
//   `attempts` failures the copy is missing, and TurnVotes may request it again. Under `must_arrive`, all attempts use
//   the planned path, since homes are not pinned. After a total of timeout × attempts, PhaseFailed is thrown.
class CopyFetcher {
 public:
  CopyFetcher(EngineParts& parts, const EngineOptions& options);

  // Polls attempts and starts at most one. Returns true if anything changed.
  bool step(const EnginePosition& position, EngineClock::time_point now);
  bool under_way() const { return attempts_.any() || backing_off_; }  // if true, call step() again soon
  void cancel_all() { attempts_.cancel_all(); }

  // This rank's copies that arrive at a turn, as indices into the schedule's copies.
  std::span<const std::size_t> arriving(TurnId turn) const;
  bool held(std::size_t copy) const { return state(copy) == State::kHeld; }
  bool missing(std::size_t copy) const { return state(copy) == State::kMissing; }
  void fetch_again(std::size_t copy, TurnId needed);  // for a missing copy
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
  std::vector<Fetch> fetches_;              // [copy of the schedule]; unused for other ranks
  std::vector<std::size_t> mine_;           // this rank's copies, by arrives
  std::vector<std::size_t> first_of_turn_;  // [num_turns() + 1], into mine_
  std::vector<std::size_t> queue_;          // waiting copies, by needed turn, then copy
  bool backing_off_ = false;
  TransferFigures figures_;
};

}  // namespace foremoe
