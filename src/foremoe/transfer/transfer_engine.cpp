#include "foremoe/transfer/transfer_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#include "foremoe/transfer/turn_votes.h"

namespace foremoe {

namespace {

// Minimum and maximum sleep of the thread while copies or votes are pending and nothing changes. The sleep doubles each
// time, since there may be more ranks than cores. The idle limit applies while the rank does not wait.
constexpr std::chrono::microseconds kShortestNap{50};
constexpr std::chrono::microseconds kLongestNap{200};
constexpr std::chrono::microseconds kLongestIdleNap{1000};

enum class Verdict : std::uint8_t { kOpen, kWhole, kMissing };

}  // namespace

// The rank and the thread communicate through fields guarded by the mutex: the rank reports its position, the thread
// its decisions. Only the thread uses the links, the ballot and the state of the copies.
struct ExpertTransferEngine::State {
  State(EngineParts engine_parts, const EngineOptions& engine_options);
  void run(const std::stop_token& stop);
  void work(const std::stop_token& stop);
  bool tell(std::span<const TurnVotes::Decided> decided);
  bool nap(const std::stop_token& stop, std::chrono::microseconds& length, std::uint64_t seen);
  bool wait(TurnId turn);
  void put_in_place(TurnId turn);
  void move();  // wakes the thread; requires the mutex

  EngineParts parts;
  const EngineOptions options;
  CopyFetcher fetcher;
  TurnVotes votes;

  mutable std::mutex mutex;
  std::condition_variable_any moved;    // signals a move of the rank
  std::condition_variable_any decided;  // signals a decision or a failure
  EnginePosition position;
  std::uint64_t moves = 0;        // number of moves of the rank
  std::vector<Verdict> verdicts;  // [num_turns()]
  std::exception_ptr failure;
  TransferFigures figures;

  std::jthread thread;  // last: joined before other members are destroyed
};

ExpertTransferEngine::State::State(EngineParts engine_parts, const EngineOptions& engine_options)
    : parts(std::move(engine_parts)), options(engine_options), fetcher(parts, options), votes(parts, options, fetcher) {
  assert(options.version >= 1 && options.attempts >= 1);
  verdicts.assign(static_cast<std::size_t>(parts.schedule.num_turns()), Verdict::kOpen);
  if (parts.schedule.copies.empty()) return;
  try {
    thread = std::jthread([this](const std::stop_token& stop) { run(stop); });
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(),
                            fmt::format("rank {}: cannot start the thread that copies experts", parts.rank.value));
  }
}

void ExpertTransferEngine::State::run(const std::stop_token& stop) {
  try {
    work(stop);
  } catch (...) {
    const std::lock_guard lock(mutex);
    failure = std::current_exception();
    decided.notify_all();
  }
  try {
    fetcher.cancel_all();
  } catch (...) {  // a link failed to cancel; an earlier failure takes precedence
    const std::lock_guard lock(mutex);
    if (!failure) failure = std::current_exception();
  }
}

void ExpertTransferEngine::State::work(const std::stop_token& stop) {
  std::chrono::microseconds length = kShortestNap;
  while (!stop.stop_requested()) {
    EnginePosition now_at;
    std::uint64_t seen = 0;
    {
      const std::lock_guard lock(mutex);
      now_at = position;
      seen = moves;
    }
    const EngineClock::time_point now = EngineClock::now();
    const bool fetched = fetcher.step(now_at, now);
    const bool told = tell(votes.step(now_at, now));
    if (fetched || told || votes.changed() || nap(stop, length, seen)) length = kShortestNap;
  }
}

bool ExpertTransferEngine::State::tell(std::span<const TurnVotes::Decided> news) {
  if (news.empty()) return false;
  const std::lock_guard lock(mutex);
  for (const auto& [turn, whole] : news) verdicts[turn.index()] = whole ? Verdict::kWhole : Verdict::kMissing;
  const double exposed = figures.exposed_seconds;
  figures = fetcher.figures();
  figures.exposed_seconds = exposed;
  decided.notify_all();
  return true;
}

