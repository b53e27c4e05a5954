#pragma once

// FineMoE's token scheduling as a linear program (§5.1, appendix A.1), solved by CLP's dual simplex
// (clp/replica_load_lp.cpp).
//
// LP 1. Minimise the largest rank load: variables x (tokens of each replica) and comp, such that the replicas of an
// expert serve its load and those of a rank at most comp.
//
// LP 4. Minimise comp + α·comm. With local(e, g) ≤ min(x(e, g), input(e, g)), the tokens of expert e that source g
// serves itself, rank g sends Σ_e input(e, g) − Σ_e local(e, g) and receives Σ_e x(e, g) − Σ_e local(e, g); comm is the
// largest of all of these. comm is minimised, so local reaches the minimum wherever that matters. By nodes the same:
// what is local to a node is at most its replicas' and at most its sources' tokens of an expert, and
//   minimise comp + α1·comm + α2·comm_nodes,
// where comm_nodes is the most that a node sends to or receives from others, divided by the ranks of a full node: the
// unit of comm when every rank has its share of the node's links.
//
// Inferred. (1) The paper's send sums over the experts that g holds; tokens of the others leave g as well, so here it
// sums over all. (2) "Split the communication time into intra-node and inter-node": x does not say which rank's tokens
// leave the node, so what is counted inside is all that leaves a rank, and between nodes all that leaves a node. With
// one node this is LP 4 with α = α1. The paper's levels (figure 17): α1 = α2 = 0 neither, α1 = 0.1 ranks, α2 = 1 also
// nodes.
//
// Warm start, as in the paper: from micro-step to micro-step only bounds change, and the basis stays dual feasible. The
// paper uses HiGHS.
//
// Size. LP 1: one variable per replica, one row per expert and per rank. LP 4: about three times that.

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
  static bool is_available();  // false in a build without CLP, in which nothing else here may be called

  // LP 1 without weights, else LP 4. For one placement; the graph is not kept.
  ReplicaLoadLp(const planner::ReplicaGraph& graph, const Topology& topology,
                std::optional<CommunicationWeights> weights);
  ~ReplicaLoadLp();
  ReplicaLoadLp(ReplicaLoadLp&&) noexcept;

  // `input` is [source rank][expert], tokens. False when CLP does not end with an optimum.
  bool solve(ArrayView<const std::int64_t, 2> input);

  double objective() const;                       // of the last solution, tokens
  std::span<const double> replica_loads() const;  // x, [slot] of the graph, not whole; 0 in empty slots
  double largest_rank_load() const;               // comp

 private:
  struct Program;  // in clp/; no_clp/ stands in where CLP is not built in
  std::unique_ptr<Program> program_;
};

}  // namespace foremoe::finemoe
