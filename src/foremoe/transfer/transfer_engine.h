#pragma once

// Expert Transfer Engine of one rank: copies experts into their buffers on schedule while the rank computes. The rank
// takes its turns in order:
//
//   submit(t)           turn t begins: copies of the next `depth` turns start if their buffer is free
//   … the rank's work between layers; copies proceed on the engine's thread …
//   wait(t)             waits until all copies for turn t have arrived, or all ranks agree that some are missing
//   … the layer …
//   release(t)          the readers of turn t are done
//
// Method. One thread per rank polls the rank's links. At most kMaxCopiesUnderWay copies are in progress; the rest wait
// in order of the turn that needs them. A copy reads only data that its owner has published for this phase's version;
// the host path also verifies checksums. A failed or late (`timeout`) attempt is repeated on the other path, with at
// most `attempts` attempts in total.
// Agreement. Ranks vote at each turn at which copies arrive, and at each turn of a layer with an earlier failure, once
// their own copies have ended. All ranks get the same outcome. A missing guest is fetched again for the next turn that
// reads it.
// Staging. Under `free` from peers, wait(t) moves copies into place once all ranks have theirs. A copy reads from a
// peer only after that peer has moved into place all copies that arrive before this copy opens. Guarantee. No buffer is
// read between release(t) of its last reader and the next lease, or written before that release. A copy of this rank is
// missing after `timeout` × attempts (wait() returns false, or throws PhaseFailed if it must arrive). Waits throw
// PhaseFailed after `ballot_timeout` without the other ranks' votes.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>

#include "foremoe/core/timeline.h"
#include "foremoe/transfer/copy_link.h"
#include "foremoe/transfer/host_arena.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

inline constexpr int kMaxCopiesUnderWay = 64;  // per rank, with its links

// The phase cannot continue on any rank. None of the phase's results may be used.
class PhaseFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Locations of experts, as seen by one rank.
class ExpertDirectory {
 public:
  virtual ~ExpertDirectory() = default;
  virtual std::span<std::byte* const> buffer(int buffer) const = 0;  // [segment], of this rank
  // [segment]: addresses that a peer copy reads; empty if the peer's memory is not mapped here, so that a message is
  // needed. For a host-path copy: addresses of the expert at its home.
  virtual std::span<const std::byte* const> source(const ScheduledCopy& copy) const = 0;
  virtual std::uint64_t published(RankId owner) const = 0;  // version of the owner's homes (acquire)
  // put_in_place() announces that all staged copies arriving before this turn are in place (release). in_place()
  // returns whether a rank has announced it (acquire); true if its memory is not mapped, since it refuses early
  // requests.
  virtual void put_in_place(TurnId before) = 0;
  virtual bool in_place(RankId owner, TurnId before) const = 0;
};

// Votes of all ranks on a sequence of questions.
class Ballot {
 public:
  virtual ~Ballot() = default;
  virtual void cast(std::uint64_t number, bool ok) = 0;           // numbers count up from 0 on each rank
  virtual std::optional<bool> outcome(std::uint64_t number) = 0;  // true: all votes were ok; none: undecided
};

struct EngineOptions {
  std::uint64_t version = 1;                    // of this phase's weights, ≥ 1
  int attempts = 3;                             // per copy
  std::chrono::milliseconds timeout{10'000};    // of one attempt
  bool verify = true;                           // checks checksums on the host path
  bool eager = true;                            // false: a turn's copies start when the rank waits for them
  bool must_arrive = false;                     // `free`: no home to fall back to, so PhaseFailed instead of a vote
  std::chrono::milliseconds ballot_timeout{0};  // after this rank's vote; 0: timeout × (attempts + 1)
};

struct EngineParts {
  const TransferSchedule& schedule;
  const ExpertLayout& layout;
  RankId rank;
  ExpertDirectory& directory;
  const HostArena* arena = nullptr;  // of this rank's node; null if the schedule uses none
  std::unique_ptr<CopyLink> host = {};
  std::unique_ptr<CopyLink> peer = {};
  std::unique_ptr<Ballot> ballot = {};
  Timeline* timeline = nullptr;
};

struct TransferFigures {
  std::int64_t copies = 0;  // scheduled copies that arrived, and repeated fetches
  std::int64_t failed_attempts = 0;
  Bytes host_bytes;
  Bytes peer_bytes;
  double exposed_seconds = 0;  // spent in wait()
};

class ExpertTransferEngine {
 public:
  ExpertTransferEngine(EngineParts parts, const EngineOptions& options);
  ~ExpertTransferEngine();  // stops the thread; afterwards nothing writes to a buffer
  ExpertTransferEngine(const ExpertTransferEngine&) = delete;
  ExpertTransferEngine& operator=(const ExpertTransferEngine&) = delete;

  void submit(TurnId turn);
  bool wait(TurnId turn);  // true: every rank has all experts for its slots; same on all ranks
  void release(TurnId turn);
  void finish();  // after the last turn: homes restored (`free`), peers served
  TransferFigures figures() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace foremoe
