#pragma once

// A rank's copies: which may start, which attempt is next, which are there.
//
// Method. Copies wait in order of the turn that needs them. One starts when its buffer is free (its `opens` has begun
//   and the former lease's last reader was released), its turn is near and there is room among the attempts. The first
//   attempt takes the planned path, the others alternate where both are possible. After `attempts` failures the copy
//   is missing; whoever counts the turns may ask for it again. Under `must_arrive` it is tried on until
//   timeout × attempts have passed, then PhaseFailed; only by the planned path, as homes are not pinned there.

#include <span>
#include <vector>

#include "foremoe/transfer/copy_attempts.h"

namespace foremoe {

// How far the rank has come. Turns that have not begun are beyond `submitted`.
struct EnginePosition {
  int submitted = -1;
  int released = -1;
  int waiting = -1;  // the latest turn that is, or was, waited for
  EngineClock::time_point waiting_since;
  std::span<const Event> readers;  // [turn], valid up to `released`
};

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
  void start(std::size_t copy, const EnginePosition& position, EngineClock::time_point now);
  void take(const CopyAttempts::End& end, EngineClock::time_point now);
  void failed(std::size_t copy, EngineClock::time_point now);

  EngineParts& parts_;
  const EngineOptions& options_;
  CopyAttempts attempts_;
  std::vector<Fetch> fetches_;              // [copy of the schedule]; those of other ranks are not used
  std::vector<std::size_t> mine_;           // this rank's copies, by arrives
  std::vector<std::size_t> first_of_turn_;  // [turns + 2], into mine_
  std::vector<std::size_t> queue_;          // waiting, by needed turn, then copy
  bool backing_off_ = false;
  TransferFigures figures_;
};

}  // namespace foremoe
