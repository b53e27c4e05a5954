#include "foremoe/cluster/cost_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

constexpr double kAttentionBackward = 2.5;  // five GEMMs of the size of the forward's two
constexpr double kScoreBytes = 4;           // the router's scores are float32
constexpr std::int64_t kBytesPerCount = 4;  // size of one expert's token count in gather_loads()

// Reads and writes of a row of `hidden` elements between the GEMMs of a layer. Each of two norms reads and writes one
// row. Each of two residual additions reads two rows and writes one.
constexpr double kResidualPasses = 2 * 2 + 2 * 3;

constexpr int kDenseKernels = 7;         // two norms, query-key-value, attention, output, router, top-k
constexpr int kFeedForwardKernels = 3;   // gate-up, activation, down
constexpr int kExpertKernels = 5;        // including sorting rows by expert and back
constexpr double kActivationPasses = 3;  // over the intermediate width: read gate and up, write their product
constexpr double kSortPasses = 4;        // over the hidden width: read and write, before and after

void expect_positive(const ModelShape& model, const char* field, std::int64_t value) {
  if (value > 0) return;
  throw InputError({.file = model.name, .field = field},
                   fmt::format("is {}; a cost model needs it to be positive", value));
}

void expect_complete(const ModelShape& model) {
  expect_positive(model, "moe_layers", model.moe_layers);
  expect_positive(model, "experts", model.experts);
  expect_positive(model, "top_k", model.top_k);
  expect_positive(model, "hidden", model.hidden);
  expect_positive(model, "intermediate", model.intermediate);
  expect_positive(model, "vocabulary", model.vocabulary);
  expect_positive(model, "attention.heads", model.attention.heads);
  expect_positive(model, "attention.kv_heads", model.attention.kv_heads);
  expect_positive(model, "attention.key_width", model.attention.key_width);
  expect_positive(model, "attention.value_width", model.attention.value_width);
  if (model.dense_layers > 0) expect_positive(model, "dense_intermediate", model.dense_intermediate);
  expect_groups_fit(model.groups, model.experts, model.top_k, model.name);
}

void check_cost_options(const CostOptions& options) {
  const auto expect = [](const char* field, int value, int least) {
    if (value >= least) return;
    throw InputError({.field = field}, fmt::format("{} is less than {}", value, least));
  };
  expect("sequence_tokens", options.sequence_tokens.value_or(kSequenceTokens), 1);
  expect("bytes_per_parameter", options.bytes_per_parameter, 1);
  expect("bytes_per_gradient", options.bytes_per_gradient, 1);
  expect("optimizer_bytes_per_parameter", options.optimizer_bytes_per_parameter, 0);
  expect("optimizer_shards", options.optimizer_shards.value_or(1), 1);
  expect("ep_groups", options.ep_groups, 1);
  if (options.recompute_experts && options.recompute_activations) {
    throw InputError({.field = "recompute_experts"},
                     "needs `keep_activations`: without it whole layers are recomputed");
  }
}

double as_double(std::int64_t value) { return static_cast<double>(value); }

}  // namespace

std::string_view to_string(Dispatch dispatch) { return dispatch == Dispatch::kRow ? "row" : "token"; }

CostModel::CostModel(Cluster cluster, ModelShape model, CostOptions options)
    : cluster_{std::move(cluster)}, model_{std::move(model)}, options_{options} {
  expect_complete(model_);
  check_cost_options(options_);
}

double CostModel::seconds(const Product& product, Pass direction) const {
  const double rate = cluster_.flops_per_second * product.efficiency;
  const auto roofline = [&](double flops, double bytes) {
    return std::max(flops / rate, bytes / cluster_.memory_bytes_per_second);
  };
  const double weights = product.parameters * options_.bytes_per_parameter;
  const double forward = roofline(product.flops, weights + product.row_bytes);
  if (direction == Pass::kForward) return forward;
  // Computing either gradient reads and writes rows. The rows' gradient reads the weights; the weights' is accumulated.
  const double gradients = product.parameters * 2 * options_.bytes_per_gradient;
  const double backward = roofline(product.backward_flops * product.flops, weights + gradients + 2 * product.row_bytes);
  return backward + (anew(product.of_experts) ? forward : 0);
}

