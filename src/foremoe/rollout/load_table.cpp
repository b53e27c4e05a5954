#include "foremoe/rollout/load_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>

#include "foremoe/core/error.h"
#include "foremoe/core/sha256.h"
#include "foremoe/rollout/file_kind.h"

namespace foremoe {

void LoadTable::expert_loads(MicroStepId m, LayerId l, std::span<std::int64_t> out) const {
  assert(out.size() == load.extent(3));
  std::ranges::fill(out, 0);
  for (std::size_t r = 0; r < load.extent(2); ++r) {
    const std::span<const Tokens> row = load.row(m, l, r);
    for (std::size_t e = 0; e < out.size(); ++e) out[e] += row[e].value;
  }
}

void expect_load_shape(const std::array<std::size_t, 4>& shape, const std::string& file) {
  const auto refuse = [&](const char* what) {
    throw InputError({.file = file, .field = "load"}, fmt::format("shape [{}] is {}", fmt::join(shape, ", "), what));
  };
  if (std::ranges::find(shape, std::size_t{0}) != shape.end()) refuse("empty");
  std::size_t room = kMaxLoadCells;  // cells left under the limit
  for (const std::size_t extent : shape) room /= extent;
  if (room == 0 || shape[2] > kMaxRanks || shape[3] > kMaxExperts) refuse("exceeds the limits");
}

void expect_valid(const LoadTable& table, const std::string& file) {
  expect_load_shape(table.load.shape(), file);
  const auto expect = [&](const char* field, int value, std::int64_t most) {
    if (value >= 1 && value <= most) return;
    throw InputError({.file = file, .field = field}, fmt::format("{}, expected 1 to {}", value, most));
  };
  expect("top_k", table.top_k, table.num_experts());
  expect("ranks_per_node", table.ranks_per_node, kMaxRanks);
  for (std::size_t m = 0; m < table.load.extent(0); ++m) {
    for (std::size_t l = 0; l < table.load.extent(1); ++l) {
      const std::span<const Tokens> values = table.load[m][l].flat();
      std::int64_t total = 0;
      const auto fail = [&](std::size_t i, const std::string& what) {
        const std::string index =
            fmt::format("[{}, {}, {}, {}]", m, l, i / table.load.extent(3), i % table.load.extent(3));
        throw InputError({.file = file, .field = "load", .index = index}, what);
      };
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::int64_t tokens = values[i].value;
        if (tokens < 0) fail(i, fmt::format("{} tokens, expected 0 or more", tokens));
        if (tokens > kMaxTokensPerLayer - total) {
          fail(i, fmt::format("takes the layer's load of this micro-step above {}", kMaxTokensPerLayer));
        }
        total += tokens;
      }
    }
  }
}

LoadTable fold_ranks(const LoadTable& table, int num_ranks) {
  if (num_ranks < 1 || table.num_ranks() % num_ranks != 0) {
    throw InputError(
        {.file = table.name, .field = "load"},
        fmt::format("{} ranks cannot be folded to {}, which does not divide them", table.num_ranks(), num_ranks));
  }
  const std::size_t sources = table.load.extent(2) / static_cast<std::size_t>(num_ranks);  // sources merged per rank
  auto shape = table.load.shape();
  shape[2] = static_cast<std::size_t>(num_ranks);
  LoadTable folded{.load = Array<Tokens, 4>(shape),
                   .top_k = table.top_k,
                   .ranks_per_node = std::min(table.ranks_per_node, num_ranks),
                   .name = table.name};
  for (std::size_t m = 0; m < shape[0]; ++m) {
    for (std::size_t l = 0; l < shape[1]; ++l) {
      for (std::size_t r = 0; r < table.load.extent(2); ++r) {
        const std::span<const Tokens> from = table.load.row(m, l, r);
        const std::span<Tokens> to = folded.load.row(m, l, r / sources);
        for (std::size_t e = 0; e < to.size(); ++e) to[e] += from[e];
      }
    }
  }
  return folded;
}

LoadTable take_first(const LoadTable& table, int num_micro_steps, int num_layers) {
  auto shape = table.load.shape();
  shape[0] = std::min(shape[0], static_cast<std::size_t>(std::max(num_micro_steps, 0)));
  shape[1] = std::min(shape[1], static_cast<std::size_t>(std::max(num_layers, 0)));
  LoadTable first{.load = Array<Tokens, 4>(shape),
                  .top_k = table.top_k,
                  .ranks_per_node = table.ranks_per_node,
                  .name = table.name};
  for (std::size_t m = 0; m < shape[0]; ++m) {
    std::ranges::copy(table.load[m].flat().first(shape[1] * shape[2] * shape[3]), first.load[m].data());
  }
  return first;
}

// Tokens are 64-bit and the machine little-endian (units.h, safetensors.h), so memory is already in digest order.
std::string load_digest(const LoadTable& table) { return sha256_hex(std::as_bytes(table.load.flat())); }

}  // namespace foremoe
