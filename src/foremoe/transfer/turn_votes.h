#pragma once

// Ranks vote on each turn whether all experts for the turn's layer have arrived on all ranks.
//
// Method. All ranks process turns in the same order. A turn needs no vote if no copy arrives at it on any rank and its
//   layer is whole, since all experts are then still present. Otherwise a rank votes once its copies have ended, often
//   before the turn begins. Votes of several layers may be open at once. Turns after the last of the order, which
//   restore homes, always need a vote. A negative outcome marks the layer as broken, a positive one as whole. Missing
//   copies are requested again for the layer's next turn.
// Invariant. The schedule and earlier outcomes determine which turns need a vote. Schedule and outcomes are the same on
//   all ranks: the outcome of a layer's vote is known before its next vote starts.
// Guarantee. A rank that waits for a turn and has voted learns the outcome or throws PhaseFailed within the ballot's
//   timeout. This timeout defaults to the time that other ranks' copies may take, plus one attempt.

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
  // Returns the decisions since the last call. Turns after the order's last turn are those at which homes return.
  std::span<const Decided> step(const EnginePosition& position, EngineClock::time_point now);
  bool open() const { return !open_.empty(); }
  bool changed() const { return changed_; }  // in the last step

 private:
  struct Layer {
    bool broken = false;
    bool undecided = false;           // has an open vote
    std::vector<std::size_t> leased;  // this rank's copies whose lease covers the current turn
  };
  struct Open {
    std::uint64_t number = 0;
    TurnId turn;
    EngineClock::time_point cast;
  };

  bool restores_homes(TurnId turn) const { return turn.value >= parts_.schedule.order.size(); }
  Layer& layer_of(TurnId turn) { return layers_[parts_.schedule.order[turn].layer.index()]; }
  bool ask(EngineClock::time_point now);  // votes on the next turn if possible now
  void count(TurnId turn, bool whole);
  bool settled(std::span<const std::size_t> copies) const;
  void cast(TurnId turn, std::span<const std::size_t> copies, EngineClock::time_point now);

  EngineParts& parts_;
  const EngineOptions& options_;
  CopyFetcher& fetcher_;
  LayerTurns turns_;
  std::vector<Layer> layers_;
  TurnId next_;           // first turn without a vote or decision
  bool entered_ = false;  // the leases of next_'s layer are up to date
  std::uint64_t next_number_ = 0;
  std::deque<Open> open_;
  std::vector<Decided> decided_;
  bool changed_ = false;
};

}  // namespace foremoe
