#include "foremoe/plan/row_choice.h"

#include <algorithm>
#include <bit>
#include <map>

#include "foremoe/plan/assign_rows.h"

namespace foremoe {
namespace {

constexpr int kMostSweeps = 6;
constexpr std::size_t kMostNodes = 64;  // experts on more nodes keep their rows in order; one bit of a mask per node

// Assigns one expert's rows to nodes.
class ExpertStep {
 public:
  ExpertStep(const RowChoiceProblem& problem, RowChoiceWorkspace& ws, std::span<std::int32_t> of_row)
      : problem_(problem),
        ws_(ws),
        of_row_(of_row),
        num_nodes_(static_cast<std::size_t>(problem.topology.num_nodes())),
        home_(problem.topology.node_of(problem.source)) {}

  // The expert's shipments are [first, last). Returns whether the number of pairs decreased.
  bool improve(std::span<const std::int32_t> rows, std::size_t first, std::size_t last) {
    find_nodes(first, last);
    if (nodes_.size() < 2 || nodes_.size() > kMostNodes) return false;
    const std::int64_t before = sort_rows(rows);
    const std::int64_t after = solve();
    if (after == before) {
      restore(rows);
      return false;
    }
    place(first, last);
    restore(rows);
    return true;
  }

 private:
  std::uint16_t& rows_at(std::int32_t row, NodeId node) {
    return ws_.rows_at[static_cast<std::size_t>(row / problem_.top_k) * num_nodes_ + node.index()];
  }
  NodeId node_of(std::int32_t shipment) const {
    return problem_.topology.node_of(problem_.sent[static_cast<std::size_t>(shipment)].replica);
  }

  void find_nodes(std::size_t first, std::size_t last) {
    nodes_.clear();
    for (std::size_t i = first; i < last; ++i) nodes_.push_back(node_of(static_cast<std::int32_t>(i)));
    std::ranges::sort(nodes_);
    nodes_.erase(std::unique(nodes_.begin(), nodes_.end()), nodes_.end());
    room_.assign(nodes_.size(), 0);
    for (std::size_t i = first; i < last; ++i) {
      room_[place_of(node_of(static_cast<std::int32_t>(i)))] += problem_.sent[i].rows.value;
    }
  }

  std::size_t place_of(NodeId node) const {
    return static_cast<std::size_t>(std::ranges::lower_bound(nodes_, node) - nodes_.begin());
  }

  // Removes the rows from their nodes and sorts them by type. Returns how many were at free nodes.
  std::int64_t sort_rows(std::span<const std::int32_t> rows) {
    type_of_mask_.clear();
    masks_.clear();
    for (auto& of_type : ws_.rows_of_type) of_type.clear();
    std::int64_t free = 0;
    for (const std::int32_t row : rows) {
      const NodeId at = node_of(of_row_[static_cast<std::size_t>(row)]);
      --rows_at(row, at);
      std::uint64_t mask = 0;
      for (std::size_t n = 0; n < nodes_.size(); ++n) {
        if (nodes_[n] == home_ || rows_at(row, nodes_[n]) > 0) mask |= std::uint64_t{1} << n;
      }
      free += static_cast<std::int64_t>(mask >> place_of(at) & 1);
      const auto [found, is_new] = type_of_mask_.try_emplace(mask, masks_.size());
      if (is_new) {
        masks_.push_back(mask);
        if (ws_.rows_of_type.size() < masks_.size()) ws_.rows_of_type.emplace_back();
      }
      ws_.rows_of_type[found->second].push_back(row);
    }
    return free;
  }

  // Maximum flow from types to nodes. Returns its value: the number of rows at free nodes.
  std::int64_t solve() {
    flow_.assign(masks_.size() * nodes_.size(), 0);
    order_.resize(masks_.size());
    for (std::size_t t = 0; t < order_.size(); ++t) order_[t] = t;
    std::ranges::stable_sort(order_, {}, [&](std::size_t t) { return std::popcount(masks_[t]); });
    std::int64_t total = 0;
    for (const std::size_t t : order_) {
      auto left = static_cast<std::int64_t>(ws_.rows_of_type[t].size());
      while (left > 0 && masks_[t] != 0) {
        const std::int64_t sent = augment(t, left);
        if (sent == 0) break;
        left -= sent;
        total += sent;
      }
    }
    return total;
  }

  std::int64_t& flow(std::size_t type, std::size_t node) { return flow_[type * nodes_.size() + node]; }

  // Sends up to `most` rows of the type along a shortest augmenting path. Returns their number.
  std::int64_t augment(std::size_t type, std::int64_t most) {
    constexpr std::size_t kUnseen = ~std::size_t{0};
    from_type_.assign(nodes_.size(), kUnseen);  // the type whose flow moves from from_node_ to the node
    from_node_.assign(nodes_.size(), kUnseen);
    queue_.clear();
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      if ((masks_[type] >> n & 1) == 0) continue;
      from_type_[n] = type;
      queue_.push_back(n);
    }
    for (std::size_t i = 0; i < queue_.size(); ++i) {
      const std::size_t node = queue_[i];
      if (room_[node] > 0) return push(node, std::min(most, room_[node]));
      for (std::size_t t = 0; t < masks_.size(); ++t) {
        if (flow(t, node) == 0) continue;
        for (std::size_t n = 0; n < nodes_.size(); ++n) {
          if ((masks_[t] >> n & 1) == 0 || from_type_[n] != kUnseen) continue;
          from_type_[n] = t;
          from_node_[n] = node;
          queue_.push_back(n);
        }
      }
    }
    return 0;
  }

