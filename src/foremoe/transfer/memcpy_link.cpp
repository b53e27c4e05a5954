#include "foremoe/transfer/memcpy_link.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "foremoe/transfer/checksum.h"

namespace foremoe {

static bool copy_if_free(const CopyRequest& request) {
  if (!happened(request.after)) return false;
  for (const Chunk& chunk : request.chunks) {
    if (chunk.checksum != nullptr) {
      *chunk.checksum = copy_and_checksum(chunk.to, {chunk.from, chunk.bytes});
    } else {
      std::memcpy(chunk.to, chunk.from, chunk.bytes);
    }
  }
  return true;
}

void MemcpyLink::submit(const CopyRequest& request) { copies_.push_back({request, copy_if_free(request)}); }

CopyState MemcpyLink::poll(CopyId id) {
  const auto copy = std::find_if(copies_.begin(), copies_.end(), [&](const Copy& c) { return c.request.id == id; });
  assert(copy != copies_.end());
  if (!copy->done) copy->done = copy_if_free(copy->request);
  if (!copy->done) return CopyState::kUnderWay;
  copies_.erase(copy);
  return CopyState::kDone;
}

void MemcpyLink::cancel(CopyId id) {
  std::erase_if(copies_, [&](const Copy& c) { return c.request.id == id; });
}

void MemcpyLink::progress() {
  for (Copy& copy : copies_) {
    if (!copy.done) copy.done = copy_if_free(copy.request);
  }
}

}  // namespace foremoe
