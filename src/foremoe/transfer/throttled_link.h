#pragma once

// A link as fast as one likes, around another: to measure on any machine what copies hide behind work. Copies go
// through it one after the other; one is done no earlier than its bytes, at the given rate, after it was submitted or
// after the one before was done. It never waits, and no link slows another.

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "foremoe/transfer/copy_link.h"

namespace foremoe {

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
