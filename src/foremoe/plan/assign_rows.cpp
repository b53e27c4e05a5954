#include "foremoe/plan/assign_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/plan/row_choice.h"

namespace foremoe {

namespace {

// Deals the shipments of one source to its rows, in row order.
class Dealer {
 public:
  Dealer(std::span<const Shipment> sent, RouteWorkspace& ws)
      : sent_(sent), num_experts_(sent.empty() ? 0 : sent.back().expert.value + 1) {
    ws.next.assign(static_cast<std::size_t>(num_experts_), {});
    next_ = ws.next;
    for (std::size_t i = sent.size(); i-- > 0;) {
      next_[sent[i].expert.index()] = {static_cast<std::int32_t>(i), sent[i].rows.value};
      rows_ += sent[i].rows.value;
    }
  }

  // Returns the shipment that carries the next row of this expert; −1 without an expert, and if none is left.
  std::int32_t deal(ExpertId e) {
    if (e < ExpertId{0}) return -1;
    if (e.value >= num_experts_) return lack();
    RouteWorkspace::Next& next = next_[e.index()];
    if (next.left == 0) {
      const auto following = static_cast<std::size_t>(next.shipment) + 1;
      if (following >= sent_.size() || sent_[following].expert != e) return lack();
      next = {static_cast<std::int32_t>(following), sent_[following].rows.value};
    }
    --next.left;
    --rows_;
    return next.shipment;
  }

  bool dealt_all() const { return rows_ == 0 && !lacked_; }

 private:
  std::int32_t lack() {
    lacked_ = true;
    return -1;
  }

  std::span<const Shipment> sent_;
  std::int32_t num_experts_;
  std::span<RouteWorkspace::Next> next_;
  std::int64_t rows_ = 0;
  bool lacked_ = false;
};

}  // namespace

bool assign_shipments(std::span<const Shipment> sent, std::span<const ExpertId> routes, RouteWorkspace& ws,
                      std::span<std::int32_t> of_row) {
  if (of_row.size() != routes.size()) {
    throw InputError({.field = "routes"},
                     fmt::format("{} entries, but the output has {}", routes.size(), of_row.size()));
  }
  Dealer dealer(sent, ws);
  for (std::size_t row = 0; row < routes.size(); ++row) of_row[row] = dealer.deal(routes[row]);
  return dealer.dealt_all();
}

void expect_counted(bool counted, RankId source) {
  if (counted) return;
  throw InputError(
      {.field = "routes"},
      fmt::format("the load counts others of rank {}: do not modify a trace's array, or overwrite its file, "
                  "while its load is in use",
                  source.value));
}

void assign_rows(const RoutedLayer& routed, const SourceRows& rows, RouteWorkspace& ws, std::span<RankId> replica) {
  const std::span<const Shipment> sent = routed.of_source(rows.source);
  ws.shipment.resize(replica.size());
  expect_counted(assign_shipments(sent, rows.routes, ws, ws.shipment), rows.source);
  std::ranges::transform(ws.shipment, replica.begin(), [&](std::int32_t i) {
    return i < 0 ? kNoReplica : sent[static_cast<std::size_t>(i)].replica;
  });
}

SourceTokens::SourceTokens(const RoutingTrace& trace, const Batching& batching)
    : trace_(trace), num_ranks_(batching.num_ranks) {
  expect_valid(batching, trace);
  const std::size_t num_sequences = batching.rank.size();
  const auto source_of = [&](std::size_t s) {
    return batching.micro_step[s].index() * num_ranks_ + batching.rank[s].index();
  };

  first_.assign(static_cast<std::size_t>(batching.num_micro_steps) * num_ranks_ + 1, 0);
  for (std::size_t s = 0; s < num_sequences; ++s) ++first_[source_of(s) + 1];
  for (std::size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];

  sequences_.resize(num_sequences);
  std::vector<std::size_t> next(first_);
  for (std::size_t s = 0; s < num_sequences; ++s) sequences_[next[source_of(s)]++] = static_cast<int>(s);
}

std::span<const int> SourceTokens::sequences(MicroStepId m, RankId source) const {
  const std::size_t i = m.index() * num_ranks_ + source.index();
  if (m.value < 0 || source.value < 0 || source.value >= num_ranks_ || i + 1 >= first_.size()) {
    throw InputError({.field = "micro_step"},
                     fmt::format("there is no micro-step {} of rank {}", m.value, source.value));
  }
  return std::span(sequences_).subspan(first_[i], first_[i + 1] - first_[i]);
}

void SourceTokens::gather(MicroStepId m, RankId source, LayerId l, std::vector<ExpertId>& routes) const {
  const std::size_t top_k = static_cast<std::size_t>(trace_.top_k);
  if (l.index() >= static_cast<std::size_t>(trace_.num_layers)) {
    throw InputError({.file = trace_.name, .field = "layer"}, fmt::format("there is no layer {}", l.value));
  }
  const std::span<const int> gathered = sequences(m, source);
  std::int64_t tokens = 0;
  for (const int s : gathered) tokens += trace_.sequence_length(s);
  routes.resize(static_cast<std::size_t>(tokens) * top_k);
  std::span<ExpertId> rest(routes);
  for (const int s : gathered) {
    const std::size_t rows = static_cast<std::size_t>(trace_.sequence_length(s)) * top_k;
    trace_.rows_of(trace_.cu_seqlens[s], l, rest.first(rows));
    rest = rest.subspan(rows);
  }
}

namespace {

// Counts the tokens that go to each place (rank or node), once for each token and place.
class PlaceCounts {
 public:
  explicit PlaceCounts(std::size_t num_places) : few_(num_places <= 64), last_(num_places) {}

