#pragma once

// What the ranks agree on, turn after turn: are all experts there that the turn's layer needs?
//
// Method. Turns are taken in order, on all ranks alike. A turn needs no vote when no copy arrives anywhere at it and
//   its layer is whole: then everything is still there. Otherwise a rank votes as soon as its copies are settled,
//   often before the turn begins; votes of several layers may be open at once. A refused turn breaks its layer, an
//   agreed one makes it whole. What is missing at a refused turn is asked for again, for the layer's next turn.
// Invariant. Which turns are voted on follows from the schedule and from former outcomes, both the same on all ranks:
//   the layer's former vote is known before the next one's question is put.
// Guarantee. A rank that waits for a turn and has voted knows the outcome within the ballot's timeout, by default as
//   long as the others' own copies may take and one attempt more; or it gets PhaseFailed.

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "foremoe/transfer/copy_fetcher.h"

namespace foremoe {

class TurnVotes {
 public:
  TurnVotes(EngineParts& parts, const EngineOptions& options, CopyFetcher& fetcher);

  struct Decided {
    TurnId turn;
    bool whole = false;
  };
  // What has been decided until the next call. Turns behind the order's stand for the homes that are copied back.
  std::span<const Decided> step(const EnginePosition& position, EngineClock::time_point now);
  bool open() const { return !open_.empty(); }
  bool changed() const { return changed_; }  // in the last step

 private:
  struct Layer {
    bool broken = false;
    bool undecided = false;           // a vote of it is open
    std::vector<std::size_t> leased;  // this rank's copies whose lease covers the turn at hand
  };
  struct Open {
    std::uint64_t number = 0;
    TurnId turn;
    EngineClock::time_point cast;
  };

  bool brings_homes_back(TurnId turn) const { return turn.value >= parts_.schedule.order.size(); }
  Layer& layer_of(TurnId turn) { return layers_[parts_.schedule.order[turn].layer.index()]; }
  bool ask(EngineClock::time_point now);  // the next turn's question, when that can be done now
  void count(TurnId turn, bool whole);
  bool settled(std::span<const std::size_t> copies) const;
  void cast(TurnId turn, std::span<const std::size_t> copies, EngineClock::time_point now);

  EngineParts& parts_;
  const EngineOptions& options_;
  CopyFetcher& fetcher_;
  LayerTurns turns_;
  std::vector<Layer> layers_;
  TurnId next_;           // the first turn that has not been asked about
  bool entered_ = false;  // its layer's leases are up to date
  std::uint64_t next_number_ = 0;
  std::deque<Open> open_;
  std::vector<Decided> decided_;
  bool changed_ = false;
};

}  // namespace foremoe
