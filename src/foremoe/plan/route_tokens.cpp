#include "foremoe/plan/route_tokens.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <numeric>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/plan/row_choice.h"

namespace foremoe {
namespace {

using Replica = RouteWorkspace::Replica;

// Collects the replicas with quota, sorted by expert, then rank.
void collect_replicas(const RoutingProblem& problem, RouteWorkspace& ws) {
  const LayerQuotas& quotas = problem.quotas;
  const std::size_t num_experts = problem.load.extent(1);
  if (quotas.slot_expert.extent(0) != problem.load.extent(0) ||
      quotas.slot_tokens.shape() != quotas.slot_expert.shape() ||
      problem.topology.num_ranks != static_cast<int>(problem.load.extent(0)) || problem.topology.ranks_per_node < 1) {
    throw InputError({.field = "load"}, "its ranks, those of the slots and those of the topology differ");
  }
  if (std::ranges::any_of(problem.load.flat(), [](Tokens t) { return t < Tokens{0}; })) {
    throw InputError({.field = "load"}, "has negative tokens");
  }
  const std::span<const ExpertId> expert_of_slot = quotas.slot_expert.flat();
  const std::span<const Tokens> tokens_of_slot = quotas.slot_tokens.flat();
  const std::size_t slots_per_rank = quotas.slot_expert.extent(1);
  const auto serves = [&](std::size_t s) { return expert_of_slot[s] != kNoExpert && tokens_of_slot[s] > Tokens{0}; };

  ws.first_replica.assign(num_experts + 1, 0);
  for (std::size_t s = 0; s < expert_of_slot.size(); ++s) {
    if (!serves(s)) continue;
    if (expert_of_slot[s].index() >= num_experts) {
      throw InputError(
          {.field = "slot_expert", .index = fmt::format("[{}, {}]", s / slots_per_rank, s % slots_per_rank)},
          fmt::format("expert {} is not in 0 … {}", expert_of_slot[s].value, num_experts - 1));
    }
    ++ws.first_replica[expert_of_slot[s].index() + 1];
  }
  for (std::size_t e = 0; e < num_experts; ++e) ws.first_replica[e + 1] += ws.first_replica[e];

  ws.replicas.resize(ws.first_replica[num_experts]);
  ws.cursor.assign(ws.first_replica.begin(), ws.first_replica.end());
  for (std::size_t s = 0; s < expert_of_slot.size(); ++s) {
    if (!serves(s)) continue;
    ws.replicas[ws.cursor[expert_of_slot[s].index()]++] = {RankId{s / slots_per_rank}, SlotId{s % slots_per_rank},
                                                           tokens_of_slot[s].value};
  }
}

constexpr std::int64_t kCarryUnit = std::int64_t{1} << 32;  // of RouteWorkspace::carry: one row

__extension__ using Wide = __int128;

struct Divided {
  std::int64_t whole;
  std::int64_t remainder;
};

// a · b ÷ c, exactly.
Divided divided(std::int64_t a, std::int64_t b, std::int64_t c) {
  if (std::int64_t product = 0; !__builtin_mul_overflow(a, b, &product)) return {product / c, product % c};
  const Wide product = Wide{a} * b;
  return {static_cast<std::int64_t>(product / c), static_cast<std::int64_t>(product % c)};
}

// Runs the sweeps of one expert.
struct Sweeper {
  ExpertId expert;
  std::span<std::int64_t> rows_left;  // [ranks]
  std::vector<Shipment>& out;

  void send(int source, Replica& replica, std::int64_t rows) const {
    if (rows == 0) return;
    out.push_back({expert, RankId{source}, replica.rank, Tokens{rows}, replica.slot});
    rows_left[source] -= rows;
    replica.left -= rows;
  }

  // Sends share[s] rows of each source in [first, last) to these replicas, both in ascending order.
  void fill(int first, int last, std::span<const std::int64_t> share, std::span<Replica> replicas) const {
    auto replica = replicas.begin();
    for (int s = first; s < last; ++s) {
      for (std::int64_t left = share[s]; left > 0;) {
        while (replica->left == 0) ++replica;
        const std::int64_t rows = std::min(left, replica->left);
        send(s, *replica, rows);
        left -= rows;
      }
    }
  }

