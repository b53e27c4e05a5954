#include "foremoe/policy/systems/finemoe/replica_load_lp.h"

#include <ClpSimplex.hpp>
#include <algorithm>
#include <utility>
#include <vector>

namespace foremoe::finemoe {

namespace {

// A linear program under construction.
struct Columns {
  struct Column {
    std::vector<int> rows;
    std::vector<double> values;
  };
  std::vector<Column> columns;
  std::vector<double> cost;  // [column]
  std::vector<double> row_lower;
  std::vector<double> row_upper;

  int add_column(double cost_per_unit) {
    columns.emplace_back();
    cost.push_back(cost_per_unit);
    return static_cast<int>(cost.size()) - 1;
  }

  // Returns the first row's index.
  int add_rows(std::size_t count, double upper) {
    row_lower.resize(row_lower.size() + count, -COIN_DBL_MAX);
    row_upper.resize(row_upper.size() + count, upper);
    return static_cast<int>(row_upper.size() - count);
  }

  void set(int row, int column, double value) {  // at most once per (row, column)
    columns[column].rows.push_back(row);
    columns[column].values.push_back(value);
  }
};

// The places (ranks or nodes) between which LP 4 charges traffic.
struct Places {
  std::vector<int> of_rank;  // [rank], place
  std::size_t count = 0;
  int send_row = 0;  // first of `count` rows, one per place
  struct Local {     // tokens of an expert that stay in their place
    int column;
    int expert;
    int place;
  };
  std::vector<Local> locals;
};

struct PlaceCost {
  double weight;    // in the objective
  double per_comm;  // tokens per unit of comm
};

}  // namespace

struct ReplicaLoadLp::Program {
  Program(const planner::ReplicaGraph& graph, const Topology& topology, std::optional<CommunicationWeights> weights);

  void add_places(const planner::ReplicaGraph& graph, Places added, const PlaceCost& cost, Columns& columns);
  void set_inputs(const Places& of, ArrayView<const std::int64_t, 2> input);

  std::size_t num_experts;
  int comp = 0;                     // column
  std::vector<int> column_of_slot;  // [slot], −1 when empty
  std::vector<Places> places;       // only those with a nonzero weight
  std::vector<double> x;            // [slot]
  ClpSimplex lp;
};

ReplicaLoadLp::Program::Program(const planner::ReplicaGraph& graph, const Topology& topology,
                                std::optional<CommunicationWeights> weights)
    : num_experts(graph.num_experts()), column_of_slot(graph.num_slots(), -1), x(graph.num_slots()) {
  Columns columns;
  columns.add_rows(num_experts, 0);  // Σ x = load; solve() sets the bounds
  const int rank_row = columns.add_rows(graph.num_ranks(), 0);
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (graph.expert_in(s) < 0) continue;
    column_of_slot[s] = columns.add_column(0);
    columns.set(graph.expert_in(s), column_of_slot[s], 1);
    columns.set(rank_row + graph.rank_of(s), column_of_slot[s], 1);
  }
  comp = columns.add_column(1);
  for (int r = 0; r < graph.num_ranks(); ++r) columns.set(rank_row + r, comp, -1);

  if (weights && weights->ranks > 0) {
    Places ranks{.count = static_cast<std::size_t>(graph.num_ranks())};
    for (int r = 0; r < graph.num_ranks(); ++r) ranks.of_rank.push_back(r);
    add_places(graph, std::move(ranks), {.weight = weights->ranks, .per_comm = 1}, columns);
  }
  if (weights && weights->nodes > 0 && topology.num_nodes() > 1) {
    Places nodes{.count = static_cast<std::size_t>(topology.num_nodes())};
    for (int r = 0; r < graph.num_ranks(); ++r) nodes.of_rank.push_back(topology.node_of(RankId{r}).value);
    add_places(graph, std::move(nodes),
               {.weight = weights->nodes, .per_comm = static_cast<double>(topology.ranks_per_node)}, columns);
  }

  CoinPackedMatrix matrix(true, 0, 0);
  matrix.setDimensions(static_cast<int>(columns.row_upper.size()), 0);
  for (const Columns::Column& column : columns.columns) {
    matrix.appendCol(static_cast<int>(column.rows.size()), column.rows.data(), column.values.data());
  }
  lp.setLogLevel(0);
  lp.loadProblem(matrix, nullptr, nullptr, columns.cost.data(), columns.row_lower.data(), columns.row_upper.data());
}

