#include "foremoe/planner/retention.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace foremoe::planner {

namespace {

constexpr int kNever = std::numeric_limits<int>::max();

// Simulates the slots of one layer, event by event.
class Retention {
 public:
  Retention(const LayerProblem& problem, const PlannerOptions& options, const ExecutionOrder& order,
            const std::vector<WantedGuests>& wanted)
      : problem_(problem),
        order_(order),
        wanted_(wanted),
        max_per_rank_(options.max_copies_per_rank.value_or(options.guest_slots)),
        max_per_source_(options.max_copies_per_source),
        guests_({static_cast<std::size_t>(order.num_events()), static_cast<std::size_t>(problem.num_ranks()),
                 static_cast<std::size_t>(problem.guest_slots)},
                -1),
        last_wanted_({static_cast<std::size_t>(problem.num_ranks()), static_cast<std::size_t>(problem.guest_slots)},
                     -1),
        copies_to_({static_cast<std::size_t>(order.num_events()), static_cast<std::size_t>(problem.num_ranks())}, 0),
        copies_from_({static_cast<std::size_t>(order.num_events()), static_cast<std::size_t>(problem.num_ranks())}, 0) {
  }

  GuestSlots run() {
    for (int t = 0; t < order_.num_events(); ++t) {
      for (int r = 0; r < problem_.num_ranks(); ++r) {
        const auto slots = guests_.row(t, r);
        if (t > 0) std::copy_n(guests_.row(t - 1, r).begin(), slots.size(), slots.begin());
        serve(t, r);
      }
    }
    return std::move(guests_);
  }

 private:
  const std::vector<int>& wanted_at(int event, int rank) const { return wanted_[order_.micro_step[event].value][rank]; }

  bool wants(int event, int rank, int expert) const {
    const auto& w = wanted_at(event, rank);
    return std::find(w.begin(), w.end(), expert) != w.end();
  }

  int next_use(int event, int rank, int expert) const {
    for (int t = event + 1; t < order_.num_events(); ++t) {
      if (wants(t, rank, expert)) return t;
    }
    return kNever;
  }

  void serve(int t, int r) {
    const auto slots = guests_.row(t, r);
    for (const int e : wanted_at(t, r)) {
      if (std::find(slots.begin(), slots.end(), e) == slots.end()) fetch(t, r, e);
    }
    for (std::size_t g = 0; g < slots.size(); ++g) {
      if (slots[g] >= 0 && wants(t, r, slots[g])) last_wanted_(r, g) = t;
    }
  }

  void fetch(int t, int r, int expert) {
    const auto slots = guests_.row(t, r);
    int victim = -1;
    int furthest = -1;
    for (int g = 0; g < static_cast<int>(slots.size()); ++g) {
      if (slots[g] >= 0 && wants(t, r, slots[g])) continue;
      const int use = slots[g] < 0 ? kNever : next_use(t, r, slots[g]);
      if (victim >= 0 && (use < furthest || (use == furthest && (slots[victim] < 0 || slots[g] >= 0)))) continue;
      victim = g;
      furthest = use;
    }
    if (victim < 0) return;
    const int home = problem_.home[expert];
    int at = t;  // latest event with budget left, after the last one that wanted the victim
    while (at > last_wanted_(r, victim) &&
           !(copies_to_(at, r) < max_per_rank_ && copies_from_(at, home) < max_per_source_))
      --at;
    if (at < 0 || at <= last_wanted_(r, victim)) return;
    if (at < t && !same_occupants(r, at, t, victim, expert)) return;
    ++copies_to_(at, r);
    ++copies_from_(at, home);
    for (int u = at; u <= t; ++u) guests_(u, r, victim) = expert;
  }

  // Returns whether, from `at` to t, the slot had one occupant and the expert was in no slot of the rank.
  bool same_occupants(int r, int at, int t, int g, int expert) const {
    for (int u = at; u < t; ++u) {
      const auto slots = guests_.row(u, r);
      if (slots[g] != guests_(t, r, g) || std::find(slots.begin(), slots.end(), expert) != slots.end()) return false;
    }
    return true;
  }

  const LayerProblem& problem_;
  const ExecutionOrder& order_;
  const std::vector<WantedGuests>& wanted_;
  int max_per_rank_;
  int max_per_source_;
  GuestSlots guests_;
  Array<int, 2> last_wanted_;  // [rank][guest slot], last event that wanted its occupant, −1 if none
  Array<int, 2> copies_to_;    // [event][rank]
  Array<int, 2> copies_from_;  // [event][rank], home of the copied expert
};

}  // namespace

GuestSlots retain_guests(const LayerProblem& problem, const PlannerOptions& options, const ExecutionOrder& order,
                         const std::vector<WantedGuests>& wanted) {
  return Retention(problem, options, order, wanted).run();
}

GuestSlots pin_guests(const LayerProblem& problem, const PlannerOptions& options, const ExecutionOrder& order,
                      const WantedGuests& wanted) {
  const auto max_per_rank = static_cast<std::size_t>(options.max_copies_per_rank.value_or(options.guest_slots));
  std::vector<int> copies_from(problem.num_ranks(), 0);
  GuestSlots guests({static_cast<std::size_t>(order.num_events()), static_cast<std::size_t>(problem.num_ranks()),
                     static_cast<std::size_t>(problem.guest_slots)},
                    -1);
  for (int r = 0; r < problem.num_ranks(); ++r) {
    std::size_t filled = 0;
    for (const int e : wanted[r]) {
      int& copies = copies_from[problem.home[e]];
      if (filled == max_per_rank || copies >= options.max_copies_per_source) continue;
      ++copies;
      for (int t = 0; t < order.num_events(); ++t) guests(t, r, filled) = e;
      ++filled;
    }
  }
  return guests;
}

}  // namespace foremoe::planner
