#include "foremoe/runtime/mpi/mpi_peer_link.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>

#include "foremoe/core/error.h"
#include "foremoe/runtime/communicator.h"
#include "foremoe/transfer/checksum.h"

namespace foremoe {

namespace {

std::size_t max_answer_bytes(const ExpertLayout& layout) {
  return sizeof(PeerAnswer) + static_cast<std::size_t>(layout.bytes().value);
}

}  // namespace

PeerServer::~PeerServer() {
  for (Answer& answer : answers_) {
    // Leak memory that MPI may still read because a peer has not received the data. The job is about to end.
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
    const std::span from = parts_.directory.source(copy);
    std::byte* to = memory + sizeof(answer);
    for (std::size_t i = 0; i < request.num_pieces; ++i) {
      const PeerPiece& piece = request.pieces[i];
      answer.checksums[i] = copy_and_checksum(to, {from[piece.segment] + piece.offset, piece.bytes});
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
  if (copy.staged() && !parts_.directory.in_place(parts_.rank, copy.opens)) return false;
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

MpiPeerLink::MpiPeerLink(Parts parts)
    : parts_(parts.server),
      mapped_(std::move(parts.mapped)),
      timeout_(parts.timeout),
      sends_messages_(parts.sends_messages),
      server_(parts.server) {
  const std::size_t bytes = max_answer_bytes(parts_.layout);
  if (bytes > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
    throw InputError({.file = "", .field = "expert", .index = ""}, fmt::format("{} bytes do not fit a message", bytes));
  }
  if (parts.reads_messages) reserve();
  if (parts.sends_messages) server_.reserve();
}

MpiPeerLink::~MpiPeerLink() {
  // After a successful phase, no message is in flight. After a failure, wait briefly for messages in flight.
  try {
    BoundedWait patience(std::min(timeout_, std::chrono::milliseconds{1'000}));
    while (!idle() && patience.pause()) server_.progress();
    for (Slot& slot : slots_) {
      if (slot.answer != MPI_REQUEST_NULL) MPI_Cancel(&slot.answer);
    }
    while (!idle() && patience.pause()) {
    }
  } catch (const PeerFailed&) {  // the job has failed too
  }
  for (Slot& slot : slots_) {
    if (slot.answer != MPI_REQUEST_NULL) slot.memory.release();  // leak: MPI may still write to it
  }
}

void MpiPeerLink::reserve() {
  slots_.resize(kMaxMessagesUnderWay);
  for (Slot& slot : slots_) slot.memory = std::make_unique<std::byte[]>(max_answer_bytes(parts_.layout));
}

void MpiPeerLink::submit(const CopyRequest& request) {
  if (request.message < 0) return mapped_->submit(request);
  waiting_.push_back(request);
  send_waiting();
}

CopyState MpiPeerLink::poll(CopyId id) {
  const auto is_this = [&](const CopyRequest& copy) { return copy.id == id; };
  if (std::erase(malformed_, id) > 0) return CopyState::kFailed;
  if (std::any_of(waiting_.begin(), waiting_.end(), is_this)) return CopyState::kUnderWay;
  for (Slot& slot : slots_) {
    if (slot.used && slot.wanted && is_this(slot.copy)) return receive_answer(slot);
  }
  return mapped_->poll(id);
}

void MpiPeerLink::cancel(CopyId id) {
  if (std::erase(malformed_, id) > 0) return;
  if (std::erase_if(waiting_, [&](const CopyRequest& copy) { return copy.id == id; }) > 0) return;
  for (Slot& slot : slots_) {
    if (!slot.used || !slot.wanted || slot.copy.id != id) continue;
    slot.wanted = false;
    return;
  }
  mapped_->cancel(id);
}

void MpiPeerLink::progress() {
  mapped_->progress();
  server_.progress();
  for (Slot& slot : slots_) {
    if (slot.used && !slot.wanted && finished(slot.request) && finished(slot.answer)) slot.used = false;
  }
  send_waiting();
}

void MpiPeerLink::send_waiting() {
  if (!waiting_.empty() && slots_.empty()) reserve();
  for (Slot& slot : slots_) {
    if (waiting_.empty()) return;
    if (slot.used) continue;
    const CopyRequest copy = waiting_.front();
    waiting_.pop_front();
    if (!make_request(copy, slot.asked)) {
      malformed_.push_back(copy.id);
      continue;
    }
    slot.asked.number = asked_++;
    slot.copy = copy;
    slot.used = slot.wanted = true;
    // Post the receive before the request. Owners answer requests in order, so answers match receives in order.
    check_mpi(MPI_Irecv(slot.memory.get(), static_cast<int>(max_answer_bytes(parts_.layout)), MPI_BYTE,
                        copy.source.value, parts_.tags.answer, parts_.group, &slot.answer),
              "MPI_Irecv");
    check_mpi(MPI_Isend(&slot.asked, sizeof(slot.asked), MPI_BYTE, copy.source.value, parts_.tags.request, parts_.group,
                        &slot.request),
              "MPI_Isend");
  }
}

bool MpiPeerLink::make_request(const CopyRequest& copy, PeerRequest& asked) const {
  const auto message = static_cast<std::size_t>(copy.message);
  if (message >= parts_.schedule.copies.size() || copy.chunks.size() > kMaxPieces) return false;
  asked = {.message = message, .version = parts_.directory.published(copy.source), .num_pieces = copy.chunks.size()};
  // Translate this rank's addresses to segments and offsets, which the owner understands.
  const std::span buffer = parts_.directory.buffer(parts_.schedule.copies[message].arrives_in());
  const std::span segments = parts_.layout.segments();
  for (std::size_t i = 0; i < copy.chunks.size(); ++i) {
    const Chunk& chunk = copy.chunks[i];
    std::size_t s = 0;
    const auto begins_in = [&](std::size_t segment) {
      return chunk.to >= buffer[segment] && chunk.to < buffer[segment] + segments[segment].bytes().value;
    };
    while (s < segments.size() && !begins_in(s)) ++s;
    if (s == segments.size()) return false;
    asked.pieces[i] = {.segment = s, .offset = static_cast<std::uint64_t>(chunk.to - buffer[s]), .bytes = chunk.bytes};
  }
  return true;
}

CopyState MpiPeerLink::receive_answer(Slot& slot) {
  if (!finished(slot.request) || !finished(slot.answer)) return CopyState::kUnderWay;
  slot.used = false;
  PeerAnswer answer;
  std::memcpy(&answer, slot.memory.get(), sizeof(answer));
  std::size_t expected = 0;
  for (const Chunk& chunk : slot.copy.chunks) expected += chunk.bytes;
  if (answer.number != slot.asked.number || answer.bytes != expected) return CopyState::kFailed;
  const std::byte* from = slot.memory.get() + sizeof(answer);
  bool intact = true;
  for (std::size_t i = 0; i < slot.copy.chunks.size(); ++i) {
    const Chunk& chunk = slot.copy.chunks[i];
    const std::uint64_t sum = copy_and_checksum(chunk.to, {from, chunk.bytes});
    if (chunk.checksum != nullptr) *chunk.checksum = sum;
    intact &= sum == answer.checksums[i];
    from += chunk.bytes;
  }
  return intact ? CopyState::kDone : CopyState::kFailed;
}

bool MpiPeerLink::idle() {
  bool idle = server_.idle();
  for (Slot& slot : slots_) idle = finished(slot.request) && finished(slot.answer) && idle;
  return idle;
}

}  // namespace foremoe
