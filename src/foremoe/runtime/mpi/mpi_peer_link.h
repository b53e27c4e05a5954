#pragma once

// The peer path among processes. Mapped memory is copied by a link of its own. For memory that is not mapped, the
// reader asks the owner by message, and the expert comes with the owner's version and a checksum for each piece.
//
// Method. At most kMaxMessagesUnderWay requests of a rank are with owners, the rest wait in order. An answer arrives in
//   memory of the link and is copied from there, checked on the way. So giving a copy up needs no word to the owner:
//   its answer arrives and is dropped.
// Memory. 2 · kMaxMessagesUnderWay experts at most; none where the schedule has no copy that is not mapped.

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "foremoe/runtime/mpi/mpi_session.h"
#include "foremoe/transfer/transfer_engine.h"

namespace foremoe {

inline constexpr std::size_t kMaxPieces = 16;   // of one copy: chunks, at least as many as an expert has segments
inline constexpr int kMaxMessagesUnderWay = 4;  // asked and not answered, and answers not delivered: each, per rank

struct PeerPiece {
  std::uint64_t segment = 0;
  std::uint64_t offset = 0;  // bytes, within the segment
  std::uint64_t bytes = 0;
};

struct PeerRequest {
  std::uint64_t number = 0;   // of the reader's requests
  std::uint64_t message = 0;  // of the schedule's copies
  std::uint64_t version = 0;  // that the reader needs
  std::uint64_t num_pieces = 0;
  std::array<PeerPiece, kMaxPieces> pieces;
};

// Followed by the pieces, one after the other.
struct alignas(64) PeerAnswer {
  std::uint64_t number = 0;
  std::uint64_t bytes =
      0;  // that follow; 0: refused: the owner has another version, not yet the expert, or no such one
  std::array<std::uint64_t, kMaxPieces> checksums{};
};

// The owner's side: answers requests for experts of this rank, in order of arrival, at most kMaxMessagesUnderWay at a
// time. Whoever asks has already made room for the answer, so every answer is delivered.
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

// The reader's side.
class MpiPeerLink final : public CopyLink {
 public:
  struct Parts {
    PeerServer::Parts server;
    std::unique_ptr<CopyLink> mapped;
    bool reads_messages = false;  // this rank is the reader of a planned copy that is not mapped: memory is taken now
    bool sends_messages = false;  // … the owner
    std::chrono::milliseconds timeout{10'000};
  };
  // Throws InputError when an expert is larger than a message may be.
  explicit MpiPeerLink(Parts parts);
  ~MpiPeerLink() override;

  void submit(const CopyRequest& request) override;
  CopyState poll(CopyId id) override;
  void cancel(CopyId id) override;
  void progress() override;
  bool serves_others() const override { return sends_messages_; }

 private:
  struct Slot {  // of one request that is with its owner
    std::unique_ptr<std::byte[]> memory;
    PeerRequest asked;
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Request answer = MPI_REQUEST_NULL;
    CopyRequest copy;
    bool used = false;
    bool wanted = false;  // false once given up
  };
  void reserve();
  void ask();
  bool fill(const CopyRequest& copy, PeerRequest& asked) const;
  CopyState take(Slot& slot);
  bool idle();

  PeerServer::Parts parts_;
  std::unique_ptr<CopyLink> mapped_;
  std::chrono::milliseconds timeout_;
  bool sends_messages_;
  PeerServer server_;
  std::vector<Slot> slots_;
  std::deque<CopyRequest> waiting_;
  std::vector<CopyId> malformed_;  // submitted, and nothing that an owner could answer
  std::uint64_t asked_ = 0;
};

}  // namespace foremoe
