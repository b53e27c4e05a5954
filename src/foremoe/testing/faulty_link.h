#pragma once

// A link that wraps another link and injects faults, drawn from a seed. The link delays, reorders or drops copies,
// reports failure before or after the bytes have arrived, and silently corrupts data. Like any link, it never writes
// after a copy is cancelled.

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <memory>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/transfer/copy_link.h"

namespace foremoe::test {

struct Faults {        // probabilities, per copy
  double delay = 0;    // begins only after some polls
  double reorder = 0;  // begins only after the next copy has begun, or after many polls
  // At most one of these:
  double drop = 0;     // never completes; may or may not copy the bytes
  double fail = 0;     // reports failure; may or may not have copied the bytes
  double corrupt = 0;  // completes, but a bit is flipped or the end is garbage
  int most_polls = 20;
};

class FaultyLink final : public CopyLink {
 public:
  FaultyLink(std::unique_ptr<CopyLink> link, const Faults& faults, std::uint64_t seed);

  void submit(const CopyRequest& request) override;
  CopyState poll(CopyId id) override;
  void cancel(CopyId id) override;
  void progress() override { link_->progress(); }
  bool serves_others() const override { return link_->serves_others(); }

 private:
  enum class Fate : std::uint8_t { kArrives, kVanishes, kArrivesSilently, kFails, kFailsAfterwards, kDamaged };
  enum class At : std::uint8_t { kHeldBack, kWithLink, kThrough };
  struct Copy {
    CopyRequest request;
    Fate fate = Fate::kArrives;
    At at = At::kHeldBack;
    int polls = 0;  // number of polls before it begins
    bool overtaken_by_next = false;
  };
  Fate draw_fate();
  void begin(Copy& copy);
  void damage(const CopyRequest& request);

  std::unique_ptr<CopyLink> link_;
  Faults faults_;
  Random random_;
  std::vector<Copy> copies_;
};

inline FaultyLink::FaultyLink(std::unique_ptr<CopyLink> link, const Faults& faults, std::uint64_t seed)
    : link_(std::move(link)), faults_(faults), random_(seed) {
  assert(faults.drop + faults.fail + faults.corrupt <= 1 && faults.most_polls >= 1);
}

inline FaultyLink::Fate FaultyLink::draw_fate() {
  const double x = random_.uniform();
  const bool copies = random_.below(2) == 1;
  if (x < faults_.drop) return copies ? Fate::kArrivesSilently : Fate::kVanishes;
  if (x < faults_.drop + faults_.fail) return copies ? Fate::kFailsAfterwards : Fate::kFails;
  if (x < faults_.drop + faults_.fail + faults_.corrupt) return Fate::kDamaged;
  return Fate::kArrives;
}

inline void FaultyLink::begin(Copy& copy) {
  copy.at = At::kThrough;
  if (copy.fate == Fate::kVanishes || copy.fate == Fate::kFails) return;
  copy.at = At::kWithLink;
  link_->submit(copy.request);
}

inline void FaultyLink::submit(const CopyRequest& request) {
  Copy copy{.request = request, .fate = draw_fate()};
  const auto some_polls = [&] {
    return 1 + static_cast<int>(random_.below(static_cast<std::uint64_t>(faults_.most_polls)));
  };
  if (random_.uniform() < faults_.delay) copy.polls = some_polls();
  if (random_.uniform() < faults_.reorder) {
    copy.polls = faults_.most_polls;
    copy.overtaken_by_next = true;
  }
  if (copy.polls == 0) begin(copy);
  for (Copy& former : copies_) {
    if (!former.overtaken_by_next) continue;
    former.overtaken_by_next = false;
    if (former.at == At::kHeldBack) begin(former);
  }
  copies_.push_back(copy);
}

inline CopyState FaultyLink::poll(CopyId id) {
  const auto copy = std::ranges::find(copies_, id, [](const Copy& c) { return c.request.id; });
  assert(copy != copies_.end());
  if (copy->at == At::kHeldBack && --copy->polls <= 0) begin(*copy);
  CopyState state = CopyState::kUnderWay;
  if (copy->at == At::kWithLink) {
    state = link_->poll(id);
    if (state == CopyState::kUnderWay) return state;
    copy->at = At::kThrough;
    if (state == CopyState::kDone && copy->fate == Fate::kDamaged) damage(copy->request);
  }
  if (copy->at == At::kHeldBack || copy->fate == Fate::kVanishes || copy->fate == Fate::kArrivesSilently) {
    return CopyState::kUnderWay;
  }
  if (copy->fate == Fate::kFails || copy->fate == Fate::kFailsAfterwards) state = CopyState::kFailed;
  copies_.erase(copy);
  return state;
}

inline void FaultyLink::cancel(CopyId id) {
  const auto copy = std::ranges::find(copies_, id, [](const Copy& c) { return c.request.id; });
  assert(copy != copies_.end());
  if (copy->at == At::kWithLink) link_->cancel(id);
  copies_.erase(copy);
}

// Runs after the wrapped link has copied, so nothing repairs the damage. Resets the checksum that the link computed.
inline void FaultyLink::damage(const CopyRequest& request) {
  if (request.chunks.empty()) return;
  const Chunk& chunk = request.chunks[random_.below(request.chunks.size())];
  const std::size_t at = random_.below(chunk.bytes);
  if (random_.below(2) == 0) {
    chunk.to[at] ^= static_cast<std::byte>(1U << random_.below(8));
  } else {
    for (std::size_t i = at; i < chunk.bytes; ++i) chunk.to[i] ^= std::byte{0x5A};
  }
  if (chunk.checksum != nullptr) *chunk.checksum = 0;
}

}  // namespace foremoe::test
