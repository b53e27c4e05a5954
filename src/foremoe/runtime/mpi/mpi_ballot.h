#pragma once

// Votes among processes: everyone tells everyone, in messages that need no answer, and counts what it hears. At most
// as many votes are under way as the ranks have cast ahead of the slowest.

#include <deque>
#include <mutex>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/mpi/mpi_session.h"
#include "foremoe/runtime/threads/ballot_box.h"

namespace foremoe {

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

}  // namespace foremoe
