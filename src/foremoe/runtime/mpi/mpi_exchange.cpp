#include "foremoe/runtime/mpi/mpi_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace foremoe {

MpiExchange::MpiExchange(MpiSession& session, const Options& options)
    : session_(session), options_(options), group_(options.timeout) {}

void MpiExchange::run(std::span<const SendBlock> send, std::span<const ReceiveBlock> receive) {
  const std::size_t me = session_.rank().index();
  mismatch_.clear();
  if (send[me].bytes != receive[me].bytes) {
    mismatch_ =
        fmt::format("rank {0} sends {1} bytes, but rank {3} expects {2}", me, send[me].bytes, receive[me].bytes, me);
  } else if (send[me].bytes > 0) {
    std::memmove(receive[me].data, send[me].data, static_cast<std::size_t>(send[me].bytes));
  }
  tag_ = (tag_ + 1) % kMaxTag;
  post(send, receive, tag_);

  BoundedWait patience(options_.timeout);
  while (!pieces_.empty()) {
    for (Piece& piece : pieces_) piece.settled = settle(piece);
    std::erase_if(pieces_, [](const Piece& piece) { return piece.settled; });
    if (!pieces_.empty() && !patience.pause()) take_back();
  }
  if (!mismatch_.empty()) throw PhaseFailed(mismatch_);
}

void MpiExchange::post(std::span<const SendBlock> send, std::span<const ReceiveBlock> receive, int tag) {
  const int num_ranks = session_.num_ranks();
  const auto in_pieces = [&](std::int64_t bytes, auto post_piece) {
    for (std::int64_t begin = 0; begin <= bytes; begin += options_.piece_bytes) {
      post_piece(begin, static_cast<int>(std::min(bytes - begin, options_.piece_bytes)));
    }
  };
  for (int i = 1; i < num_ranks; ++i) {
    const int source = (session_.rank().value + i) % num_ranks;
    const ReceiveBlock& block = receive[static_cast<std::size_t>(source)];
    in_pieces(block.bytes, [&](std::int64_t begin, int bytes) {
      Piece& piece = pieces_.emplace_back(Piece{.peer = source, .bytes = bytes});
      std::byte* to = bytes == 0 ? nullptr : block.data + begin;
      check_mpi(MPI_Irecv(to, bytes, MPI_BYTE, source, tag, group_, &piece.request), "MPI_Irecv");
    });
  }
  for (int i = 1; i < num_ranks; ++i) {
    const int destination = (session_.rank().value + num_ranks - i) % num_ranks;
    const SendBlock& block = send[static_cast<std::size_t>(destination)];
    in_pieces(block.bytes, [&](std::int64_t begin, int bytes) {
      Piece& piece = pieces_.emplace_back(Piece{.peer = destination});
      const std::byte* from = bytes == 0 ? nullptr : block.data + begin;
      check_mpi(MPI_Isend(from, bytes, MPI_BYTE, destination, tag, group_, &piece.request), "MPI_Isend");
    });
  }
}

bool MpiExchange::settle(Piece& piece) {
  int done = 0;
  MPI_Status status;
  const int code = MPI_Test(&piece.request, &done, &status);
  int error = MPI_SUCCESS;
  MPI_Error_class(code, &error);
  if (error == MPI_ERR_TRUNCATE && piece.received()) {
    mismatch(piece, fmt::format("more than {} bytes", piece.bytes));
    return true;
  }
  check_mpi(code, "MPI_Test");
  if (done == 0 || !piece.received() || piece.cancelled) return done != 0;
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  if (bytes != piece.bytes) mismatch(piece, fmt::format("{} bytes and not {}", bytes, piece.bytes));
  return true;
}

void MpiExchange::mismatch(const Piece& piece, const std::string& sizes) {
  const int peer = piece.peer;
  if (mismatch_.empty())
    mismatch_ = fmt::format("rank {} sends {}, which rank {} expects", peer, sizes, session_.rank().value);
  for (Piece& other : pieces_) {  // the other pieces of this block may never arrive
    if (other.peer != peer || !other.received() || other.request == MPI_REQUEST_NULL || other.cancelled) continue;
    MPI_Cancel(&other.request);
    other.cancelled = true;
  }
}

void MpiExchange::take_back() {
  std::set<int> late;
  for (Piece& piece : pieces_) {
    late.insert(piece.peer);
    if (piece.received() && !piece.cancelled) MPI_Cancel(&piece.request);
  }
  // A receive in progress cannot be cancelled: it completes, or the peer is dead and the launcher ends the job.
  constexpr std::chrono::milliseconds kLongest{500};
  BoundedWait patience(kLongest);
  do {
    std::erase_if(pieces_, [](Piece& piece) { return finished(piece.request); });
  } while (!pieces_.empty() && patience.pause());
  for (Piece& piece : pieces_) MPI_Request_free(&piece.request);
  pieces_.clear();
  if (!mismatch_.empty()) throw PhaseFailed(mismatch_);
  throw PeerFailed(fmt::format("rank {} waited {} ms for rank {}", session_.rank().value, options_.timeout.count(),
                               fmt::join(late, ", ")));
}

}  // namespace foremoe
