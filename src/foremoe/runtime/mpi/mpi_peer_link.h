#pragma once

// The peer path among processes. What is mapped here is copied by the device's own link. What is not is asked of its
// owner by message, and comes with the owner's version and a checksum for each piece.
//
// Method. At most kMaxMessagesUnderWay requests of a rank are with owners, the rest wait in order. An answer arrives in
//   memory of the link and is copied from there, checked on the way, once the buffer's last reader is done. So giving a
//   copy up needs no word to the owner: its answer arrives and is dropped.
// Memory. 2 · kMaxMessagesUnderWay experts at most; none where the schedule has no copy that is not mapped.

#include <deque>

#include "foremoe/runtime/mpi/peer_server.h"

namespace foremoe {

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