double CostModel::moving(double bytes, int kernels, Pass direction, bool of_experts) const {
  const double once = bytes / cluster_.memory_bytes_per_second + kernels * cluster_.kernel_seconds;
  if (direction == Pass::kForward) return once;
  return once * (anew(of_experts) ? 3 : 2);
}

double CostModel::squared_lengths(Tokens tokens) const { return as_double(tokens.value) * sequence_tokens(); }

double CostModel::attention(double tokens, double squared_lengths, Pass direction) const {
  const double row_bytes = tokens * options_.bytes_per_parameter;
  double kinds = 0;
  model_.visit_attention([&](const AttentionShape& shape, int layers) {
    const double parameters = as_double(shape.parameters(model_.hidden));
    const Product projections{.flops = 2 * parameters * tokens,
                              .parameters = parameters,
                              .row_bytes = row_bytes * (2.0 * model_.hidden + as_double(shape.token_width())),
                              .efficiency = cluster_.gemm_efficiency};
    const Product scores{.flops = shape.score_flops(tokens, squared_lengths),
                         .row_bytes = row_bytes * as_double(shape.token_width()),
                         .efficiency = cluster_.attention_efficiency,
                         .backward_flops = kAttentionBackward};
    kinds += 1.0 * layers / model_.layers() * (seconds(projections, direction) + seconds(scores, direction));
  });
  return kinds + moving(kResidualPasses * row_bytes * model_.hidden, kDenseKernels, direction);
}

double CostModel::feed_forward(double tokens, double parameters, double intermediate, Pass direction) const {
  const double row_bytes = tokens * options_.bytes_per_parameter;
  const Product product{.flops = 2 * parameters * tokens,
                        .parameters = parameters,
                        .row_bytes = row_bytes * (2.0 * model_.hidden + 3 * intermediate),
                        .efficiency = cluster_.gemm_efficiency};
  return seconds(product, direction) +
         moving(kActivationPasses * row_bytes * intermediate, kFeedForwardKernels, direction);
}

double CostModel::dense(Tokens tokens, double squared_lengths, Pass direction) const {
  if (tokens.value == 0) return 0;
  const double n = as_double(tokens.value);
  const double router = as_double(model_.router_parameters());
  double total =
      attention(n, squared_lengths, direction) +
      seconds({.flops = 2 * router * n,
               .parameters = router,
               .row_bytes = n * (model_.hidden * options_.bytes_per_parameter + model_.experts * kScoreBytes),
               .efficiency = cluster_.gemm_efficiency},
              direction);
  if (model_.shared_parameters() > 0) {
    total += feed_forward(n, as_double(model_.shared_parameters()), model_.shared_width(), direction);
  }
  return total + options_.other_seconds_per_layer;
}

double CostModel::other_layers(Tokens tokens, double squared_lengths, Pass direction) const {
  if (tokens.value == 0) return 0;
  const double n = as_double(tokens.value);
  double total = 0;
  if (model_.has_head) {
    const double head = as_double(model_.head_parameters());
    total = seconds({.flops = 2 * head * n,
                     .parameters = head,
                     .row_bytes = n * options_.bytes_per_parameter * (model_.hidden + model_.vocabulary),
                     .efficiency = cluster_.gemm_efficiency},
                    direction) +
            moving(0, 1, direction);
  }
  if (model_.dense_layers > 0) {
    total += model_.dense_layers *
             (attention(n, squared_lengths, direction) +
              feed_forward(n, as_double(model_.dense_parameters()), model_.dense_intermediate, direction));
  }
  const int without_feed_forward = model_.layers() - model_.moe_layers - model_.dense_layers;
  if (without_feed_forward > 0) total += without_feed_forward * attention(n, squared_lengths, direction);
  return total;
}

