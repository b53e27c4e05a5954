#pragma once

// FineMoE's token scheduling as a linear program (§5.1, appendix A.1), solved by CLP's dual simplex
// (clp/replica_load_lp.cpp).
//
// LP 1. Minimise the largest rank load. The variables are x (tokens of each replica) and comp. The replicas of an
// expert serve exactly its load. The replicas on a rank serve at most comp.
//
// LP 4. Minimise comp + α·comm. Let local(e, g) ≤ min(x(e, g), input(e, g)) be the tokens of expert e that source g
// serves itself. Then rank g sends Σ_e input(e, g) − Σ_e local(e, g) and receives Σ_e x(e, g) − Σ_e local(e, g); comm
// is the largest of these sums over all ranks. Minimising comm makes local equal to its bound wherever it affects comm.
// For nodes, an expert's tokens local to a node are at most those of the node's replicas and at most those of its
// sources. Minimise comp + α1·comm + α2·comm_nodes, where comm_nodes is the most that a node sends to or receives from
// others, divided by the ranks of a full node. This quotient is tokens per rank, like comm, if ranks share the node's
// links equally.
//
// Inferred. (1) The paper sums the tokens that g sends over the experts that g holds. We sum over all experts, since
// tokens of other experts also leave g. (2) "Split the communication time into intra-node and inter-node": x does not
// determine which rank's tokens leave the node, so comm counts everything that leaves a rank, and comm_nodes everything
// that leaves a node. With one node this is LP 4 with α = α1. The paper's levels (figure 17) count neither (α1 = α2 =
// 0), ranks (α1 = 0.1), or both (α2 = 1).
//
// Warm start, as in the paper: only bounds change between micro-steps, so the basis stays dual feasible. The paper uses
// HiGHS.
//
// Size. LP 1: one variable per replica, one row per expert and per rank. LP 4 has about three times as many.

#include <memory>
#include <optional>
#include <span>

#include "foremoe/cluster/topology.h"
#include "foremoe/core/array.h"
#include "foremoe/planner/replica_graph.h"

namespace foremoe::finemoe {

struct CommunicationWeights {
  double ranks = 0.1;  // α1; appendix C.3
  double nodes = 1.0;  // α2
};

class ReplicaLoadLp {
 public:
  static bool is_available();  // false in a build without CLP; then nothing else may be called

  // Builds LP 1 without weights or LP 4 with weights, for one placement. Keeps no reference to the graph.
  ReplicaLoadLp(const planner::ReplicaGraph& graph, const Topology& topology,
                std::optional<CommunicationWeights> weights);
  ~ReplicaLoadLp();
  ReplicaLoadLp(ReplicaLoadLp&&) noexcept;

  // `input` is [source rank][expert], tokens. Returns false if CLP ends without an optimum.
  bool solve(ArrayView<const std::int64_t, 2> input);

  double objective() const;                       // of the last solution, tokens
  std::span<const double> replica_loads() const;  // x, [slot] of the graph, fractional; 0 in empty slots
  double largest_rank_load() const;               // comp

 private:
  struct Program;  // defined in clp/, or in no_clp/ for a build without CLP
  std::unique_ptr<Program> program_;
};

}  // namespace foremoe::finemoe
