#pragma once

// A link that does everything that a link may do and some that it may not, around another, in host memory: by its seed
// it delays copies, lets later ones overtake, drops them, fails before or after the bytes are there, and damages what
// arrived without a word. What holds all the same: a cancelled copy writes no more.

#include <cstdint>
#include <memory>
#include <vector>

#include "foremoe/core/random.h"
#include "foremoe/transfer/copy_link.h"

namespace foremoe {

struct Faults {        // probabilities, per copy
  double delay = 0;    // begins only after some polls
  double reorder = 0;  // begins only after the next one has begun, or after many polls
  // At most one of these:
  double drop = 0;     // is never told to be done, whether it copies or not
  double fail = 0;     // says so, whether it has copied or not
  double corrupt = 0;  // says that it is done, but a bit is flipped or an end is garbage
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
    int polls = 0;  // held back for so many more
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

}  // namespace foremoe