double CostModel::experts(std::span<const Tokens> replicas, Pass direction) const {
  std::int64_t rows = 0;
  std::int64_t padded_rows = 0;
  std::int64_t running = 0;
  const std::int64_t tile = cluster_.row_tile;
  for (const Tokens load : replicas) {
    rows += load.value;
    padded_rows += (load.value + tile - 1) / tile * tile;
    running += load.value > 0;
  }
  if (rows == 0) return 0;
  const double row_bytes = as_double(rows) * options_.bytes_per_parameter;
  const Product grouped{.flops = as_double(model_.flops_per_assignment()) * as_double(padded_rows),
                        .parameters = as_double(model_.expert_parameters() * running),
                        .row_bytes = row_bytes * (2.0 * model_.row_width() + 3.0 * model_.intermediate),
                        .efficiency = cluster_.gemm_efficiency,
                        .of_experts = true};
  const double moved = row_bytes * (kSortPasses * model_.row_width() + kActivationPasses * model_.intermediate);
  return seconds(grouped, direction) + moving(moved, kExpertKernels, direction, /*of_experts=*/true);
}

double CostModel::sort(Tokens assignments) const {
  const double row_bytes = as_double(assignments.value * row().value);
  return assignments.value == 0 ? 0 : moving(kSortPasses / 2 * row_bytes, 1, Pass::kForward);
}

double CostModel::exchange(const RankRows& rows) const {
  const ExchangeSpeed& speed = cluster_.exchange;
  const bool by_token = options_.dispatch == Dispatch::kToken;
  const auto on_link = [&](const LinkSpeed& link, double efficiency, std::int64_t most) {
    if (most == 0) return 0.0;
    return link.latency_seconds + (by_token ? speed.token_seconds : 0) +
           as_double(most * row().value) / (efficiency * link.bytes_per_second);
  };
  const std::int64_t of_peers = std::max(rows.sent_to_peers, rows.received_from_peers);
  const std::int64_t of_nodes = std::max(rows.sent_to_nodes, rows.received_from_nodes);
  const double of_token = of_nodes > 0 ? speed.forwarding_efficiency : speed.token_efficiency;
  return std::max(on_link(cluster_.peers, by_token ? of_token : speed.row_efficiency, of_peers),
                  on_link(cluster_.network, 1, of_nodes));
}

double CostModel::gather_loads(const Topology& topology, std::int64_t layers) const {
  if (topology.num_ranks == 1) return 0;
  const LinkSpeed& link = topology.num_nodes() > 1 ? cluster_.network : cluster_.peers;
  const std::int64_t counts = layers * (topology.num_ranks - 1) * model_.experts;
  return link.latency_seconds + as_double(counts * kBytesPerCount) / link.bytes_per_second;
}

double CostModel::optimizer(int num_experts) const {
  if (num_experts == 0) return 0;
  // Reads gradients, reads and writes the state, writes weights.
  const double bytes_per_parameter =
      options_.bytes_per_gradient + 2.0 * options_.optimizer_bytes_per_parameter + options_.bytes_per_parameter;
  const double parameters = as_double(model_.expert_parameters()) * num_experts / optimizer_shards();
  return parameters * bytes_per_parameter / cluster_.memory_bytes_per_second + cluster_.kernel_seconds;
}

CostModel::Collective CostModel::ring(double ranks, double bytes) const {
  const LinkSpeed& link = options_.groups_share_node ? cluster_.peers : cluster_.network;
  const double sent = bytes * (ranks - 1) / ranks;
  return {.seconds = sent / link.bytes_per_second + (ranks - 1) * link.latency_seconds, .bytes = sent};
}

CostModel::Collective CostModel::reduce_gradients(int num_experts) const {
  const double bytes = as_double(expert_gradient().value) * num_experts;
  const double shards = shards_in_job();
  const Collective scatter = ring(shards, bytes);
  const Collective half = ring(options_.ep_groups / shards, bytes / shards);  // an all-reduce also gathers
  return {.seconds = scatter.seconds + 2 * half.seconds, .bytes = scatter.bytes + 2 * half.bytes};
}

