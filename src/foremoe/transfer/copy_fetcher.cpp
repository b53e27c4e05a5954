#include "foremoe/transfer/copy_fetcher.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>

namespace foremoe {

// A link that fails at once is not asked again at once, where it may be asked without end.
static constexpr std::chrono::microseconds kBackOff{200};

CopyFetcher::CopyFetcher(EngineParts& parts, const EngineOptions& options)
    : parts_(parts), options_(options), attempts_(parts, options), fetches_(parts.schedule.copies.size()) {
  const int num_turns = parts.schedule.order.size();
  first_of_turn_.push_back(0);
  for (int t = 0; t <= num_turns; ++t) {
    const std::size_t end = parts.schedule.first_of_turn[static_cast<std::size_t>(t) + 1];
    for (std::size_t i = parts.schedule.first_of_turn[static_cast<std::size_t>(t)]; i < end; ++i) {
      if (scheduled(i).rank != parts.rank) continue;
      fetches_[i].needed = scheduled(i).arrives;
      mine_.push_back(i);
    }
    first_of_turn_.push_back(mine_.size());
  }
  queue_.assign(mine_.rbegin(), mine_.rend());
}

std::span<const std::size_t> CopyFetcher::arriving(TurnId turn) const {
  const std::size_t first = first_of_turn_[turn.index()];
  return std::span(mine_).subspan(first, first_of_turn_[turn.index() + 1] - first);
}

// The queue's end is its head.
void CopyFetcher::enqueue(std::size_t copy) {
  const auto later = [&](std::size_t a, std::size_t b) {
    return std::pair(fetches_[a].needed, a) > std::pair(fetches_[b].needed, b);
  };
  queue_.insert(std::ranges::upper_bound(queue_, copy, later), copy);
}

void CopyFetcher::fetch_again(std::size_t copy, TurnId needed) {
  assert(missing(copy));
  fetches_[copy] = {.needed = needed};
  enqueue(copy);
}

bool CopyFetcher::step(const EnginePosition& position, EngineClock::time_point now) {
  bool changed = false;
  for (const CopyAttempts::End& end : attempts_.step(now)) {
    take(end, now);
    changed = true;
  }
  return start_one(position, now) || changed;
}

bool CopyFetcher::start_one(const EnginePosition& position, EngineClock::time_point now) {
  backing_off_ = false;
  if (attempts_.full()) return false;
  const int horizon = options_.eager ? position.submitted + parts_.schedule.depth : position.waiting;
  for (auto at = queue_.rbegin(); at != queue_.rend(); ++at) {
    const std::size_t copy = *at;
    const int opens = scheduled(copy).opens.value;
    if (fetches_[copy].needed.value > horizon) return false;
    if (opens > position.submitted || opens - 1 > position.released) continue;
    if (fetches_[copy].not_before > now) {
      backing_off_ = true;
      continue;
    }
    queue_.erase(std::next(at).base());
    start(copy, position, now);
    return true;
  }
  return false;
}

void CopyFetcher::start(std::size_t copy, const EnginePosition& position, EngineClock::time_point now) {
  Fetch& fetch = fetches_[copy];
  if (fetch.first_start == EngineClock::time_point{}) fetch.first_start = now;
  const Path planned = scheduled(copy).path;
  const Path other = planned == Path::kHost ? Path::kPeer : Path::kHost;
  const bool other_possible = !options_.must_arrive && attempts_.possible(copy, other);
  const bool planned_possible = attempts_.possible(copy, planned);
  if (!planned_possible && !other_possible) return failed(copy, now);
  const bool take_other = other_possible && (!planned_possible || fetch.attempts % 2 == 1);
  const int opens = scheduled(copy).opens.value;
  fetch.state = State::kUnderWay;
  attempts_.start({.copy = copy,
                   .path = take_other ? other : planned,
                   .after = opens > 0 ? position.readers[static_cast<std::size_t>(opens) - 1] : Event{}},
                  now);
}

void CopyFetcher::take(const CopyAttempts::End& end, EngineClock::time_point now) {
  if (!end.arrived) return failed(end.copy, now);
  fetches_[end.copy].state = State::kHeld;
  ++figures_.copies;
  (end.path == Path::kHost ? figures_.host_bytes : figures_.peer_bytes) += end.bytes;
}

void CopyFetcher::failed(std::size_t copy, EngineClock::time_point now) {
  Fetch& fetch = fetches_[copy];
  ++fetch.attempts;
  ++figures_.failed_attempts;
  if (options_.must_arrive) {
    if (now - fetch.first_start >= options_.timeout * options_.attempts) {
      throw PhaseFailed(fmt::format("rank {}: expert {} of layer {} did not arrive within {} ms, {} attempts",
                                    parts_.rank.value, scheduled(copy).expert.value, scheduled(copy).layer.value,
                                    (options_.timeout * options_.attempts).count(), fetch.attempts));
    }
    fetch.not_before = now + kBackOff;
  } else if (fetch.attempts >= options_.attempts) {
    fetch.state = State::kMissing;
    return;
  }
  fetch.state = State::kWaiting;
  enqueue(copy);
}

}  // namespace foremoe
