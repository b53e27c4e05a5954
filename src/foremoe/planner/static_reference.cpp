#include "foremoe/planner/static_reference.h"

#include <algorithm>

#include "foremoe/core/timeline.h"

namespace foremoe::planner {

namespace {

// Groups of up to this many ranks are swept to the end, so that their results are exact.
constexpr int kCertainRanks = 16;
// [sweeps made]: factor to which the remaining sweeps may lower a micro-step's load.
constexpr double kRemainingSweepFactor[BaseGuests::kMostSweeps + 1] = {0.93, 0.97, 0.99, 1};
// [sweeps made]: largest load ÷ target from which a micro-step can still reach the target.
constexpr double kMayExceed[BaseGuests::kMostSweeps] = {1.1, 1.05, 1.02};
// Replaces kMayExceed[0] if micro-steps are similar: the search makes few more copies than there are static guests.
constexpr double kMayExceedWhereAlike = 1.3;
constexpr double kAlike = 1.15;  // copies of a search ÷ static guests
// Largest ratio of copies to guest slots. Above it, micro-steps differ too much for one set of guests.
constexpr std::int64_t kMaxCopiesPerSlot = 3;
// Least ratio of copies saved by static guests to guests for which sweeps are worth their time. Grows with the square
// of the group size, like the time of a sweep per guest.
constexpr double kWorthSweeps = 0.1;  // in groups of up to kUsualGroup ranks
constexpr double kUsualGroup = 64;

int num_guests(const LayerProblem& problem, const ReplicaGraph& graph) {
  int guests = -problem.num_experts;
  for (int s = 0; s < graph.num_slots(); ++s) guests += graph.expert_in(s) >= 0 ? 1 : 0;
  return guests;
}

}  // namespace

StaticReference::StaticReference(const LayerProblem& problem, const ReplicaGraph& beginning)
    : problem_(problem),
      num_initial_guests_(num_guests(problem, beginning)),
      chosen_(problem, BaseGoal::kFinal),
      graph_(homes_only(problem)) {}

void StaticReference::begin() {
  if (begun_) return;
  begun_ = true;
  const double begin = thread_cpu_seconds();
  chosen_.grow_all(graph_);
  cpu_seconds_ += thread_cpu_seconds() - begin;
}

void StaticReference::sweep() {
  const double begin = thread_cpu_seconds();
  chosen_.sweep(graph_);
  cpu_seconds_ += thread_cpu_seconds() - begin;
}

bool StaticReference::is_certain() const { return problem_.num_ranks() <= kCertainRanks; }

bool StaticReference::may_beat(int m, std::int64_t level) {
  if (is_certain()) return beats(m, level);
  begin();
  if (!chosen_.may_change()) return chosen_.level(m) < level;
  return kRemainingSweepFactor[chosen_.num_sweeps()] * static_cast<double>(chosen_.level(m)) <
         static_cast<double>(level);
}

bool StaticReference::beats(int m, std::int64_t level) {
  begin();
  while (chosen_.may_change() && (is_certain() || may_beat(m, level))) sweep();
  return chosen_.level(m) < level;
}

double StaticReference::largest_excess() const {
  double largest = 0;
  for (int m = 0; m < problem_.num_micro_steps; ++m) {
    if (chosen_.level(m) == 0) continue;
    largest = std::max(largest, static_cast<double>(chosen_.level(m)) / static_cast<double>(problem_.target[m]));
  }
  return largest;
}

bool StaticReference::balances_with(std::int64_t copies) {
  const double size = std::max(1.0, problem_.num_ranks() / kUsualGroup);
  const auto is_worth = [&](int guests) {
    return is_certain() || static_cast<double>(copies) >= (1 + kWorthSweeps * size * size) * guests;
  };
  if (!is_certain() && copies > kMaxCopiesPerSlot * problem_.guest_slots * problem_.num_ranks()) return false;
  if (!is_worth(num_initial_guests_)) return false;
  begin();
  const int guests = num_guests(problem_, graph_);
  if (guests > copies) return false;  // sweeps remove no guests
  const bool alike = static_cast<double>(copies) <= kAlike * guests;
  while (is_worth(guests) && chosen_.may_change() && largest_excess() > 1) {
    const int sweeps = chosen_.num_sweeps();
    const double most = sweeps == 0 && alike ? kMayExceedWhereAlike : kMayExceed[sweeps];
    if (!is_certain() && largest_excess() > most) return false;
    sweep();
  }
  return largest_excess() <= 1;
}

}  // namespace foremoe::planner
