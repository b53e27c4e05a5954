#include "foremoe/runtime/run_result.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "foremoe/core/sha256.h"

namespace foremoe {
namespace {

// Tensors of one kind, indexed [a][b]. One rank owns each tensor; `owner` returns the same rank on all ranks.
struct Kind {
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::function<RankId(std::size_t a, std::size_t b)> owner;
  std::function<std::vector<float>(std::size_t a, std::size_t b)> tensor;  // only for tensors that this rank owns
};

struct Kinds {
  Kind output, input_gradient, expert_gradient, router_gradient;
  Kind expert_weights, router_weights;
};

Kinds kinds_of(const MoeModel& model, const ResultShape& shape) {
  const auto count = [](int n) { return static_cast<std::size_t>(n); };
  const std::size_t gradients = shape.backward ? count(shape.layers) : 0;
  const auto second_is_rank = [](std::size_t, std::size_t b) { return RankId{b}; };
  const auto at_home = [&model](std::size_t a, std::size_t b) { return model.home()(a, b); };
  return {
      .output = {count(shape.micro_steps), count(shape.ranks), second_is_rank,
                 [&model](std::size_t m, std::size_t) { return model.output(MicroStepId{m}); }},
      .input_gradient = {shape.backward ? count(shape.micro_steps) : 0, count(shape.ranks), second_is_rank,
                         [&model](std::size_t m, std::size_t) { return model.input_gradient(MicroStepId{m}); }},
      .expert_gradient = {gradients, count(shape.experts), at_home,
                          [&model](std::size_t l, std::size_t e) {
                            return model.expert_gradient(LayerId{l}, ExpertId{e});
                          }},
      .router_gradient = {gradients, count(shape.ranks), second_is_rank,
                          [&model](std::size_t l, std::size_t) { return model.router_gradient(LayerId{l}); }},
      .expert_weights = {count(shape.layers), count(shape.experts), at_home,
                         [&model](std::size_t l, std::size_t e) {
                           return model.expert_weights(LayerId{l}, ExpertId{e});
                         }},
      .router_weights = {count(shape.layers), count(shape.ranks), second_is_rank,
                         [&model](std::size_t l, std::size_t) { return model.router_weights(LayerId{l}); }},
  };
}

void for_each_of(const Kind& kind, RankId rank, const std::function<void(std::size_t, std::size_t)>& visit) {
  for (std::size_t a = 0; a < kind.rows; ++a) {
    for (std::size_t b = 0; b < kind.columns; ++b) {
      if (kind.owner(a, b) == rank) visit(a, b);
    }
  }
}

template <class T>
void append(std::vector<std::byte>& bytes, std::span<const T> values) {
  const auto more = std::as_bytes(values);
  bytes.insert(bytes.end(), more.begin(), more.end());
}

// Reads values that append() wrote and removes them from the front.
template <class T>
void take(std::span<const std::byte>& bytes, std::span<T> values) {
  std::memcpy(values.data(), bytes.data(), values.size_bytes());
  bytes = bytes.subspan(values.size_bytes());
}

template <class T>
void append_sized(std::vector<std::byte>& bytes, const std::vector<T>& values) {
  const std::uint64_t size = values.size();
  append(bytes, std::span(&size, 1));
  append(bytes, std::span<const T>(values));
}

template <class T>
std::vector<T> take_sized(std::span<const std::byte>& bytes) {
  std::uint64_t size = 0;
  take(bytes, std::span(&size, 1));
  std::vector<T> values(size);
  take(bytes, std::span<T>(values));
  return values;
}

Array<std::vector<float>, 2> gather_kind(const Kind& kind, Communicator& communicator) {
  std::vector<std::byte> mine;
  for_each_of(kind, communicator.rank(), [&](std::size_t a, std::size_t b) { append_sized(mine, kind.tensor(a, b)); });
  const std::vector<std::vector<std::byte>> all = gather(communicator, mine);
  if (communicator.rank() != RankId{0}) return {};
  Array<std::vector<float>, 2> tensors({kind.rows, kind.columns});
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::span<const std::byte> rest = all[r];
    for_each_of(kind, RankId{r}, [&](std::size_t a, std::size_t b) { tensors(a, b) = take_sized<float>(rest); });
  }
  return tensors;
}

using Digest = std::array<char, 64>;  // hex

// Returns the digest of all tensors of one kind, in order. Valid only at rank 0.
std::string digest_kind(const Kind& kind, Communicator& communicator) {
  std::vector<std::byte> mine;
  for_each_of(kind, communicator.rank(), [&](std::size_t a, std::size_t b) {
    const std::vector<float> tensor = kind.tensor(a, b);
    const std::string hex = sha256_hex(std::as_bytes(std::span(tensor)));
    append(mine, std::span<const char>(hex));
  });
  const std::vector<std::vector<std::byte>> all = gather(communicator, mine);
  Array<Digest, 2> digests({kind.rows, kind.columns});
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::span<const std::byte> rest = all[r];
    for_each_of(kind, RankId{r}, [&](std::size_t a, std::size_t b) { take(rest, std::span<char>(digests(a, b))); });
  }
  return sha256_hex(std::as_bytes(std::span(digests.flat())));
}

