#pragma once

// Ranks as processes, over MPI. Blocks travel as messages (mpi_exchange.h).
//
// Threads. The rank's thread makes collective calls; the engine's thread uses ballots and the peer link. Each thread
//   has its own MPI communicator.
// Remote memory. Ranks on the same topology node and the same host open each other's regions in named shared memory.
//   Regions that cannot be opened are not mapped, and their contents are requested by message.

#include <deque>
#include <mutex>
#include <vector>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/mpi/mpi_exchange.h"
#include "foremoe/runtime/mpi/mpi_session.h"
#include "foremoe/runtime/threads/thread_group.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {

// Votes among processes. Each rank sends its vote to every other rank, without acknowledgement, and counts the votes
// that it receives. The votes in flight are at most those cast ahead of the slowest rank.
class MpiBallot final : public Ballot {
 public:
  // `number`: index of the ballot in this group, equal on all ranks.
  MpiBallot(const MpiSession& session, MPI_Comm group, std::uint64_t number);
  ~MpiBallot() override;

  void cast(std::uint64_t number, bool ok) override;
  std::optional<bool> outcome(std::uint64_t number) override;

 private:
  struct Vote {
    std::uint64_t number = 0;
    std::uint64_t ok = 0;
  };
  struct Sent {
    Vote vote;
    std::vector<MPI_Request> requests;
  };
  void receive_votes();
  void drop_delivered_votes();

  const MpiSession& session_;
  MPI_Comm group_;
  int tag_;
  std::mutex mutex_;
  BallotBox box_;
  std::deque<Sent> sent_;  // elements must not move while a request reads them
};

class MpiCommunicator final : public Communicator, private PeerAccess {
 public:
  // Collective. The session must outlive this object. Throws InputError as ProcessGroup::make_communicator does.
  MpiCommunicator(MpiSession& session, const Topology& topology, const MpiExchange::Options& options);

  RankId rank() const override { return session_.rank(); }
  const Topology& topology() const override { return topology_; }

  PeerAccess& peers() override { return *this; }

  void share(std::span<const SharedRegion> regions) override;
  void stop_sharing(bool early) noexcept override;
  const std::byte* local(RankId owner, const std::byte* pointer) const override;
  std::unique_ptr<Ballot> make_ballot() override;
  std::unique_ptr<CopyLink> make_peer_link(const TransferSchedule& schedule, const ExpertLayout& layout,
                                           const ExpertDirectory& directory) override;

  // Aborts the job with kGaveUpExitStatus. Does not return.
  void give_up(const std::string& why) noexcept override;

 private:
  struct Mapping {
    std::uint64_t owners_address = 0;
    std::uint64_t bytes = 0;
    SharedMemory memory;
  };
  bool can_map(RankId owner) const {
    return topology_.same_node(owner, session_.rank()) && same_host_[owner.index()] != 0;
  }
  void exchange_blocks(std::span<const SendBlock> send, std::span<const ReceiveBlock> receive) override {
    exchange_.run(send, receive);
  }
  bool map(RankId owner, std::span<const std::byte> told);  // true if the owner announced regions and all are mapped

  MpiSession& session_;
  const Topology topology_;
  std::chrono::milliseconds timeout_;
  MpiExchange exchange_;
  MpiGroup ballot_group_;
  MpiGroup peer_group_;
  std::vector<std::vector<Mapping>> mapped_;  // [owner]
  std::vector<char> same_host_;               // [rank]; runs on the same host as this one
  std::vector<char> sees_;                    // [reader][owner]: reader has mapped all of the owner's regions
  std::uint64_t ballots_ = 0;
  std::uint64_t links_ = 0;
};

}  // namespace foremoe
