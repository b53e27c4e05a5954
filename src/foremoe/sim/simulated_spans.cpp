#include "foremoe/sim/simulated_spans.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "foremoe/sim/phase_replay.h"
#include "foremoe/sim/transfer_queues.h"

namespace foremoe {

namespace {

std::int64_t nanoseconds(double seconds) { return std::llround(1e9 * seconds); }

std::string name_of(const Turn& turn) {
  return fmt::format("micro-step {}, layer {}{}", turn.micro_step.value, turn.layer.value,
                     turn.pass == Pass::kBackward ? ", backward" : "");
}

std::string name_of(const char* what, const Turn& turn) { return fmt::format("{}, {}", what, name_of(turn)); }

}  // namespace

SimulatedSpans::SimulatedSpans(const ReplayProblem& problem) : problem_(problem), timeline_(problem.options.timeline) {}

void SimulatedSpans::all_ranks(Lane lane, const std::string& name, double seconds, double now) {
  for (int r = 0; r < problem_.input.plan.num_ranks(); ++r) {
    timeline_->add(RankId{r}, lane, name, nanoseconds(now), nanoseconds(now + seconds));
  }
}

void SimulatedSpans::dense(const Turn& turn, std::span<const double> seconds, double now) {
  if (!wanted()) return;
  const std::string name = name_of("dense", turn);
  for (std::size_t r = 0; r < seconds.size(); ++r) {
    timeline_->add(RankId{r}, Lane::kWork, name, nanoseconds(now), nanoseconds(now + seconds[r]));
  }
}

void SimulatedSpans::planning(const Turn& turn, double seconds, double now) {
  if (wanted()) all_ranks(Lane::kPlanner, name_of("planning", turn), seconds, now);
}

void SimulatedSpans::exchange(const Turn& turn, double seconds, double now) {
  if (wanted()) all_ranks(Lane::kDispatch, name_of("exchange", turn), seconds, now);
}

void SimulatedSpans::experts(TurnId t, std::span<const double> wait, const LayerProfile::Experts& experts, double now) {
  const std::string name = name_of("experts", problem_.transfers.order[t]);
  for (std::size_t r = 0; r < wait.size(); ++r) {
    const auto add = [&](Lane lane, double begin, double end) {
      timeline_->add(RankId{r}, lane, name, nanoseconds(begin), nanoseconds(end));
    };
    const double own = experts.before_guests(RankId{r});
    const double begin = now + own + wait[r];
    if (own > 0) add(Lane::kExperts, now, now + own);
    if (wait[r] > 0) add(Lane::kWait, now + own, begin);
    if (own == 0 || experts.seconds[r] > own) add(Lane::kExperts, begin, begin + (experts.seconds[r] - own));
  }
}

void SimulatedSpans::begun(const Transfer& transfer, double now) {
  const Lane lane = transfer.way.path == Path::kHost ? Lane::kHostPath : Lane::kPeerPath;
  auto& groups = travelling_[transfer.deadline];
  const auto [at, added] = groups.try_emplace({transfer.way.to, lane}, Group{.begin = now, .transfers = {}});
  at->second.transfers.push_back(transfer);
}

void SimulatedSpans::arrived(TurnId deadline, const TransferQueues& queues) {
  const auto due = travelling_.find(deadline);
  if (due == travelling_.end()) return;
  std::vector<ClusterLinks::Crossing> crossings;
  for (auto& [key, group] : due->second) {
    double end = group.begin;
    std::string experts;
    for (const Transfer& transfer : group.transfers) {
      problem_.links.cross(transfer.way, Bytes{0}, crossings);
      for (const auto& crossing : crossings) end = std::max(end, queues.done_at(crossing.link, deadline.value));
      const std::string expert =
          transfer.expert == kNoExpert ? "sharded experts" : fmt::format("expert {}", transfer.expert.value);
      experts += fmt::format("{}{}{}", experts.empty() ? "" : ", ", transfer.gradient ? "gradient of " : "", expert);
    }
    double& free_from = free_from_[key];
    const bool at_end = deadline.value >= problem_.transfers.order.size();
    const std::string when = at_end ? "the end of the phase" : name_of(problem_.transfers.order[deadline]);
    timeline_->add(std::get<RankId>(key), std::get<Lane>(key), fmt::format("{} for {}", experts, when),
                   nanoseconds(std::min(end, std::max(group.begin, free_from))), nanoseconds(end));
    free_from = end;
  }
  travelling_.erase(due);
}

}  // namespace foremoe
