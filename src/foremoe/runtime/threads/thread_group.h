#pragma once

// What the ranks of one process share: a place to meet, and what each lays open to the others while they are together.
//
// Method. A collective call is open(), reading, end_reading(), close(). open() returns when every rank has posted;
//   between it and end_reading() a rank may read all posts and the memory they point to; close() returns when every
//   rank has read. Ranks may outnumber cores: they sleep on a condition variable.
// Failure. Once a rank has failed, whoever meets or waits gets PeerFailed. Memory that others may still be reading is
//   never given back: settle() holds the owner until the last reader has left, which a copy in memory always does.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "foremoe/runtime/communicator.h"

namespace foremoe {

// The votes of ranks that are threads of one process. Each rank counts what it has cast; a refusal is written down
// before it is counted, so whoever sees a count sees the refusals in it. Refusals are rare: without one nothing is
// locked.
class BallotBox {
 public:
  explicit BallotBox(int num_ranks);

  void cast(RankId rank, std::uint64_t number, bool ok);
  std::optional<bool> outcome(std::uint64_t number) const;

 private:
  struct alignas(64) Count {  // a cache line each: ranks count at the same time
    std::atomic<std::uint64_t> cast{0};
  };

  int num_ranks_;
  std::unique_ptr<Count[]> counts_;  // [rank]
  std::atomic<bool> any_refused_{false};
  mutable std::mutex mutex_;
  std::set<std::uint64_t> refused_;  // guarded by mutex_
};

struct Post {
  std::span<const SendBlock> send;        // [rank]
  std::span<const ReceiveBlock> receive;  // [rank]
};

class ThreadGroup {
 public:
  ThreadGroup(const Topology& topology, std::chrono::milliseconds timeout);

  const Topology& topology() const { return topology_; }

  void open(RankId rank, const Post& post);  // throws PeerFailed; then nobody reads what was posted
  const Post& post(RankId r) const { return posts_[r.index()]; }
  void end_reading();       // this rank reads no memory of others any more
  void close(RankId rank);  // throws PeerFailed; then settle() is due
  void settle();            // after a failure: returns when no rank reads this rank's memory

  void begin_sharing(RankId rank);     // memory outside of collective calls
  void end_sharing(RankId rank);       // returns when every rank has ended, or after the timeout
  void withdraw_sharing(RankId rank);  // returns at once: nobody has begun to read

  void fail(const std::string& why) noexcept;  // the first reason stays
  void check() const;                          // throws PeerFailed after a failure

  std::shared_ptr<BallotBox> ballot_box(std::uint64_t number);  // the same for the number-th call of every rank

 private:
  using Lock = std::unique_lock<std::mutex>;
  void meet(Lock& lock, RankId rank, bool to_read);
  void fail(const Lock& lock, const std::string& why);
  void stop_sharing(const Lock& lock, RankId rank);
  std::string missing(const Lock& lock) const;

  const Topology topology_;
  const std::chrono::milliseconds timeout_;

  mutable std::mutex mutex_;  // guards all below, save posts_ between meetings
  std::condition_variable changed_;
  std::vector<Post> posts_;  // [rank]
  std::vector<char> here_;   // [rank], at the meeting that is being held
  int num_here_ = 0;
  int num_reading_ = 0;
  std::uint64_t meetings_ = 0;      // held so far
  std::vector<char> sharing_;       // [rank]
  std::uint64_t shares_ended_ = 0;  // how often the last rank has ended
  bool failed_ = false;
  std::string why_;
  struct Handed {
    std::shared_ptr<BallotBox> box;
    int ranks = 0;  // that have it
  };
  std::map<std::uint64_t, Handed> ballots_;  // those that some ranks do not have yet
};

}  // namespace foremoe