// Returns true if the rank's position changed meanwhile.
bool ExpertTransferEngine::State::nap(const std::stop_token& stop, std::chrono::microseconds& length,
                                      std::uint64_t seen) {
  const auto serves = [](const std::unique_ptr<CopyLink>& link) { return link != nullptr && link->serves_others(); };
  const bool busy = fetcher.under_way() || votes.open() || serves(parts.host) || serves(parts.peer);
  std::unique_lock lock(mutex);
  const auto has_moved = [&] { return moves != seen; };
  if (!busy) return moved.wait(lock, stop, has_moved);
  const bool awaited = position.waiting >= 0 && verdicts[static_cast<std::size_t>(position.waiting)] == Verdict::kOpen;
  const bool woken = moved.wait_for(lock, stop, length, has_moved);
  length = std::min(2 * length, awaited ? kLongestNap : kLongestIdleNap);
  return woken;
}

void ExpertTransferEngine::State::move() {
  ++moves;
  moved.notify_one();
  if (failure) std::rethrow_exception(failure);
}

bool ExpertTransferEngine::State::wait(TurnId turn) {
  if (parts.schedule.copies.empty()) return true;
  const auto begin = EngineClock::now();
  std::unique_lock lock(mutex);
  const auto settled = [&] { return failure || verdicts[turn.index()] != Verdict::kOpen; };
  if (!settled()) {
    position.waiting = turn.value;
    position.waiting_since = begin;
    move();
    decided.wait(lock, settled);
  }
  const bool whole = !failure && verdicts[turn.index()] == Verdict::kWhole;
  if (whole) {
    lock.unlock();
    put_in_place(turn);
    lock.lock();
  }
  figures.exposed_seconds += std::chrono::duration<double>(EngineClock::now() - begin).count();
  if (failure) std::rethrow_exception(failure);
  return whole;
}

// No rank still reads the slots that the turn's copies replace, and no rank reads the copies before this returns.
void ExpertTransferEngine::State::put_in_place(TurnId turn) {
  for (const ScheduledCopy& copy : parts.schedule.arriving(turn)) {
    if (copy.rank != parts.rank || !copy.staged()) continue;
    const std::span<std::byte* const> from = parts.directory.buffer(copy.staging);
    const std::span<std::byte* const> to = parts.directory.buffer(copy.buffer);
    for (std::size_t s = 0; s < parts.layout.num_segments(); ++s) {
      std::memcpy(to[s], from[s], static_cast<std::size_t>(parts.layout.segments()[s].bytes().value));
    }
  }
  parts.directory.put_in_place(TurnId{turn.value + 1});
}

ExpertTransferEngine::ExpertTransferEngine(EngineParts parts, const EngineOptions& options)
    : state_(std::make_unique<State>(std::move(parts), options)) {}

ExpertTransferEngine::~ExpertTransferEngine() = default;

void ExpertTransferEngine::submit(TurnId turn) {
  const std::lock_guard lock(state_->mutex);
  assert(turn.value == state_->position.submitted + 1);
  state_->position.submitted = turn.value;
  state_->move();
}

bool ExpertTransferEngine::wait(TurnId turn) {
  assert(turn.value < state_->parts.schedule.order.size());
  return state_->wait(turn);
}

void ExpertTransferEngine::release(TurnId turn) {
  const std::lock_guard lock(state_->mutex);
  assert(turn.value == state_->position.released + 1);
  state_->position.released = turn.value;
  if (turn.value < state_->position.submitted) state_->move();  // otherwise submit() of the next turn wakes the thread
}

void ExpertTransferEngine::finish() {
  const TransferSchedule& schedule = state_->parts.schedule;
  for (TurnId t{schedule.order.size()}; t.value < schedule.num_turns(); t = TurnId{t.value + 1}) {
    submit(t);
    if (!state_->wait(t)) {
      throw PhaseFailed(fmt::format("rank {}: the experts of some rank did not come home", state_->parts.rank.value));
    }
    release(t);
  }
}

TransferFigures ExpertTransferEngine::figures() const {
  const std::lock_guard lock(state_->mutex);
  return state_->figures;
}

}  // namespace foremoe
