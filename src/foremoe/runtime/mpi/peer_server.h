#pragma once

// The owner's side of the peer path across nodes: answers requests for this rank's homes, in order of arrival, at most
// kMaxMessagesUnderWay at a time. Whoever asks has already made room for the answer, so every answer is delivered.

#include <memory>
#include <vector>

#include "foremoe/runtime/mpi/mpi_session.h"
#include "foremoe/runtime/mpi/peer_messages.h"
#include "foremoe/transfer/transfer_engine.h"

namespace foremoe {

class PeerServer {
 public:
  struct Tags {
    int request = 0;
    int answer = 0;
  };
  struct Parts {
    RankId rank;
    MPI_Comm group = MPI_COMM_NULL;
    Tags tags;
    const TransferSchedule& schedule;
    const ExpertLayout& layout;
    const ExpertDirectory& directory;
  };
  explicit PeerServer(const Parts& parts) : parts_(parts) {}
  ~PeerServer();

  void reserve();   // memory for answers, now instead of at the first request
  void progress();  // never waits
  bool idle();      // every answer has been delivered

 private:
  struct Answer {
    std::unique_ptr<std::byte[]> memory;  // a PeerAnswer and what follows it
    MPI_Request request = MPI_REQUEST_NULL;
  };
  // Bytes to send from `memory`.
  std::size_t write(const PeerRequest& request, std::byte* memory) const;
  bool holds(const PeerRequest& request) const;

  Parts parts_;
  std::vector<Answer> answers_;
};

std::size_t max_answer_bytes(const ExpertLayout& layout);

}  // namespace foremoe