  // Sends share[s] rows of each source, divided among these replicas in proportion to their remaining quotas. Rounds
  // down, then sends one more row each to the replicas with the largest remainders.
  void deal(int first, int last, std::span<const std::int64_t> share, std::span<Replica> replicas) const {
    std::int64_t quota = quota_of(replicas);
    std::vector<std::pair<std::int64_t, std::size_t>> remainders;
    std::vector<std::int64_t> rows(replicas.size());
    for (int s = first; s < last; ++s) {
      if (share[s] == 0) continue;
      remainders.clear();
      std::int64_t rest = share[s];
      for (std::size_t i = 0; i < replicas.size(); ++i) {
        const auto [whole, remainder] = divided(share[s], replicas[i].left, quota);
        rows[i] = whole;
        rest -= whole;
        if (remainder != 0) remainders.emplace_back(-remainder, i);
      }
      std::ranges::sort(remainders);
      for (std::int64_t i = 0; i < rest; ++i) ++rows[remainders[static_cast<std::size_t>(i)].second];
      quota -= share[s];
      for (std::size_t i = 0; i < replicas.size(); ++i) send(s, replicas[i], rows[i]);
    }
  }

  static std::int64_t quota_of(std::span<const Replica> replicas) {
    std::int64_t quota = 0;
    for (const Replica& replica : replicas) quota += replica.left;
    return quota;
  }
};

// The sweeps of one expert.
void route_expert(const Sweeper& sweeper, std::span<Replica> replicas, const RoutingProblem& problem,
                  RouteWorkspace& ws) {
  const auto send = [&](int first, int last, std::span<Replica> to) {
    if (problem.rows == Rows::kToken) {
      sweeper.deal(first, last, ws.share, to);
    } else {
      sweeper.fill(first, last, ws.share, to);
    }
  };
  const std::span<std::int64_t> rows_left = sweeper.rows_left;
  for (Replica& own : replicas) {
    const int source = own.rank.value;
    sweeper.send(source, own, std::min(rows_left[source], own.left));
  }
  for (auto first = replicas.begin(); first != replicas.end();) {
    const NodeId node = problem.topology.node_of(first->rank);
    const auto last =
        std::find_if(first, replicas.end(), [&](const Replica& r) { return problem.topology.node_of(r.rank) != node; });
    const RankRange sources = problem.topology.ranks_of(node);
    const auto of_sources = [&](std::span<std::int64_t> all) { return all.subspan(sources.first, sources.size()); };
    divide_fairly(Sweeper::quota_of({first, last}), of_sources(rows_left), of_sources(ws.carry), of_sources(ws.share));
    send(sources.first, sources.last, {first, last});
    first = last;
  }
  std::ranges::copy(rows_left, ws.share.begin());
  send(0, problem.topology.num_ranks, replicas);  // sources with rows left have no quota left on their node
}

// Appends the shipments that the rank sends or receives.
void keep_own(std::span<const Shipment> shipments, RankId rank, RoutedRank& routed) {
  for (const Shipment& s : shipments) {
    if (s.source == rank) routed.sent.push_back(s);
    if (s.replica == rank) routed.received.push_back(s);
  }
}

void expect_quotas(std::span<const Replica> replicas, ExpertId e, std::int64_t rows) {
  std::int64_t quota = 0;
  for (const Replica& replica : replicas) quota += replica.left;
  if (quota == rows) return;
  throw InputError({.field = "slot_tokens"},
                   fmt::format("the replicas of expert {} serve {} rows, but its load is {}", e.value, quota, rows));
}

// Stable: preserves the order of experts and sweeps within a source.
void sort_by_source(std::span<const Shipment> shipments, std::size_t num_ranks, RouteWorkspace& ws,
                    RoutedLayer& routed) {
  routed.first.assign(num_ranks + 1, 0);
  for (const Shipment& s : shipments) ++routed.first[s.source.index() + 1];
  for (std::size_t r = 0; r < num_ranks; ++r) routed.first[r + 1] += routed.first[r];
  routed.shipments.resize(shipments.size());
  ws.cursor.assign(routed.first.begin(), routed.first.end());
  for (const Shipment& s : shipments) routed.shipments[ws.cursor[s.source.index()]++] = s;
}

}  // namespace

void divide_fairly(std::int64_t quota, std::span<const std::int64_t> rows, std::span<std::int64_t> carry,
                   std::span<std::int64_t> share) {
  const std::int64_t total = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  if (total <= quota) {
    std::ranges::copy(rows, share.begin());
    return;
  }
  std::vector<std::pair<std::int64_t, std::size_t>> candidates;
  std::int64_t rest = quota;
  for (std::size_t s = 0; s < rows.size(); ++s) {
    const auto [whole, remainder] = divided(quota, rows[s], total);
    share[s] = whole;
    rest -= whole;
    if (remainder == 0) continue;
    carry[s] += divided(remainder, kCarryUnit, total).whole;
    candidates.emplace_back(-carry[s], s);
  }
  std::ranges::sort(candidates);
  for (std::int64_t i = 0; i < rest; ++i) {
    const std::size_t s = candidates[static_cast<std::size_t>(i)].second;
    ++share[s];
    carry[s] -= kCarryUnit;
  }
}

LayerQuotas layer_quotas(const StepPlan& plan, EventId event, LayerId layer) {
  return {plan.slot_expert[event][layer], plan.slot_tokens[event][layer]};
}

void route_tokens(const RoutingProblem& problem, RouteWorkspace& ws, RoutedLayer& routed) {
  const std::size_t num_ranks = problem.load.extent(0);
  const std::size_t num_experts = problem.load.extent(1);
  collect_replicas(problem, ws);

  ws.by_expert.clear();
  ws.rows_left.resize(num_ranks);
  ws.share.resize(num_ranks);
  ws.carry.assign(num_ranks, 0);
  for (std::size_t e = 0; e < num_experts; ++e) {
    for (std::size_t s = 0; s < num_ranks; ++s) ws.rows_left[s] = problem.load(s, e).value;
    const std::span replicas =
        std::span(ws.replicas).subspan(ws.first_replica[e], ws.first_replica[e + 1] - ws.first_replica[e]);
    expect_quotas(replicas, ExpertId{e}, std::accumulate(ws.rows_left.begin(), ws.rows_left.end(), std::int64_t{0}));
    const Sweeper sweeper{ExpertId{e}, ws.rows_left, ws.by_expert};
    route_expert(sweeper, replicas, problem, ws);
    assert(std::ranges::all_of(ws.rows_left, [](std::int64_t left) { return left == 0; }));
    assert(std::ranges::all_of(replicas, [](const Replica& r) { return r.left == 0; }));
  }
  sort_by_source(ws.by_expert, num_ranks, ws, routed);
}

void route_tokens_of(const RoutingProblem& problem, RankId rank, RouteWorkspace& ws, RoutedRank& routed) {
  const std::size_t num_ranks = problem.load.extent(0);
  const std::size_t num_experts = problem.load.extent(1);
  collect_replicas(problem, ws);
  ws.total.assign(num_experts, 0);
  for (std::size_t s = 0; s < num_ranks; ++s) {
    for (std::size_t e = 0; e < num_experts; ++e) ws.total[e] += problem.load(s, e).value;
  }

  routed.sent.clear();
  routed.received.clear();
  ws.rows_left.resize(num_ranks);
  ws.share.resize(num_ranks);
  ws.carry.assign(num_ranks, 0);
  for (std::size_t e = 0; e < num_experts; ++e) {
    const std::span replicas =
        std::span(ws.replicas).subspan(ws.first_replica[e], ws.first_replica[e + 1] - ws.first_replica[e]);
    expect_quotas(replicas, ExpertId{e}, ws.total[e]);
    if (replicas.size() == 1 && replicas.front().rank != rank) {
      const Replica& only = replicas.front();
      if (problem.load(rank, e) == Tokens{0}) continue;
      routed.sent.push_back({ExpertId{e}, rank, only.rank, problem.load(rank, e), only.slot});
      continue;
    }
    for (std::size_t s = 0; s < num_ranks; ++s) ws.rows_left[s] = problem.load(s, e).value;
    ws.by_expert.clear();
    const Sweeper sweeper{ExpertId{e}, ws.rows_left, ws.by_expert};
    route_expert(sweeper, replicas, problem, ws);
    keep_own(ws.by_expert, rank, routed);
  }
}

RoutedLayer route_tokens(const RoutingProblem& problem) {
  RouteWorkspace workspace;
  RoutedLayer routed;
  route_tokens(problem, workspace, routed);
  return routed;
}

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

Array<Tokens, 2> dispatch_table(const RoutedLayer& routed) {
  const std::size_t num_ranks = routed.first.size() - 1;
  Array<Tokens, 2> rows({num_ranks, num_ranks});
  for (const Shipment& s : routed.shipments) rows(s.source, s.replica) += s.rows;
  return rows;
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
