#pragma once

// The Expert Transfer Engine of one rank: puts experts into their buffers when the schedule says, while the rank
// computes. The rank takes its turns in order:
//
//   submit(t)           turn t has begun: copies of the next `depth` turns whose buffer is free are started
//   … the rank's work between layers; copies proceed on the engine's thread …
//   wait(t)             all copies that turn t reads are there, or all ranks agree that some are not
//   … the layer …
//   release(t)          turn t's readers are done
//
// Method. One thread per rank polls its links; at most kMaxCopiesUnderWay copies are with the links, the rest wait
// in order of arrival. A copy reads only what its owner has published for this phase's version, and on the host path
// is checked by checksum. A failed or late (`timeout`) attempt is repeated by the other path, `attempts` in all.
// Agreement. At each turn at which copies arrive, and at each turn of a layer where one failed before, ranks vote
// when their copies are settled; the outcome is the same on all. A guest that is missing is fetched again for the
// next turn that reads it.
// Staging. Copies of `free` from peers are put in place by the rank itself, in wait(t), once all ranks have theirs; a
// peer is not read before it has put in place what arrived before the copy opens.
// Guarantee. Between release(t) of the last reader of a buffer and the next lease nobody reads it; before that nobody
// writes it. Waiting is bounded: `timeout` × attempts for a rank's own copies, then `ballot_timeout` for the votes of
// the others; then PhaseFailed.

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

// A phase that cannot go on, on this rank or on another. Nothing of it may be used.
class PhaseFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Where experts are, as one rank sees them.
class ExpertDirectory {
 public:
  virtual ~ExpertDirectory() = default;
  virtual std::span<std::byte* const> buffer(int buffer) const = 0;  // [segment], of this rank
  // [segment] of what the copy reads from a peer; empty when that memory is not mapped here and must be asked for by
  // message. Of a copy over the host path: its expert's home.
  virtual std::span<const std::byte* const> source(const ScheduledCopy& copy) const = 0;
  virtual std::uint64_t published(RankId owner) const = 0;  // version that this rank's homes have (acquire)
  // Staged copies. A rank has put all that arrives before this turn where it is read: says so (release), and asks
  // whether another has (acquire); true of a rank whose memory is not mapped here, which refuses what it has not.
  virtual void put_in_place(TurnId before) = 0;
  virtual bool in_place(RankId owner, TurnId before) const = 0;
};

// All ranks' votes on one question after another.
class Ballot {
 public:
  virtual ~Ballot() = default;
  virtual void cast(std::uint64_t number, bool ok) = 0;           // numbers count up from 0, on each rank
  virtual std::optional<bool> outcome(std::uint64_t number) = 0;  // true: everybody's was ok; none: not yet known
};

struct EngineOptions {
  std::uint64_t version = 1;                  // of the weights that this phase uses, ≥ 1
  int attempts = 3;                           // per copy
  std::chrono::milliseconds timeout{10'000};  // of one attempt
  bool verify = true;                         // checksums on the host path
  bool eager = true;                          // false: a turn's copies start when it waits for them
  bool must_arrive = false;  // residency `free`: there is no home to fall back to, so PhaseFailed instead of a vote
  std::chrono::milliseconds ballot_timeout{0};  // for the others' votes after one's own; 0: timeout × (attempts + 1)
};

struct EngineParts {
  const TransferSchedule& schedule;
  const ExpertLayout& layout;
  RankId rank;
  ExpertDirectory& directory;
  const HostArena* arena = nullptr;  // of this rank's node; null when the schedule uses none
  std::unique_ptr<CopyLink> host;
  std::unique_ptr<CopyLink> peer;
  std::unique_ptr<Ballot> ballot;
  Timeline* timeline = nullptr;
};

struct TransferFigures {
  std::int64_t copies = 0;  // scheduled ones that arrived, and those fetched again
  std::int64_t failed_attempts = 0;
  Bytes host_bytes;
  Bytes peer_bytes;
  double exposed_seconds = 0;  // spent in wait()
};

class ExpertTransferEngine {
 public:
  ExpertTransferEngine(EngineParts parts, const EngineOptions& options);
  ~ExpertTransferEngine();  // stops the thread; nothing writes to a buffer any more
  ExpertTransferEngine(const ExpertTransferEngine&) = delete;
  ExpertTransferEngine& operator=(const ExpertTransferEngine&) = delete;

  void submit(TurnId turn);
  bool wait(TurnId turn);  // true: every rank has what its slots need; the same on all ranks
  void release(TurnId turn);
  void finish();  // after the last turn: homes are back (residency `free`), peers have been served
  TransferFigures figures() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace foremoe
