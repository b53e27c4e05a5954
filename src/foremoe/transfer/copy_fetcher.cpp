#include "foremoe/transfer/copy_fetcher.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>

#include "foremoe/transfer/checksum.h"

namespace foremoe {

CopyAttempts::CopyAttempts(EngineParts& parts, const EngineOptions& options)
    : parts_(parts), options_(options), turns_(parts.schedule.order), attempts_(kMaxCopiesUnderWay) {
  for (Attempt& attempt : attempts_) {
    attempt.segments.reserve(parts.layout.num_segments());
    attempt.chunks.reserve(parts.layout.num_segments());
    attempt.checksums.reserve(parts.layout.num_segments());
  }
  ended_.reserve(attempts_.size());
}

int CopyAttempts::arena_index(const ScheduledCopy& copy) const {
  return parts_.arena == nullptr ? -1 : parts_.arena->index_of({.layer = copy.layer, .expert = copy.expert});
}

bool CopyAttempts::possible(std::size_t index, Path path) const {
  const ScheduledCopy& copy = parts_.schedule.copies[index];
  if (path == Path::kHost) return parts_.host != nullptr && arena_index(copy) >= 0;
  if (parts_.peer == nullptr) return false;
  return copy.path == Path::kPeer || !parts_.directory.source(copy).empty();
}

void CopyAttempts::start(std::size_t copy, Path path, EngineClock::time_point now) {
  assert(!full() && possible(copy, path));
  Attempt& attempt = *std::ranges::find(attempts_, false, &Attempt::under_way);
  ++num_under_way_;
  attempt.under_way = true;
  attempt.with_link = false;
  attempt.id = CopyId{next_id_++};
  attempt.copy = copy;
  attempt.path = path;
  attempt.deadline = now + options_.timeout;
  attempt.begin_ns = parts_.timeline != nullptr ? Timeline::now_ns() : 0;
}

// Version of the attempt's source; 0 if it is not published yet.
std::uint64_t CopyAttempts::version(const Attempt& attempt) const {
  const ScheduledCopy& copy = scheduled(attempt);
  if (attempt.path == Path::kHost) return parts_.arena->version(arena_index(copy));
  if (copy.staged() && !parts_.directory.in_place(copy.source, copy.opens)) return 0;
  return parts_.directory.published(copy.source);
}

void CopyAttempts::submit(Attempt& attempt) {
  const ScheduledCopy& copy = scheduled(attempt);
  const bool from_arena = attempt.path == Path::kHost;
  const std::span<std::byte* const> to = parts_.directory.buffer(copy.arrives_in());
  const std::span<const std::byte* const> peer =
      from_arena ? std::span<const std::byte* const>() : parts_.directory.source(copy);
  const int index = from_arena ? arena_index(copy) : -1;
  attempt.segments.clear();
  attempt.chunks.clear();
  attempt.checksums.assign(parts_.layout.num_segments(), 0);
  for (std::size_t s = 0; s < parts_.layout.num_segments(); ++s) {
    const Segment& segment = parts_.layout.segments()[s];
    if (!turns_.needs(copy, segment)) continue;
    Chunk chunk{.to = to[s], .bytes = static_cast<std::size_t>(segment.bytes().value)};
    if (from_arena) {
      chunk.from = parts_.arena->segment(index, s);
      if (options_.verify) chunk.checksum = &attempt.checksums[attempt.chunks.size()];
    } else if (!peer.empty()) {
      chunk.from = peer[s];
    }
    attempt.segments.push_back(s);
    attempt.chunks.push_back(chunk);
  }
  const bool by_message = !from_arena && peer.empty();
  link(attempt).submit({.id = attempt.id,
                        .chunks = attempt.chunks,
                        .source = copy.source,
                        .message = by_message ? static_cast<std::int64_t>(attempt.copy) : -1});
  attempt.with_link = true;
}

// Returns whether the delivered data is what the owner published for this phase.
bool CopyAttempts::sound(const Attempt& attempt) const {
  if (version(attempt) != options_.version) return false;
  if (attempt.path != Path::kHost || !options_.verify) return true;
  const int index = arena_index(scheduled(attempt));
  for (std::size_t i = 0; i < attempt.chunks.size(); ++i) {
    const Chunk& chunk = attempt.chunks[i];
    const std::uint64_t seen = attempt.checksums[i] != 0 ? attempt.checksums[i] : checksum({chunk.to, chunk.bytes});
    if (seen != parts_.arena->checksum(index, attempt.segments[i])) return false;
  }
  return true;
}

CopyAttempts::Outcome CopyAttempts::outcome(Attempt& attempt) {
  if (!attempt.with_link) {
    const std::uint64_t published = version(attempt);
    if (published > options_.version) return Outcome::kFailed;
    if (published < options_.version) return Outcome::kUnderWay;
    submit(attempt);
  }
  const CopyState state = link(attempt).poll(attempt.id);
  if (state == CopyState::kUnderWay) return Outcome::kUnderWay;
  attempt.with_link = false;  // poll() has ended it
  return state == CopyState::kDone && sound(attempt) ? Outcome::kArrived : Outcome::kFailed;
}

CopyAttempts::End CopyAttempts::end(Attempt& attempt, bool arrived) {
  if (attempt.with_link) link(attempt).cancel(attempt.id);
  attempt.with_link = false;
  attempt.under_way = false;
  --num_under_way_;
  End end{.copy = attempt.copy, .path = attempt.path, .arrived = arrived};
  if (!arrived) return end;
  for (const Chunk& chunk : attempt.chunks) end.bytes += Bytes{chunk.bytes};
  if (parts_.timeline != nullptr) {
    const ScheduledCopy& copy = scheduled(attempt);
    parts_.timeline->add(parts_.rank, attempt.path == Path::kHost ? Lane::kHostPath : Lane::kPeerPath,
                         fmt::format("layer {} expert {}", copy.layer.value, copy.expert.value), attempt.begin_ns,
                         Timeline::now_ns());
  }
  return end;
}

std::span<const CopyAttempts::End> CopyAttempts::step(EngineClock::time_point now) {
  ended_.clear();
  if (parts_.host != nullptr) parts_.host->progress();
  if (parts_.peer != nullptr) parts_.peer->progress();
  if (num_under_way_ == 0) return ended_;
  for (Attempt& attempt : attempts_) {
    if (!attempt.under_way) continue;
    Outcome state = outcome(attempt);
    if (state == Outcome::kUnderWay && now >= attempt.deadline) state = Outcome::kFailed;
    if (state != Outcome::kUnderWay) ended_.push_back(end(attempt, state == Outcome::kArrived));
  }
  return ended_;
}

void CopyAttempts::cancel_all() {
  for (Attempt& attempt : attempts_) {
    if (attempt.under_way) end(attempt, false);
  }
}

// Delay before retrying a link that failed immediately, if retries are unlimited.
static constexpr std::chrono::microseconds kBackOff{200};

CopyFetcher::CopyFetcher(EngineParts& parts, const EngineOptions& options)
    : parts_(parts), options_(options), attempts_(parts, options), fetches_(parts.schedule.copies.size()) {
  first_of_turn_.push_back(0);
  for (int t = 0; t < parts.schedule.num_turns(); ++t) {
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

// Inserts a copy into the queue, whose back is the next copy to start.
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
    start(copy, now);
    return true;
  }
  return false;
}

void CopyFetcher::start(std::size_t copy, EngineClock::time_point now) {
  Fetch& fetch = fetches_[copy];
  if (fetch.first_start == EngineClock::time_point{}) fetch.first_start = now;
  const Path planned = scheduled(copy).path;
  const Path other = planned == Path::kHost ? Path::kPeer : Path::kHost;
  const bool other_possible = !options_.must_arrive && attempts_.possible(copy, other);
  const bool planned_possible = attempts_.possible(copy, planned);
  if (!planned_possible && !other_possible) return failed(copy, now);
  const bool take_other = other_possible && (!planned_possible || fetch.attempts % 2 == 1);
  fetch.state = State::kUnderWay;
  attempts_.start(copy, take_other ? other : planned, now);
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