  void begin_source(std::span<Tokens> counts) { counts_ = counts; }
  void begin_token() { ++token_; }
  void add(std::size_t place) {  // without branches on the place: they would be hard to predict
    if (few_) {
      places_ |= std::uint64_t{1} << place;
    } else {
      counts_[place].value += std::exchange(last_[place], token_) != token_ ? 1 : 0;
    }
  }
  void end_token() {
    for (; places_ != 0; places_ &= places_ - 1) ++counts_[static_cast<std::size_t>(std::countr_zero(places_))].value;
  }

 private:
  bool few_;
  std::uint64_t places_ = 0;  // of the token, one bit each, if there are few
  std::span<Tokens> counts_;  // [place], of the source
  std::int64_t token_ = 0;
  std::vector<std::int64_t> last_;  // [place], the last token that was counted, from 1 on
};

}  // namespace

TokenDispatch token_dispatch(const RoutedLayer& routed, const TokenDispatchProblem& problem) {
  const Topology& topology = problem.topology;
  const std::size_t num_ranks = static_cast<std::size_t>(topology.num_ranks);
  const std::size_t num_nodes = static_cast<std::size_t>(topology.num_nodes());
  const std::size_t top_k = static_cast<std::size_t>(problem.tokens.top_k());
  TokenDispatch table{.to_rank = Array<Tokens, 2>({num_ranks, num_ranks}),
                      .to_node = Array<Tokens, 2>({num_ranks, num_nodes})};

  RowChoiceWorkspace workspace;
  std::vector<ExpertId> routes;        // [token][k]
  std::vector<std::int32_t> shipment;  // [token][k]
  struct Place {
    std::size_t rank = 0;
    std::size_t node = 0;
  };
  std::vector<Place> place;  // [shipment of the source]
  PlaceCounts ranks(num_ranks);
  PlaceCounts nodes(num_nodes);
  for (int s = 0; s < topology.num_ranks; ++s) {
    problem.tokens.gather(problem.micro_step, RankId{s}, problem.layer, routes);
    const std::span<const Shipment> sent = routed.of_source(RankId{s});
    place.clear();
    for (const Shipment& of : sent) place.push_back({of.replica.index(), topology.node_of(of.replica).index()});
    ranks.begin_source(table.to_rank.row(s));
    nodes.begin_source(table.to_node.row(s));
    const auto count = [&](auto&& shipment_of) {
      for (std::size_t token = 0; token < routes.size(); token += top_k) {
        ranks.begin_token();
        nodes.begin_token();
        for (std::size_t row = token; row < token + top_k; ++row) {
          const std::int32_t i = shipment_of(row);
          if (i < 0) continue;
          const auto [rank, node] = place[static_cast<std::size_t>(i)];
          ranks.add(rank);
          nodes.add(node);
        }
        ranks.end_token();
        nodes.end_token();
      }
    };
    if (problem.rows == Rows::kToken) {
      shipment.resize(routes.size());
      expect_counted(choose_rows({sent, routes, problem.tokens.top_k(), RankId{s}, topology}, workspace, shipment),
                     RankId{s});
      count([&](std::size_t row) { return shipment[row]; });
    } else {
      Dealer dealer(sent, workspace.route);
      count([&](std::size_t row) { return dealer.deal(routes[row]); });
      expect_counted(dealer.dealt_all(), RankId{s});
    }
  }
  return table;
}

}  // namespace foremoe
