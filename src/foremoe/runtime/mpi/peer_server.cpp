#include "foremoe/runtime/mpi/peer_server.h"

#include <algorithm>
#include <cstring>

#include "foremoe/transfer/checksum.h"

namespace foremoe {

std::size_t max_answer_bytes(const ExpertLayout& layout) {
  return sizeof(PeerAnswer) + static_cast<std::size_t>(layout.bytes().value);
}

PeerServer::~PeerServer() {
  for (Answer& answer : answers_) {
    // What MPI may still read is never freed: a peer does not listen, and the job is about to end.
    if (answer.request != MPI_REQUEST_NULL) answer.memory.release();
  }
}

void PeerServer::reserve() {
  answers_.resize(kMaxMessagesUnderWay);
  for (Answer& answer : answers_) {
    if (!answer.memory) answer.memory = std::make_unique<std::byte[]>(max_answer_bytes(parts_.layout));
  }
}

bool PeerServer::idle() {
  return std::all_of(answers_.begin(), answers_.end(), [](Answer& answer) { return finished(answer.request); });
}

void PeerServer::progress() {
  const auto free_answer = [&] {
    return std::find_if(answers_.begin(), answers_.end(), [](Answer& answer) { return finished(answer.request); });
  };
  while (answers_.empty() || free_answer() != answers_.end()) {
    int there = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, parts_.tags.request, parts_.group, &there, &message, &status), "MPI_Improbe");
    if (there == 0) return;
    PeerRequest request;
    check_mpi(MPI_Mrecv(&request, sizeof(request), MPI_BYTE, &message, MPI_STATUS_IGNORE), "MPI_Mrecv");
    if (answers_.empty()) reserve();
    Answer& answer = *free_answer();
    const int bytes = static_cast<int>(write(request, answer.memory.get()));
    check_mpi(MPI_Isend(answer.memory.get(), bytes, MPI_BYTE, status.MPI_SOURCE, parts_.tags.answer, parts_.group,
                        &answer.request),
              "MPI_Isend");
  }
}

std::size_t PeerServer::write(const PeerRequest& request, std::byte* memory) const {
  PeerAnswer answer{.number = request.number};
  if (holds(request)) {
    const ScheduledCopy& copy = parts_.schedule.copies[request.message];
    const std::span home = parts_.directory.home(copy.layer, copy.expert);
    std::byte* to = memory + sizeof(answer);
    for (std::size_t i = 0; i < request.num_pieces; ++i) {
      const PeerPiece& piece = request.pieces[i];
      answer.checksums[i] = copy_and_checksum(to, {home[piece.segment] + piece.offset, piece.bytes});
      to += piece.bytes;
      answer.bytes += piece.bytes;
    }
  }
  std::memcpy(memory, &answer, sizeof(answer));
  return sizeof(answer) + answer.bytes;
}

bool PeerServer::holds(const PeerRequest& request) const {
  if (request.message >= parts_.schedule.copies.size() || request.num_pieces > kMaxPieces) return false;
  const ScheduledCopy& copy = parts_.schedule.copies[request.message];
  if (copy.source != parts_.rank || parts_.directory.published(parts_.rank) != request.version) return false;
  const std::span segments = parts_.layout.segments();
  std::size_t bytes = 0;
  for (const PeerPiece& piece : std::span(request.pieces).first(request.num_pieces)) {
    if (piece.segment >= segments.size()) return false;
    const auto size = static_cast<std::size_t>(segments[piece.segment].bytes().value);
    if (piece.offset > size || piece.bytes > size - piece.offset) return false;
    bytes += piece.bytes;
  }
  return bytes <= static_cast<std::size_t>(parts_.layout.bytes().value);
}

}  // namespace foremoe