  std::int64_t push(std::size_t end, std::int64_t rows) {
    constexpr std::size_t kUnseen = ~std::size_t{0};
    for (std::size_t n = end; from_node_[n] != kUnseen; n = from_node_[n]) {
      rows = std::min(rows, flow(from_type_[n], from_node_[n]));
    }
    room_[end] -= rows;
    for (std::size_t n = end;; n = from_node_[n]) {
      flow(from_type_[n], n) += rows;
      if (from_node_[n] == kUnseen) return rows;
      flow(from_type_[n], from_node_[n]) -= rows;
    }
  }

  // Assigns rows to the expert's shipments: to free nodes according to the flow, the rest wherever room remains.
  void place(std::size_t first, std::size_t last) {
    rows_of_node_.resize(nodes_.size());
    for (auto& of_node : rows_of_node_) of_node.clear();
    rest_.clear();
    for (std::size_t t = 0; t < masks_.size(); ++t) {
      auto next = ws_.rows_of_type[t].cbegin();
      for (std::size_t n = 0; n < nodes_.size(); ++n) {
        const auto end = next + flow(t, n);
        rows_of_node_[n].insert(rows_of_node_[n].end(), next, end);
        next = end;
      }
      rest_.insert(rest_.end(), next, ws_.rows_of_type[t].cend());
    }
    auto next = rest_.cbegin();
    for (std::size_t n = 0; n < nodes_.size(); ++n) {
      rows_of_node_[n].insert(rows_of_node_[n].end(), next, next + room_[n]);
      next += room_[n];
    }
    at_.assign(nodes_.size(), 0);
    for (std::size_t i = first; i < last; ++i) {
      const std::size_t n = place_of(node_of(static_cast<std::int32_t>(i)));
      for (std::int64_t r = 0; r < problem_.sent[i].rows.value; ++r) {
        of_row_[static_cast<std::size_t>(rows_of_node_[n][at_[n]++])] = static_cast<std::int32_t>(i);
      }
    }
  }

  void restore(std::span<const std::int32_t> rows) {
    for (const std::int32_t row : rows) ++rows_at(row, node_of(of_row_[static_cast<std::size_t>(row)]));
  }

  const RowChoiceProblem& problem_;
  RowChoiceWorkspace& ws_;
  std::span<std::int32_t> of_row_;
  std::size_t num_nodes_;
  NodeId home_;
  std::vector<NodeId> nodes_;                          // of the expert's shipments, ascending
  std::vector<std::int64_t> room_;                     // [place in nodes_], rows that its shipments can still take
  std::map<std::uint64_t, std::size_t> type_of_mask_;  // a mask has a bit for each free node
  std::vector<std::uint64_t> masks_;                   // [type]
  std::vector<std::int64_t> flow_;                     // [type][place]
  std::vector<std::size_t> order_, from_type_, from_node_, queue_, at_;
  std::vector<std::vector<std::int32_t>> rows_of_node_;  // [place]
  std::vector<std::int32_t> rest_;                       // rows for which no free node has room
};

void sort_by_expert(std::span<const ExpertId> routes, RowChoiceWorkspace& ws) {
  std::size_t num_experts = 0;
  for (const ExpertId e : routes) num_experts = std::max(num_experts, static_cast<std::size_t>(e.value + 1));
  ws.first_row.assign(num_experts + 1, 0);
  for (const ExpertId e : routes) {
    if (e >= ExpertId{0}) ++ws.first_row[e.index() + 1];
  }
  for (std::size_t e = 0; e < num_experts; ++e) ws.first_row[e + 1] += ws.first_row[e];
  ws.rows_of.resize(ws.first_row.back());
  std::vector<std::size_t> next(ws.first_row.begin(), ws.first_row.end());
  for (std::size_t row = 0; row < routes.size(); ++row) {
    if (routes[row] >= ExpertId{0}) ws.rows_of[next[routes[row].index()]++] = static_cast<std::int32_t>(row);
  }
}

}  // namespace

bool choose_rows(const RowChoiceProblem& problem, RowChoiceWorkspace& ws, std::span<std::int32_t> of_row) {
  if (!assign_shipments(problem.sent, problem.routes, ws.route, of_row)) return false;
  sort_by_expert(problem.routes, ws);
  const auto num_nodes = static_cast<std::size_t>(problem.topology.num_nodes());
  const std::size_t num_tokens = problem.routes.size() / static_cast<std::size_t>(problem.top_k);
  ws.rows_at.assign(num_tokens * num_nodes, 0);
  for (std::size_t row = 0; row < of_row.size(); ++row) {
    if (of_row[row] < 0) continue;
    const RankId replica = problem.sent[static_cast<std::size_t>(of_row[row])].replica;
    ++ws.rows_at[row / static_cast<std::size_t>(problem.top_k) * num_nodes + problem.topology.node_of(replica).index()];
  }
  ExpertStep step(problem, ws, of_row);
  for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
    bool improved = false;
    for (std::size_t first = 0; first < problem.sent.size();) {
      const ExpertId e = problem.sent[first].expert;
      std::size_t last = first;
      while (last < problem.sent.size() && problem.sent[last].expert == e) ++last;
      const std::span rows =
          std::span(ws.rows_of).subspan(ws.first_row[e.index()], ws.first_row[e.index() + 1] - ws.first_row[e.index()]);
      if (last - first > 1) improved |= step.improve(rows, first, last);
      first = last;
    }
    if (!improved) break;
  }
  return true;
}

}  // namespace foremoe
