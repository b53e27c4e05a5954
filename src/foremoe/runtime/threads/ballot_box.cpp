#include "foremoe/runtime/threads/ballot_box.h"

#include <cassert>

namespace foremoe {

BallotBox::BallotBox(int num_ranks)
    : num_ranks_(num_ranks), counts_(std::make_unique<Count[]>(static_cast<std::size_t>(num_ranks))) {}

void BallotBox::cast(RankId rank, std::uint64_t number, bool ok) {
  std::atomic<std::uint64_t>& cast = counts_[rank.index()].cast;
  assert(cast.load(std::memory_order_relaxed) == number);
  if (!ok) {
    const std::lock_guard lock(mutex_);
    refused_.insert(number);
    any_refused_.store(true, std::memory_order_relaxed);
  }
  cast.store(number + 1, std::memory_order_release);  // pairs with acquire in outcome()
}

std::optional<bool> BallotBox::outcome(std::uint64_t number) const {
  for (int r = 0; r < num_ranks_; ++r) {
    if (counts_[static_cast<std::size_t>(r)].cast.load(std::memory_order_acquire) <= number) return std::nullopt;
  }
  if (!any_refused_.load(std::memory_order_relaxed)) return true;
  const std::lock_guard lock(mutex_);
  return !refused_.contains(number);
}

}  // namespace foremoe
