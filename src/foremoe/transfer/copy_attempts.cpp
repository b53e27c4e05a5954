#include "foremoe/transfer/copy_attempts.h"

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
  return copy.path == Path::kPeer || !parts_.directory.home(copy.layer, copy.expert).empty();
}

void CopyAttempts::start(const Start& start, EngineClock::time_point now) {
  assert(!full() && possible(start.copy, start.path));
  Attempt& attempt = *std::ranges::find(attempts_, false, &Attempt::under_way);
  ++num_under_way_;
  attempt.under_way = true;
  attempt.with_link = false;
  attempt.id = CopyId{next_id_++};
  attempt.copy = start.copy;
  attempt.path = start.path;
  attempt.after = start.after;
  attempt.deadline = now + options_.timeout;
  attempt.begin_ns = parts_.timeline != nullptr ? Timeline::now_ns() : 0;
}

// 0: not published yet.
std::uint64_t CopyAttempts::version(const Attempt& attempt) const {
  const ScheduledCopy& copy = scheduled(attempt);
  if (attempt.path == Path::kHost) return parts_.arena->version(arena_index(copy));
  return parts_.directory.published(copy.source);
}

void CopyAttempts::submit(Attempt& attempt) {
  const ScheduledCopy& copy = scheduled(attempt);
  const bool from_arena = attempt.path == Path::kHost;
  const std::span<std::byte* const> to = parts_.directory.buffer(copy.buffer);
  const std::span<const std::byte* const> home =
      from_arena ? std::span<const std::byte* const>() : parts_.directory.home(copy.layer, copy.expert);
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
    } else if (!home.empty()) {
      chunk.from = home[s];
    }
    attempt.segments.push_back(s);
    attempt.chunks.push_back(chunk);
  }
  const bool by_message = !from_arena && home.empty();
  link(attempt).submit({.id = attempt.id,
                        .chunks = attempt.chunks,
                        .source = copy.source,
                        .after = attempt.after,
                        .message = by_message ? static_cast<std::int64_t>(attempt.copy) : -1});
  attempt.with_link = true;
}

// What the link has delivered: is it what the owner published for this phase?
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
  attempt.with_link = false;  // it has been forgotten there
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

}  // namespace foremoe
