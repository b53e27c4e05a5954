// Replaces clp/replica_load_lp.cpp in a build without CLP. Policies check is_available() first.

#include <cassert>

#include "foremoe/policy/systems/finemoe/replica_load_lp.h"

namespace foremoe::finemoe {

struct ReplicaLoadLp::Program {};

bool ReplicaLoadLp::is_available() { return false; }

ReplicaLoadLp::ReplicaLoadLp(const planner::ReplicaGraph&, const Topology&, std::optional<CommunicationWeights>) {
  assert(false);
}
ReplicaLoadLp::~ReplicaLoadLp() = default;
ReplicaLoadLp::ReplicaLoadLp(ReplicaLoadLp&&) noexcept = default;

bool ReplicaLoadLp::solve(ArrayView<const std::int64_t, 2>) { return false; }
double ReplicaLoadLp::objective() const { return 0; }
double ReplicaLoadLp::largest_rank_load() const { return 0; }
std::span<const double> ReplicaLoadLp::replica_loads() const { return {}; }

}  // namespace foremoe::finemoe
