#pragma once

// A simulated phase as a timeline. Each rank has spans for parts of turns and for copies. A copy's span lasts from its
// earliest possible start to its arrival. A rank's copies that arrive at the same turn by the same path share one.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "foremoe/core/timeline.h"
#include "foremoe/sim/phase_profile.h"
#include "foremoe/sim/phase_transfers.h"

namespace foremoe {

class TransferQueues;
struct ReplayProblem;

class SimulatedSpans {
 public:
  explicit SimulatedSpans(const ReplayProblem& problem);

  bool wanted() const { return timeline_ != nullptr; }

  void dense(const Turn& turn, std::span<const double> seconds, double now);  // [rank]
  void planning(const Turn& turn, double seconds, double now);
  void exchange(const Turn& turn, double seconds, double now);
  void experts(TurnId t, std::span<const double> wait, const LayerProfile::Experts& experts, double now);  // [rank]

  void begun(const Transfer& transfer, double now);
  void arrived(TurnId deadline, const TransferQueues& queues);  // all transfers with this deadline

 private:
  using Key = std::tuple<RankId, Lane>;
  struct Group {
    double begin = 0;
    std::vector<Transfer> transfers;
  };
  void all_ranks(Lane lane, const std::string& name, double seconds, double now);

  const ReplayProblem& problem_;
  Timeline* timeline_;
  std::map<TurnId, std::map<Key, Group>> travelling_;  // [deadline]
  std::map<Key, double> free_from_;                    // the end of a lane's last span of copies
};

}  // namespace foremoe
