#pragma once

// Peer path between processes. A separate link copies mapped memory. If memory is not mapped, the reader requests it
// from the owner by message; the answer contains the expert, the owner's version and a checksum per piece.
//
// Method. Each rank has at most kMaxMessagesUnderWay outstanding requests; further requests queue in order. Answers
//   arrive in memory of the link and are verified while being copied to their destination. Cancelling a copy thus needs
//   no message to the owner: the answer is dropped on arrival.
// Memory. Buffers for at most 2 · kMaxMessagesUnderWay experts; no buffers if the schedule has no unmapped copy.

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "foremoe/runtime/mpi/mpi_session.h"
#include "foremoe/transfer/transfer_engine.h"

namespace foremoe {

inline constexpr std::size_t kMaxPieces = 16;   // chunks per copy; at least one per segment of an expert
inline constexpr int kMaxMessagesUnderWay = 4;  // limit per rank on open requests, and on undelivered answers

struct PeerPiece {
  std::uint64_t segment = 0;
  std::uint64_t offset = 0;  // bytes, within the segment
  std::uint64_t bytes = 0;
};

struct PeerRequest {
  std::uint64_t number = 0;   // index among the reader's requests
  std::uint64_t message = 0;  // index into the schedule's copies
  std::uint64_t version = 0;  // version that the reader requires
  std::uint64_t num_pieces = 0;
  std::array<PeerPiece, kMaxPieces> pieces;
};

// Header of an answer. The pieces follow contiguously.
struct alignas(64) PeerAnswer {
  std::uint64_t number = 0;
  // Bytes that follow; 0 on refusal: the sender has another version, does not have the expert yet, or does not own it.
  std::uint64_t bytes = 0;
  std::array<std::uint64_t, kMaxPieces> checksums{};
};

// Owner's side: answers requests for experts of this rank in order of arrival, at most kMaxMessagesUnderWay at a time.
// Readers post the receive before the request, so every answer can be delivered.
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

  void reserve();   // allocates memory for answers now instead of at the first request
  void progress();  // never blocks
  bool idle();      // all answers have been delivered

 private:
  struct Answer {
    std::unique_ptr<std::byte[]> memory;  // a PeerAnswer and its pieces
    MPI_Request request = MPI_REQUEST_NULL;
  };
  // Writes the answer to `memory` and returns its size in bytes.
  std::size_t write(const PeerRequest& request, std::byte* memory) const;
  bool holds(const PeerRequest& request) const;

  Parts parts_;
  std::vector<Answer> answers_;
};

// Reader's side.
class MpiPeerLink final : public CopyLink {
 public:
  struct Parts {
    PeerServer::Parts server;
    std::unique_ptr<CopyLink> mapped;
    bool reads_messages = false;  // this rank reads a planned unmapped copy: allocate memory at construction
    bool sends_messages = false;  // this rank owns the source of a planned unmapped copy: likewise
    std::chrono::milliseconds timeout{10'000};
  };
  // Throws InputError if an expert exceeds the maximum message size.
  explicit MpiPeerLink(Parts parts);
  ~MpiPeerLink() override;

  void submit(const CopyRequest& request) override;
  CopyState poll(CopyId id) override;
  void cancel(CopyId id) override;
  void progress() override;
  bool serves_others() const override { return sends_messages_; }

 private:
  struct Slot {  // an outstanding request
    std::unique_ptr<std::byte[]> memory;
    PeerRequest asked;
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Request answer = MPI_REQUEST_NULL;
    CopyRequest copy;
    bool used = false;
    bool wanted = false;  // false after cancel()
  };
  void reserve();
  void send_waiting();
  bool make_request(const CopyRequest& copy, PeerRequest& asked) const;
  CopyState receive_answer(Slot& slot);
  bool idle();

  PeerServer::Parts parts_;
  std::unique_ptr<CopyLink> mapped_;
  std::chrono::milliseconds timeout_;
  bool sends_messages_;
  PeerServer server_;
  std::vector<Slot> slots_;
  std::deque<CopyRequest> waiting_;
  std::vector<CopyId> malformed_;  // submitted requests that no owner can answer
  std::uint64_t asked_ = 0;
};

}  // namespace foremoe
