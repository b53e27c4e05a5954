#pragma once

// What goes over the wire of the peer path where memory is not mapped: a reader asks, the owner answers.

#include <array>
#include <cstddef>
#include <cstdint>

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
  std::uint64_t bytes = 0;  // that follow; 0: refused, as the owner has another version or no such expert
  std::array<std::uint64_t, kMaxPieces> checksums{};
};

}  // namespace foremoe
