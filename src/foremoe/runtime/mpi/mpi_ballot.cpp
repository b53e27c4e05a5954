#include "foremoe/runtime/mpi/mpi_ballot.h"

#include <memory>

namespace foremoe {

MpiBallot::MpiBallot(const MpiSession& session, MPI_Comm group, std::uint64_t number)
    : session_(session), group_(group), tag_(static_cast<int>(number % kMaxTag)), box_(session.num_ranks()) {}

MpiBallot::~MpiBallot() {
  constexpr std::chrono::milliseconds kLongest{1'000};
  try {
    Patience patience(kLongest);
    do {
      forget_delivered();
    } while (!sent_.empty() && patience.pause());
  } catch (const PeerFailed&) {  // and so has the job
  }
  // What MPI may still read is never freed: a peer does not hear, and the job is about to end.
  // NOLINTBEGIN(clang-analyzer-cplusplus.NewDeleteLeaks)
  if (!sent_.empty()) static_cast<void>(std::make_unique<std::deque<Sent>>(std::move(sent_)).release());
}
// NOLINTEND(clang-analyzer-cplusplus.NewDeleteLeaks)

void MpiBallot::cast(std::uint64_t number, bool ok) {
  const std::lock_guard lock(mutex_);
  box_.cast(session_.rank(), number, ok);
  Sent& sent = sent_.emplace_back(
      Sent{.vote = {.number = number, .ok = ok ? std::uint64_t{1} : std::uint64_t{0}}, .requests = {}});
  for (int r = 0; r < session_.num_ranks(); ++r) {
    if (RankId{r} == session_.rank()) continue;
    MPI_Request& request = sent.requests.emplace_back(MPI_REQUEST_NULL);
    check_mpi(MPI_Isend(&sent.vote, sizeof(Vote), MPI_BYTE, r, tag_, group_, &request), "MPI_Isend");
  }
  forget_delivered();
}

std::optional<bool> MpiBallot::outcome(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  forget_delivered();
  hear();
  return box_.outcome(number);
}

void MpiBallot::hear() {
  while (true) {
    int there = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, tag_, group_, &there, &message, &status), "MPI_Improbe");
    if (there == 0) return;
    Vote vote;
    check_mpi(MPI_Mrecv(&vote, sizeof(vote), MPI_BYTE, &message, MPI_STATUS_IGNORE), "MPI_Mrecv");
    box_.cast(RankId{status.MPI_SOURCE}, vote.number, vote.ok != 0);
  }
}

void MpiBallot::forget_delivered() {
  while (!sent_.empty()) {
    for (MPI_Request& request : sent_.front().requests) {
      if (!finished(request)) return;
    }
    sent_.pop_front();
  }
}

}  // namespace foremoe