// Adds the rows for `added`. Per (expert, place): local − Σ x ≤ 0. Per place: −Σ local − per_comm·comm ≤ −Σ input
// (send) and Σ x − Σ local − per_comm·comm ≤ 0 (receive).
void ReplicaLoadLp::Program::add_places(const planner::ReplicaGraph& graph, Places added, const PlaceCost& cost,
                                        Columns& columns) {
  added.send_row = columns.add_rows(added.count, 0);
  const int receive_row = columns.add_rows(added.count, 0);
  const int comm = columns.add_column(cost.weight);
  for (int p = 0; p < static_cast<int>(added.count); ++p) {
    columns.set(added.send_row + p, comm, -cost.per_comm);
    columns.set(receive_row + p, comm, -cost.per_comm);
  }
  Array<int, 2> minimum_row({num_experts, added.count}, -1);
  for (int s = 0; s < graph.num_slots(); ++s) {
    if (graph.expert_in(s) < 0) continue;
    const int place = added.of_rank[graph.rank_of(s)];
    int& row = minimum_row(graph.expert_in(s), place);
    if (row < 0) {
      row = columns.add_rows(1, 0);
      const int local = columns.add_column(0);
      columns.set(row, local, 1);
      columns.set(added.send_row + place, local, -1);
      columns.set(receive_row + place, local, -1);
      added.locals.push_back({.column = local, .expert = graph.expert_in(s), .place = place});
    }
    columns.set(row, column_of_slot[s], -1);
    columns.set(receive_row + place, column_of_slot[s], 1);
  }
  places.push_back(std::move(added));
}

void ReplicaLoadLp::Program::set_inputs(const Places& of, ArrayView<const std::int64_t, 2> input) {
  Array<double, 2> of_place({of.count, num_experts});  // tokens
  std::vector<double> sum(of.count);
  for (std::size_t r = 0; r < input.extent(0); ++r) {
    for (std::size_t e = 0; e < num_experts; ++e) {
      of_place(of.of_rank[r], e) += static_cast<double>(input(r, e));
      sum[of.of_rank[r]] += static_cast<double>(input(r, e));
    }
  }
  for (const Places::Local& local : of.locals) {
    lp.setColumnUpper(local.column, of_place(local.place, local.expert));
  }
  for (std::size_t p = 0; p < of.count; ++p) {
    lp.setRowUpper(of.send_row + static_cast<int>(p), -sum[p]);
  }
}

bool ReplicaLoadLp::is_available() { return true; }

ReplicaLoadLp::ReplicaLoadLp(const planner::ReplicaGraph& graph, const Topology& topology,
                             std::optional<CommunicationWeights> weights)
    : program_(std::make_unique<Program>(graph, topology, weights)) {}

ReplicaLoadLp::~ReplicaLoadLp() = default;
ReplicaLoadLp::ReplicaLoadLp(ReplicaLoadLp&&) noexcept = default;

bool ReplicaLoadLp::solve(ArrayView<const std::int64_t, 2> input) {
  Program& p = *program_;
  for (std::size_t e = 0; e < p.num_experts; ++e) {
    std::int64_t load = 0;
    for (std::size_t r = 0; r < input.extent(0); ++r) load += input(r, e);
    p.lp.setRowBounds(static_cast<int>(e), static_cast<double>(load), static_cast<double>(load));
  }
  for (const Places& of : p.places) p.set_inputs(of, input);
  p.lp.dual();
  if (!p.lp.isProvenOptimal()) return false;
  for (std::size_t s = 0; s < p.x.size(); ++s) {
    if (p.column_of_slot[s] >= 0) p.x[s] = std::max(0.0, p.lp.primalColumnSolution()[p.column_of_slot[s]]);
  }
  return true;
}

double ReplicaLoadLp::objective() const { return program_->lp.objectiveValue(); }

double ReplicaLoadLp::largest_rank_load() const { return program_->lp.primalColumnSolution()[program_->comp]; }

std::span<const double> ReplicaLoadLp::replica_loads() const { return program_->x; }

}  // namespace foremoe::finemoe
