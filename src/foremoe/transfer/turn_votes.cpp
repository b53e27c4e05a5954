#include "foremoe/transfer/turn_votes.h"

#include <fmt/format.h>

#include <algorithm>

namespace foremoe {

TurnVotes::TurnVotes(EngineParts& parts, const EngineOptions& options, CopyFetcher& fetcher)
    : parts_(parts), options_(options), fetcher_(fetcher), turns_(parts.schedule.order) {
  for (const Turn& turn : parts.schedule.order.turns) {
    layers_.resize(std::max(layers_.size(), turn.layer.index() + 1));
  }
}

std::span<const TurnVotes::Decided> TurnVotes::step(const EnginePosition& position, EngineClock::time_point now) {
  decided_.clear();
  changed_ = false;
  while (!open_.empty()) {
    const std::optional<bool> whole = parts_.ballot->outcome(open_.front().number);
    if (!whole) break;
    count(open_.front().turn, *whole);
    open_.pop_front();
    changed_ = true;
  }
  if (!open_.empty() && open_.front().turn.value <= position.waiting) {
    const auto limit =
        options_.ballot_timeout.count() > 0 ? options_.ballot_timeout : options_.timeout * (options_.attempts + 1);
    if (now - std::max(position.waiting_since, open_.front().cast) > limit) {
      throw PhaseFailed(fmt::format("rank {}: the ranks did not agree on turn {} within {} ms", parts_.rank.value,
                                    open_.front().turn.value, limit.count()));
    }
  }
  const int horizon = std::min(position.submitted + parts_.schedule.depth, parts_.schedule.num_turns() - 1);
  while (next_.value <= horizon && ask(now)) {
    next_ = TurnId{next_.value + 1};
    entered_ = false;
    changed_ = true;
  }
  return decided_;
}

bool TurnVotes::ask(EngineClock::time_point now) {
  const TurnId turn = next_;
  if (restores_homes(turn)) {
    if (!settled(fetcher_.arriving(turn))) return false;
    cast(turn, fetcher_.arriving(turn), now);
    return true;
  }
  Layer& layer = layer_of(turn);
  if (layer.undecided) return false;
  if (!entered_) {
    std::erase_if(layer.leased, [&](std::size_t i) { return parts_.schedule.copies[i].closes < turn; });
    const auto arriving = fetcher_.arriving(turn);
    layer.leased.insert(layer.leased.end(), arriving.begin(), arriving.end());
    entered_ = true;
  }
  if (!layer.broken && !parts_.schedule.any_arrives(turn)) {
    decided_.push_back({turn, true});
    return true;
  }
  if (!settled(layer.leased)) return false;
  layer.undecided = true;
  cast(turn, layer.leased, now);
  return true;
}

bool TurnVotes::settled(std::span<const std::size_t> copies) const {
  return std::ranges::all_of(copies, [&](std::size_t i) { return fetcher_.held(i) || fetcher_.missing(i); });
}

void TurnVotes::cast(TurnId turn, std::span<const std::size_t> copies, EngineClock::time_point now) {
  parts_.ballot->cast(next_number_, std::ranges::all_of(copies, [&](std::size_t i) { return fetcher_.held(i); }));
  open_.push_back({next_number_++, turn, now});
}

void TurnVotes::count(TurnId turn, bool whole) {
  decided_.push_back({turn, whole});
  if (restores_homes(turn)) return;
  Layer& layer = layer_of(turn);
  layer.undecided = false;
  layer.broken = !whole;
  if (whole) return;
  const std::optional<TurnId> next = turns_.next(parts_.schedule.order[turn].layer, turn);
  for (const std::size_t i : layer.leased) {
    if (next && *next <= parts_.schedule.copies[i].closes && fetcher_.missing(i)) fetcher_.fetch_again(i, *next);
  }
}

}  // namespace foremoe
