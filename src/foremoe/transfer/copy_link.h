#pragma once

// What moves the bytes of copies: one link of one rank. Links complete out of order or never; waiting, checking,
// retrying and giving up live above them, once, in the engine. Decorators (throttled_link.h, faulty_link.h) wrap any
// link. A link is used by one thread.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "foremoe/core/ids.h"
#include "foremoe/transfer/stream.h"

namespace foremoe {

using CopyId = Id<struct CopyTag>;  // of an attempt; never reused within a bound phase

struct Chunk {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::size_t bytes = 0;
  // Where to leave the checksum (checksum.h) of the bytes as they were copied, for a link that computes it on the way;
  // 0, as it was on submission, from one that does not.
  std::uint64_t* checksum = nullptr;
};

struct CopyRequest {
  CopyId id;
  std::span<const Chunk> chunks;  // alive until the copy is settled
  RankId source;                  // peer path: whom the bytes come from
  Event after;                    // the buffer's last reader: the copy begins after it
  std::int64_t message = -1;      // peer path: its index in the schedule's copies where memory is not mapped
};

enum class CopyState : std::uint8_t { kUnderWay, kDone, kFailed };

class CopyLink {
 public:
  virtual ~CopyLink() = default;
  virtual void submit(const CopyRequest& request) = 0;  // never waits
  virtual CopyState poll(CopyId id) = 0;                // of a submitted copy; after kDone or kFailed it is forgotten
  virtual void cancel(CopyId id) = 0;                   // gives up; on return nothing writes to its buffer any more
  virtual void progress() = 0;                          // whatever needs the caller's hand now and then; never waits
  // Others may still ask for what only progress() sends: it is to be called while no copy of this rank is under way
  // too.
  virtual bool serves_others() const { return false; }
};

}  // namespace foremoe
