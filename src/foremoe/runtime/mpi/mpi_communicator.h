#pragma once

// Ranks as processes, over MPI. Blocks go by messages (mpi_exchange.h).
//
// Threads. Collective calls are the rank's thread's, ballots and the peer link the engine's: each has an MPI
//   communicator of its own.
// Memory of others. Regions in named shared memory are opened by the ranks of the same node of the topology that are on
//   the same host; what cannot be opened is not mapped, and asked for by message.

#include <deque>
#include <mutex>
#include <vector>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/mpi/mpi_exchange.h"
#include "foremoe/runtime/mpi/mpi_session.h"
#include "foremoe/runtime/threads/thread_group.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {

// Votes among processes: each rank tells every other its vote, in messages that need no answer, and counts what it
// hears. At most as many votes are under way as the ranks have cast ahead of the slowest.
class MpiBallot final : public Ballot {
 public:
  // `number` of the ballot among those of this group: the same on all ranks.
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
  void hear();
  void forget_delivered();

  const MpiSession& session_;
  MPI_Comm group_;
  int tag_;
  std::mutex mutex_;
  BallotBox box_;
  std::deque<Sent> sent_;  // stays where it is while a request reads it
};

class MpiCommunicator final : public Communicator, private PeerAccess {
 public:
  // Collective. The session outlives it. Throws InputError as ProcessGroup::make_communicator does.
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

  // Aborts the job with kGaveUpExitStatus; does not return.
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
  bool map(RankId owner, std::span<const std::byte> told);  // all of what it told, and that was something

  MpiSession& session_;
  const Topology topology_;
  std::chrono::milliseconds timeout_;
  MpiExchange exchange_;
  MpiGroup ballot_group_;
  MpiGroup peer_group_;
  std::vector<std::vector<Mapping>> mapped_;  // [owner]
  std::vector<char> same_host_;               // [rank]: shares a memory with this one
  std::vector<char> sees_;                    // [reader][owner]: has mapped all that the owner shares
  std::uint64_t ballots_ = 0;
  std::uint64_t links_ = 0;
};

}  // namespace foremoe
