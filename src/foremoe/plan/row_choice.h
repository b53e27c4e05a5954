#pragma once

// Chooses which of a source's tokens go to which replica, so that few nodes serve each token.
//
// Problem. The shipments of a source fix how many rows of each expert go to each replica (plan/route_tokens.h).
//   Dispatch by token sends a token once to each other node that serves any of its rows. Assign rows to shipments such
//   that the number of (token, other node) pairs is small.
// Method. Start in row order. Given the assignment of all other experts, a node is free for a row if it is the source's
//   own or already serves another row of the same token. For one expert, maximise the rows assigned to free nodes, with
//   the shipments as capacities. Rows with the same free nodes form one type. This transportation problem is a maximum
//   flow from types to nodes, solved by augmenting paths. Sweep over the experts, in ascending order, until a sweep
//   does not reduce the number of pairs or kMostSweeps is reached.
// Guarantees. No shipment's number of rows changes. A step never increases the number of pairs and is optimal for its
//   expert if the other experts' rows are fixed. Unless sweeps reach their limit, the result is a local optimum. It
//   depends only on the source's own routes and shipments.
// Complexity. Per sweep and expert with shipments to n > 1 nodes: O(rows + t·n · augmentations) for t types.

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/plan/route_tokens.h"

namespace foremoe {

struct RowChoiceProblem {
  std::span<const Shipment> sent;    // of one source, by expert
  std::span<const ExpertId> routes;  // [token][k], negative: no route
  int top_k = 1;
  RankId source;
  Topology topology;
};

// Scratch memory, reused so that a warm call allocates little.
struct RowChoiceWorkspace {
  RouteWorkspace route;
  std::vector<std::uint16_t> rows_at;  // [token][node], rows of the token that the node serves
  std::vector<std::int32_t> rows_of;   // row numbers by expert
  std::vector<std::size_t> first_row;  // [experts + 1], into rows_of
  std::vector<std::vector<std::int32_t>> rows_of_type;
};

// Sets of_row[row] to the index in `sent` of the shipment that carries the row, or to −1 without a route. Returns
// false, with `of_row` unspecified, if the shipments do not match the routes.
bool choose_rows(const RowChoiceProblem& problem, RowChoiceWorkspace& workspace, std::span<std::int32_t> of_row);

}  // namespace foremoe
