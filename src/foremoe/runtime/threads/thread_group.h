#pragma once

// State shared by the ranks of one process: meetings, and the memory that ranks expose to each other between meetings.
//
// Method. A collective call is open(), reading, end_reading(), close(). open() returns when every rank has posted.
//   Until end_reading(), a rank may read all posts and the memory that they point to. close() returns when every rank
//   has read. Waiting ranks sleep on a condition variable, since ranks may outnumber cores.
// Failure. After a rank has failed, meetings and waits throw PeerFailed. Memory is never freed while others may read
//   it: settle() blocks the owner until the last reader has finished its copy, which always ends.

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

// Votes of ranks that are threads of one process. Each rank counts its votes. A refusal is recorded before it is
// counted, so a rank that reads the counts also sees all refusals in them. Refusals are rare; ranks lock only if there
// is one.
class BallotBox {
 public:
  explicit BallotBox(int num_ranks);

  void cast(RankId rank, std::uint64_t number, bool ok);
  std::optional<bool> outcome(std::uint64_t number) const;

 private:
  struct alignas(64) Count {  // one cache line each: ranks count concurrently
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

  void open(RankId rank, const Post& post);  // throws PeerFailed; the post is then not read
  const Post& post(RankId r) const { return posts_[r.index()]; }
  void end_reading();       // this rank has finished reading
  void close(RankId rank);  // throws PeerFailed; then call settle()
  void settle();            // after a failure: waits until no rank reads

  void begin_sharing(RankId rank);     // share memory outside collective calls
  void end_sharing(RankId rank);       // returns when all ranks have ended, or on timeout
  void withdraw_sharing(RankId rank);  // returns at once; call only if no rank has begun to read

  void fail(const std::string& why) noexcept;  // keeps the first reason
  void check() const;                          // throws PeerFailed after a failure

  std::shared_ptr<BallotBox> ballot_box(std::uint64_t number);  // the number-th call of every rank returns the same box

 private:
  using Lock = std::unique_lock<std::mutex>;
  void meet(Lock& lock, RankId rank, bool to_read);
  void fail(const Lock& lock, const std::string& why);
  void stop_sharing(const Lock& lock, RankId rank);
  std::string missing(const Lock& lock) const;

  const Topology topology_;
  const std::chrono::milliseconds timeout_;

  mutable std::mutex mutex_;  // guards all members below, except posts_ between meetings
  std::condition_variable changed_;
  std::vector<Post> posts_;  // [rank]
  std::vector<char> here_;   // [rank], has arrived at the current meeting
  int num_here_ = 0;
  int num_reading_ = 0;
  std::uint64_t meetings_ = 0;      // meetings completed
  std::vector<char> sharing_;       // [rank]
  std::uint64_t shares_ended_ = 0;  // number of times that all ranks had ended sharing
  bool failed_ = false;
  std::string why_;
  struct Handed {
    std::shared_ptr<BallotBox> box;
    int ranks = 0;  // number of ranks that have fetched it
  };
  std::map<std::uint64_t, Handed> ballots_;  // boxes that some ranks have not fetched
};

}  // namespace foremoe
