#pragma once

// What moves the bytes of copies: one link of one rank, in host memory. Links complete out of order or never; waiting,
// checking, retrying and giving up live above them, once, in the engine. A link is used by one thread, and decorators
// wrap any link.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "foremoe/core/ids.h"

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
  RankId source;                  // peer path: the rank that the bytes come from
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
  // Other ranks may still ask for what only progress() sends, so it must be called even while no copy of this rank is
  // under way.
  virtual bool serves_others() const { return false; }
};

// Copies within memory that this process sees: submit() itself copies, on the caller's thread. A chunk whose checksum
// is asked for is copied and summed in one pass.
class MemcpyLink final : public CopyLink {
 public:
  void submit(const CopyRequest& request) override;
  CopyState poll(CopyId /*id*/) override { return CopyState::kDone; }
  void cancel(CopyId /*id*/) override {}
  void progress() override {}
};

// Limits another link to a rate, so that any machine can measure what hides behind work. Copies go through one after
// the other; a copy is done no earlier than its bytes, at the given rate, after it was submitted or after the copy
// before it was done. The link never waits, and no link slows another.
class ThrottledLink final : public CopyLink {
 public:
  using Clock = std::chrono::steady_clock;
  // bytes_per_second > 0
  ThrottledLink(std::unique_ptr<CopyLink> link, double bytes_per_second,
                std::function<Clock::time_point()> now = Clock::now);

  void submit(const CopyRequest& request) override;
  CopyState poll(CopyId id) override;
  void cancel(CopyId id) override;
  void progress() override { link_->progress(); }
  bool serves_others() const override { return link_->serves_others(); }

 private:
  struct Copy {
    CopyId id;
    Clock::time_point through;  // the throttle
    bool done = false;          // by the link itself, which has forgotten it
  };
  std::unique_ptr<CopyLink> link_;
  double bytes_per_second_;
  std::function<Clock::time_point()> now_;
  Clock::time_point free_;  // when all that was submitted is through
  std::vector<Copy> copies_;
};

}  // namespace foremoe
