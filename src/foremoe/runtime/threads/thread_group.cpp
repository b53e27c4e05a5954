#include "foremoe/runtime/threads/thread_group.h"

#include <fmt/format.h>

#include <algorithm>
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

ThreadGroup::ThreadGroup(const Topology& topology, std::chrono::milliseconds timeout)
    : topology_(topology),
      timeout_(timeout),
      posts_(static_cast<std::size_t>(topology.num_ranks)),
      here_(posts_.size()),
      sharing_(posts_.size()) {}

void ThreadGroup::open(RankId rank, const Post& post) {
  Lock lock(mutex_);
  // Only this line replaces posts. No rank reads a post now, since all ranks finished reading in the previous call.
  if (!failed_) posts_[rank.index()] = post;
  meet(lock, rank, true);
}

void ThreadGroup::end_reading() {
  const Lock lock(mutex_);
  if (--num_reading_ == 0) changed_.notify_all();
}

void ThreadGroup::close(RankId rank) {
  Lock lock(mutex_);
  meet(lock, rank, false);
}

void ThreadGroup::settle() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return num_reading_ == 0; });
}

void ThreadGroup::meet(Lock& lock, RankId rank, bool to_read) {
  if (failed_) throw PeerFailed(why_);
  here_[rank.index()] = 1;
  if (++num_here_ == topology_.num_ranks) {
    num_here_ = 0;
    std::fill(here_.begin(), here_.end(), 0);
    if (to_read) num_reading_ = topology_.num_ranks;
    ++meetings_;
    changed_.notify_all();
    return;
  }
  const std::uint64_t before = meetings_;
  changed_.wait_for(lock, timeout_, [&] { return meetings_ != before || failed_; });
  if (meetings_ != before) return;  // even if a rank has failed since: the others rely on this rank
  if (!failed_) fail(lock, fmt::format("rank {} waited {} ms for {}", rank.value, timeout_.count(), missing(lock)));
  throw PeerFailed(why_);
}

std::string ThreadGroup::missing(const Lock&) const {
  std::string ranks;
  for (std::size_t r = 0; r < here_.size(); ++r) {
    if (here_[r] == 0) ranks += fmt::format("{}{}", ranks.empty() ? "rank " : ", ", r);
  }
  return ranks;
}

void ThreadGroup::begin_sharing(RankId rank) {
  const Lock lock(mutex_);
  sharing_[rank.index()] = 1;
}

void ThreadGroup::withdraw_sharing(RankId rank) {
  const Lock lock(mutex_);
  stop_sharing(lock, rank);
}

void ThreadGroup::end_sharing(RankId rank) {
  Lock lock(mutex_);
  if (sharing_[rank.index()] == 0) return;
  const std::uint64_t before = shares_ended_;
  stop_sharing(lock, rank);
  // Do not wait until no rank shares: the rank that wakes first may share again before this rank tests.
  changed_.wait_for(lock, timeout_, [&] { return shares_ended_ != before; });
}

void ThreadGroup::stop_sharing(const Lock&, RankId rank) {
  sharing_[rank.index()] = 0;
  if (std::ranges::count(sharing_, 1) > 0) return;
  ++shares_ended_;
  changed_.notify_all();
}

void ThreadGroup::fail(const std::string& why) noexcept {
  const Lock lock(mutex_);
  fail(lock, why);
}

void ThreadGroup::fail(const Lock&, const std::string& why) {
  if (!failed_) why_ = why;
  failed_ = true;
  changed_.notify_all();
}

void ThreadGroup::check() const {
  const Lock lock(mutex_);
  if (failed_) throw PeerFailed(why_);
}

std::shared_ptr<BallotBox> ThreadGroup::ballot_box(std::uint64_t number) {
  const Lock lock(mutex_);
  Handed& handed = ballots_[number];
  if (!handed.box) handed.box = std::make_shared<BallotBox>(topology_.num_ranks);
  std::shared_ptr<BallotBox> box = handed.box;
  if (++handed.ranks == topology_.num_ranks) ballots_.erase(number);
  return box;
}

}  // namespace foremoe