std::string digest_of(std::initializer_list<std::string> digests) {
  std::string all;
  for (const std::string& digest : digests) all += digest;
  return sha256_hex(std::as_bytes(std::span(all)));
}

}  // namespace

StepResult gather_result(const MoeModel& model, const ResultShape& shape, Communicator& communicator) {
  const Kinds kinds = kinds_of(model, shape);
  return {.output = gather_kind(kinds.output, communicator),
          .input_gradient = gather_kind(kinds.input_gradient, communicator),
          .expert_gradient = gather_kind(kinds.expert_gradient, communicator),
          .router_gradient = gather_kind(kinds.router_gradient, communicator)};
}

RoutesUsed gather_routes(const MoeModel& model, const ResultShape& shape, Communicator& communicator) {
  const auto micro_steps = static_cast<std::size_t>(shape.micro_steps);
  const auto layers = static_cast<std::size_t>(shape.layers);
  std::vector<std::byte> mine;
  for (std::size_t m = 0; m < micro_steps; ++m) {
    for (std::size_t l = 0; l < layers; ++l) append_sized(mine, model.routes_used(MicroStepId{m}, LayerId{l}));
  }
  const std::vector<std::vector<std::byte>> all = gather(communicator, mine);
  if (communicator.rank() != RankId{0}) return {};
  RoutesUsed routes({micro_steps, static_cast<std::size_t>(shape.ranks), layers});
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::span<const std::byte> rest = all[r];
    for (std::size_t m = 0; m < micro_steps; ++m) {
      for (std::size_t l = 0; l < layers; ++l) routes(m, r, l) = take_sized<ExpertId>(rest);
    }
  }
  return routes;
}

ResultDigest digest_result(const MoeModel& model, const ResultShape& shape, Communicator& communicator) {
  const Kinds kinds = kinds_of(model, shape);
  ResultDigest digest;
  digest.outputs = digest_kind(kinds.output, communicator);
  const std::string inputs = digest_kind(kinds.input_gradient, communicator);
  const std::string experts = digest_kind(kinds.expert_gradient, communicator);
  const std::string routers = digest_kind(kinds.router_gradient, communicator);
  digest.all = digest_of({digest.outputs, inputs, experts, routers});
  return digest;
}

std::string digest_weights(const MoeModel& model, const ResultShape& shape, Communicator& communicator) {
  const Kinds kinds = kinds_of(model, shape);
  const std::string experts = digest_kind(kinds.expert_weights, communicator);
  const std::string routers = digest_kind(kinds.router_weights, communicator);
  return digest_of({experts, routers});
}

Spread imbalance(ArrayView<const std::int64_t, 2> rows) {
  std::vector<double> samples;
  for (std::size_t t = 0; t < rows.extent(0); ++t) {
    const std::span<const std::int64_t> of_turn = rows.row(t);
    const auto total = std::accumulate(of_turn.begin(), of_turn.end(), std::int64_t{0});
    if (total == 0) continue;
    samples.push_back(static_cast<double>(std::ranges::max(of_turn)) * static_cast<double>(of_turn.size()) /
                      static_cast<double>(total));
  }
  return spread_of(std::move(samples), 1);
}

Array<std::int64_t, 2> planned_rows(const StepPlan& plan, const TurnOrder& order) {
  Array<std::int64_t, 2> rows({order.turns.size(), static_cast<std::size_t>(plan.num_ranks())});
  for (std::size_t t = 0; t < order.turns.size(); ++t) {
    const Turn& turn = order.turns[t];
    for (int r = 0; r < plan.num_ranks(); ++r) {
      for (const Tokens quota : plan.slot_tokens.row(turn.event, turn.layer, r)) rows(t, r) += quota.value;
    }
  }
  return rows;
}

Array<double, 2> least_compute_seconds(const TurnTable& turns) {
  Array<double, 2> least(turns.rows.shape(), std::numeric_limits<double>::infinity());
  for (std::size_t i = 0; i < turns.compute_seconds.extent(0); ++i) {
    const auto of_repeat = turns.compute_seconds.view()[i];
    std::ranges::transform(least.flat(), of_repeat.flat(), least.flat().begin(),
                           [](double a, double b) { return std::min(a, b); });
  }
  return least;
}

std::int64_t critical_path_rows(const TurnTable& turns) {
  std::int64_t rows = 0;
  for (std::size_t t = 0; t < turns.rows.extent(0); ++t) rows += std::ranges::max(turns.rows.row(t));
  return rows;
}

double compute_seconds_total(const TurnTable& turns) {
  const Array<double, 2> least = least_compute_seconds(turns);
  const auto all = least.flat();
  return std::accumulate(all.begin(), all.end(), 0.0);
}

}  // namespace foremoe
