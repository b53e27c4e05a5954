#pragma once

// Blocks between all processes: the one thing that every collective call is made of.
//
// Method. Receives are posted, then sends; a block travels in pieces, of which the last is never full. An empty block
//   is an empty message: so each side hears what the other meant, and sizes that do not match are found, whatever they
//   are. Calls are told apart by tag. One round costs ranks − 1 messages of each rank when blocks are below a piece.
// Failure. A wait is bounded; then receives are taken back, so that nothing is written any more, and PeerFailed.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/mpi/mpi_session.h"

namespace foremoe {

class MpiExchange {
 public:
  struct Options {
    std::chrono::milliseconds timeout{10'000};
    std::int64_t piece_bytes = std::int64_t{1} << 30;  // MPI counts in int
  };
  MpiExchange(MpiSession& session, const Options& options);  // collective

  // [rank] each. Throws PhaseFailed, naming both ranks, where a block is not of the expected size.
  void run(std::span<const SendBlock> send, std::span<const ReceiveBlock> receive);

 private:
  struct Piece {
    MPI_Request request = MPI_REQUEST_NULL;
    int peer = 0;
    std::int64_t bytes = -1;  // expected; −1: sent
    bool cancelled = false;   // nothing is expected any more
    bool settled = false;

    bool received() const { return bytes >= 0; }
  };
  void post(std::span<const SendBlock> send, std::span<const ReceiveBlock> receive, int tag);
  bool settle(Piece& piece);
  void mismatch(const Piece& piece, const std::string& sizes);
  [[noreturn]] void take_back();

  MpiSession& session_;
  Options options_;
  MpiGroup group_;
  int tag_ = 0;
  std::vector<Piece> pieces_;  // of the call that is under way
  std::string mismatch_;       // the first that was found
};

}  // namespace foremoe