CostModel::Collective CostModel::gather_weights(int num_experts) const {
  return ring(shards_in_job(), as_double(expert_weights().value) * num_experts);
}

Bytes CostModel::expert_weights() const { return model_.expert_bytes(options_.bytes_per_parameter); }

Bytes CostModel::expert_gradient() const { return model_.expert_bytes(options_.bytes_per_gradient); }

Bytes CostModel::row() const { return Bytes{std::int64_t{model_.row_width()} * options_.bytes_per_parameter}; }

Bytes CostModel::activations_per_token() const {
  if (options_.recompute_activations) return Bytes{std::int64_t{model_.hidden} * options_.bytes_per_parameter};
  // Kept per token: layer input, results of two norms, the sum between them, queries, keys, values, attention's result,
  // router scores, and gate, up and their product in shared experts.
  std::int64_t attention = 0;
  model_.visit_attention([&](const AttentionShape& kind, int layers) { attention += layers * kind.token_width(); });
  const std::int64_t elements =
      std::int64_t{4} * model_.hidden + attention / model_.layers() + std::int64_t{3} * model_.shared_width();
  return Bytes{elements * options_.bytes_per_parameter + static_cast<std::int64_t>(kScoreBytes) * model_.experts};
}

Bytes CostModel::activations_per_row() const {
  if (options_.recompute_activations) return Bytes{0};
  const Bytes all = working_memory_per_row(Pass::kForward);
  return options_.recompute_experts ? all - inside_experts_per_row() : all;
}

Bytes CostModel::working_memory_per_row(Pass direction) const {
  // A forward needs the received row, the returned row, gate, up and their product. A backward needs their gradients
  // and the activations that were not kept.
  const Bytes all = row() + row() + inside_experts_per_row();
  if (direction == Pass::kForward || !anew(/*of_experts=*/true)) return all;
  return all + (options_.recompute_activations ? all : inside_experts_per_row());
}

Bytes CostModel::inside_experts_per_row() const {
  return Bytes{std::int64_t{3} * model_.intermediate * options_.bytes_per_parameter};
}

Bytes CostModel::rank_state(int num_experts_per_layer, int num_ranks) const {
  const std::int64_t own = model_.expert_parameters() * num_experts_per_layer * model_.moe_layers;
  const std::int64_t replicated = model_.parameters_besides_experts();
  const std::int64_t in_place = options_.bytes_per_parameter + options_.bytes_per_gradient;
  const auto optimizer_bytes = [&](std::int64_t parameters, int shards) {
    return (parameters * options_.optimizer_bytes_per_parameter + shards - 1) / shards;
  };
  return Bytes{(own + replicated) * in_place + optimizer_bytes(own, optimizer_shards()) +
               optimizer_bytes(replicated, std::max(1, num_ranks) * options_.ep_groups)};
}

CostModel::HiddenCopies CostModel::hidden_copies(Tokens tokens_per_rank) const {
  // One replica computes all rows. No placement takes less time, so these copies are always hidden.
  const Tokens assignments{tokens_per_rank.value * model_.top_k};
  const double window = dense(tokens_per_rank, Pass::kForward) + experts({&assignments, 1}, Pass::kForward);
  const auto copies = [&](const LinkSpeed& link) {
    const double bytes = (window - link.latency_seconds) * link.bytes_per_second;
    constexpr double kMost = 1 << 20;  // far more than the number of experts
    return static_cast<int>(std::clamp(bytes / as_double(expert_weights().value), 0.0, kMost));
  };
  return {.from_host = copies(shared_host()), .from_peers = copies(cluster_.peers)};
}

LinkSpeed CostModel::shared_host() const {
  LinkSpeed link = cluster_.host;
  link.bytes_per_second = std::min({link.bytes_per_second, cluster_.switch_bytes_per_second / cluster_.ranks_per_switch,
                                    cluster_.host_memory_bytes_per_second / cluster_.ranks_per_node});
  return link;
}

}  // namespace foremoe
