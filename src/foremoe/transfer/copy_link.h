#pragma once

// A link moves the bytes of one rank's copies, in host memory. Copies may complete out of order or never. The engine
// implements waiting, checks, retries and timeouts once, for all links. A link is used by a single thread; decorators
// can wrap any link.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "foremoe/core/ids.h"

namespace foremoe {

using CopyId = Id<struct CopyTag>;  // of an attempt; unique within a bound phase

struct Chunk {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::size_t bytes = 0;
  // Links that compute a checksum (checksum.h) while copying store it here. Other links leave the initial 0 unchanged.
  std::uint64_t* checksum = nullptr;
};

struct CopyRequest {
  CopyId id;
  std::span<const Chunk> chunks;  // must stay valid until the copy ends
  RankId source;                  // peer path: rank that sends the bytes
  std::int64_t message = -1;      // peer path: index in the schedule's copies if memory is not mapped
};

enum class CopyState : std::uint8_t { kUnderWay, kDone, kFailed };

class CopyLink {
 public:
  virtual ~CopyLink() = default;
  virtual void submit(const CopyRequest& request) = 0;  // never waits
  virtual CopyState poll(CopyId id) = 0;                // of a submitted copy; kDone and kFailed end it
  virtual void cancel(CopyId id) = 0;                   // ends a copy; afterwards nothing writes to its buffer
  virtual void progress() = 0;                          // does pending work of the link; never waits
  // Returns whether other ranks may need data that only progress() sends. In this case, call progress() even when this
  // rank has no copies under way.
  virtual bool serves_others() const { return false; }
};

// Copies within this process's memory. submit() copies on the caller's thread. Chunks with a checksum are copied and
// summed in one pass.
class MemcpyLink final : public CopyLink {
 public:
  void submit(const CopyRequest& request) override;
  CopyState poll(CopyId /*id*/) override { return CopyState::kDone; }
  void cancel(CopyId /*id*/) override {}
  void progress() override {}
};

// Limits another link to a rate, so that overlap can be measured on any machine. Copies are sequential. A copy
// completes no earlier than bytes ÷ rate after its submission or after the end of the previous copy, whichever is
// later. The link never waits, and links do not slow each other down.
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
    Clock::time_point through;  // earliest time at which the copy may complete
    bool done = false;          // the inner link has completed and dropped the copy
  };
  std::unique_ptr<CopyLink> link_;
  double bytes_per_second_;
  std::function<Clock::time_point()> now_;
  Clock::time_point free_;  // when all submitted copies are complete
  std::vector<Copy> copies_;
};

}  // namespace foremoe
