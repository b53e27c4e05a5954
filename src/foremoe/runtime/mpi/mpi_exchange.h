#pragma once

// Exchanges blocks between all processes. Every collective call is built on this exchange.
//
// Method. Posts receives, then sends. A block is split into pieces; the last piece is never full. An empty block is an
//   empty message, so both sides learn each other's sizes and detect any mismatch. Tags separate calls. If all blocks
//   are smaller than a piece, each rank sends ranks − 1 messages per call.
// Failure. Waits are bounded. On timeout, cancels receives, so that nothing is written later, and throws PeerFailed.

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

  // Both arrays are [rank]. Throws PhaseFailed, naming both ranks, if a block has an unexpected size.
  void run(std::span<const SendBlock> send, std::span<const ReceiveBlock> receive);

 private:
  struct Piece {
    MPI_Request request = MPI_REQUEST_NULL;
    int peer = 0;
    std::int64_t bytes = -1;  // expected size; −1: this piece is sent
    bool cancelled = false;   // no longer expected
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
  std::vector<Piece> pieces_;  // pieces of the current call
  std::string mismatch_;       // first mismatch found
};

}  // namespace foremoe
