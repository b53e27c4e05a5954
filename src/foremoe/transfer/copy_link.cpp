#include "foremoe/transfer/copy_link.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "foremoe/transfer/checksum.h"

namespace foremoe {

void MemcpyLink::submit(const CopyRequest& request) {
  for (const Chunk& chunk : request.chunks) {
    if (chunk.checksum != nullptr) {
      *chunk.checksum = copy_and_checksum(chunk.to, {chunk.from, chunk.bytes});
    } else {
      std::memcpy(chunk.to, chunk.from, chunk.bytes);
    }
  }
}

ThrottledLink::ThrottledLink(std::unique_ptr<CopyLink> link, double bytes_per_second,
                             std::function<Clock::time_point()> now)
    : link_(std::move(link)), bytes_per_second_(bytes_per_second), now_(std::move(now)) {
  assert(bytes_per_second > 0);
}

void ThrottledLink::submit(const CopyRequest& request) {
  std::size_t bytes = 0;
  for (const Chunk& chunk : request.chunks) bytes += chunk.bytes;
  const std::chrono::duration<double> busy(static_cast<double>(bytes) / bytes_per_second_);
  free_ = std::max(now_(), free_) + std::chrono::ceil<Clock::duration>(busy);
  copies_.push_back({request.id, free_});
  link_->submit(request);
}

CopyState ThrottledLink::poll(CopyId id) {
  const auto copy = std::ranges::find(copies_, id, &Copy::id);
  assert(copy != copies_.end());
  if (!copy->done) {
    const CopyState state = link_->poll(id);
    if (state == CopyState::kFailed) copies_.erase(copy);
    if (state != CopyState::kDone) return state;
    copy->done = true;
  }
  if (now_() < copy->through) return CopyState::kUnderWay;
  copies_.erase(copy);
  return CopyState::kDone;
}

void ThrottledLink::cancel(CopyId id) {
  const auto copy = std::ranges::find(copies_, id, &Copy::id);
  assert(copy != copies_.end());
  if (!copy->done) link_->cancel(id);
  copies_.erase(copy);
}

}  // namespace foremoe
