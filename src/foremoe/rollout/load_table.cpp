#include "foremoe/rollout/load_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "foremoe/core/error.h"
#include "foremoe/core/sha256.h"
#include "foremoe/rollout/file_kind.h"

namespace foremoe {

void LoadTable::expert_loads(MicroStepId m, LayerId l, std::span<std::int64_t> out) const {
  if (out.size() != load.extent(3)) throw InputError({.field = "out"}, fmt::format("has {} entries", out.size()));
  std::ranges::fill(out, 0);
  for (std::size_t r = 0; r < load.extent(2); ++r) {
    const std::span<const Tokens> row = load.row(m, l, r);
    for (std::size_t e = 0; e < out.size(); ++e) out[e] += row[e].value;
  }
}

RankId LoadTable::contiguous_home(LayerId l, ExpertId e) const {
  const int experts = experts_in(l);
  const bool exists = e.value < experts;
  const int of_rank = (exists ? experts : num_experts() - experts) / num_ranks();
  return RankId{(exists ? e.value : e.value - experts) / std::max(of_rank, 1)};
}

static void expect_shape(const std::array<std::size_t, 4>& shape, const std::string& file) {
  const auto refuse = [&](const char* what) {
    throw InputError({.file = file, .field = "load"}, fmt::format("shape [{}] is {}", fmt::join(shape, ", "), what));
  };
  if (std::ranges::find(shape, std::size_t{0}) != shape.end()) refuse("empty");
  std::size_t room = kMaxLoadCells;  // cells left under the limit
  for (const std::size_t extent : shape) room /= extent;
  if (room == 0 || shape[2] > kMaxRanks || shape[3] > kMaxExperts) refuse("beyond the limits");
}

void expect_load_shape(const std::array<std::size_t, 4>& shape, const std::string& file) {
  expect_memory(bytes_of<Tokens>(shape), {.file = file, .field = "load"});
  expect_shape(shape, file);
}

// (token, layer) pairs.
static std::int64_t rows_of(const LoadTable& table) {
  std::int64_t tokens = 0;
  for (const Tokens of_rank : table.tokens.flat()) tokens += of_rank.value;
  return tokens * table.num_layers();
}

static void expect_tokens(const LoadTable& table, const std::string& file) {
  const std::size_t ranks = table.load.extent(2);
  if (table.tokens.size() > 0 && table.tokens.shape() != std::array{table.load.extent(0), ranks}) {
    throw InputError({.file = file, .field = "tokens"}, "differs from the load in micro-steps or ranks");
  }
  std::int64_t left = kMaxTokensPerLayer;
  for (std::size_t i = 0; i < table.tokens.size(); ++i) {
    const std::int64_t tokens = table.tokens.flat()[i].value;
    if (tokens < 0 || tokens > left) {
      throw InputError({.file = file, .field = "tokens", .index = fmt::format("[{}, {}]", i / ranks, i % ranks)},
                       fmt::format("{}, expected 0 to {}", tokens, left));
    }
    left -= tokens;
  }
  if (table.missing_rows < 0 || table.missing_rows > rows_of(table)) {
    throw InputError({.file = file, .field = "missing_rows"},
                     fmt::format("{}, but there are {} rows", table.missing_rows, rows_of(table)));
  }
}

// Whether all values are at least 0, and so small that their sum is below the limit. Much faster than the sum.
static bool are_small(std::span<const Tokens> values) {
  std::uint64_t bits = 0;  // of any value; negative values have the highest
  for (const Tokens t : values) bits |= static_cast<std::uint64_t>(t.value);
  return bits < static_cast<std::uint64_t>(kMaxTokensPerLayer) / values.size();
}

// Throws InputError unless every rank has tokens enough for its assignments. Requires valid values.
static void expect_enough_tokens(const LoadTable& table, const std::string& file) {
  for (int m = 0; m < table.num_micro_steps() && table.tokens.size() > 0; ++m) {
    for (int l = 0; l < table.num_layers(); ++l) {
      for (int r = 0; r < table.num_ranks(); ++r) {
        std::int64_t assignments = 0;
        for (const Tokens tokens : table.load.row(m, l, r)) assignments += tokens.value;
        const std::int64_t tokens = table.tokens(m, r).value;
        if (assignments <= tokens * table.top_k_in(LayerId{l})) continue;
        throw InputError({.file = file, .field = "tokens", .index = fmt::format("[{}, {}]", m, r)},
                         fmt::format("{}, but layer {} has {} assignments at top-{}", tokens, l, assignments,
                                     table.top_k_in(LayerId{l})));
      }
    }
  }
}

void expect_valid(const LoadTable& table, const std::string& file) {
  expect_shape(table.load.shape(), file);
  const auto expect = [&](const char* field, int value, std::int64_t most) {
    if (value >= 1 && value <= most) return;
    throw InputError({.file = file, .field = field}, fmt::format("{}, expected 1 to {}", value, most));
  };
  expect("top_k", table.top_k, table.num_experts());
  expect("ranks_per_node", table.ranks_per_node, kMaxRanks);
  expect_layers({.layers = table.load.extent(1),
                 .experts = table.num_experts(),
                 .top_k = table.top_k,
                 .experts_of_layer = table.experts_of_layer,
                 .top_k_of_layer = table.top_k_of_layer},
                file);
  expect_tokens(table, file);
  for (std::size_t m = 0; m < table.load.extent(0); ++m) {
    for (std::size_t l = 0; l < table.load.extent(1); ++l) {
      const std::span<const Tokens> values = table.load[m][l].flat();
      if (table.experts_of_layer.empty() && are_small(values)) continue;
      std::int64_t total = 0;
      const auto fail = [&](std::size_t i, const std::string& what) {
        const std::string index =
            fmt::format("[{}, {}, {}, {}]", m, l, i / table.load.extent(3), i % table.load.extent(3));
        throw InputError({.file = file, .field = "load", .index = index}, what);
      };
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::int64_t tokens = values[i].value;
        if (tokens < 0) fail(i, fmt::format("{} tokens, expected 0 or more", tokens));
        if (const int experts = table.experts_in(LayerId{l});
            tokens > 0 && i % table.load.extent(3) >= std::size_t(experts)) {
          fail(i, fmt::format("{} tokens, but this layer has only {} experts", tokens, experts));
        }
        if (tokens > kMaxTokensPerLayer - total) {
          fail(i, fmt::format("takes the layer's load of this micro-step above {}", kMaxTokensPerLayer));
        }
        total += tokens;
      }
    }
  }
  expect_enough_tokens(table, file);
}

// A table of zeros with this shape. The other fields are those of `table`, except for missing_rows.
static LoadTable empty_part(const LoadTable& table, const std::array<std::size_t, 4>& shape) {
  LoadTable part{.load = Array<Tokens, 4>(shape),
                 .top_k = table.top_k,
                 .ranks_per_node = std::min(table.ranks_per_node, static_cast<int>(shape[2])),
                 .name = table.name,
                 .experts_of_layer = table.experts_of_layer,
                 .top_k_of_layer = table.top_k_of_layer};
  if (!part.experts_of_layer.empty()) part.experts_of_layer.resize(shape[1]);
  if (!part.top_k_of_layer.empty()) part.top_k_of_layer.resize(shape[1]);
  if (table.tokens.size() > 0) part.tokens = Array<Tokens, 2>({shape[0], shape[2]});
  return part;
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
  LoadTable folded = empty_part(table, shape);
  folded.missing_rows = table.missing_rows;
  for (std::size_t i = 0; i < table.tokens.size(); ++i) folded.tokens.flat()[i / sources] += table.tokens.flat()[i];
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

// Rows with a route if each has the top-k of its layer.
static std::int64_t full_rows(const LoadTable& table) {
  std::int64_t rows = 0;
  for (int l = 0; l < table.num_layers(); ++l) {
    std::int64_t assignments = 0;
    for (int m = 0; m < table.num_micro_steps(); ++m) {
      for (const Tokens tokens : table.load[m][l].flat()) assignments += tokens.value;
    }
    rows += assignments / table.top_k_in(LayerId{l});
  }
  return rows;
}

bool has_short_rows(const LoadTable& table) {
  return table.tokens.size() > 0 && full_rows(table) < rows_of(table) - table.missing_rows;
}

Array<Tokens, 2> tokens_of_ranks(const LoadTable& table) {
  return table.tokens.size() > 0 ? table.tokens : tokens_of_fullest_layers(table);
}

Array<Tokens, 2> tokens_of_fullest_layers(const LoadTable& table) {
  Array<Tokens, 2> tokens({table.load.extent(0), table.load.extent(2)});
  for (int m = 0; m < table.num_micro_steps(); ++m) {
    for (int l = 0; l < table.num_layers(); ++l) {
      const std::int64_t top_k = table.top_k_in(LayerId{l});
      for (int r = 0; r < table.num_ranks(); ++r) {
        std::int64_t assignments = 0;
        for (const Tokens of_expert : table.load.row(m, l, r)) assignments += of_expert.value;
        tokens(m, r) = std::max(tokens(m, r), Tokens{(assignments + top_k - 1) / top_k});
      }
    }
  }
  return tokens;
}

// Sets missing_rows of a part of `whole`: exactly, or in proportion if rows have fewer experts than top_k.
static void count_missing_rows(const LoadTable& whole, LoadTable& part) {
  if (whole.tokens.size() == 0) return;
  if (has_short_rows(whole)) {
    const double share =
        static_cast<double>(rows_of(part)) / static_cast<double>(std::max(rows_of(whole), std::int64_t{1}));
    part.missing_rows = std::llround(share * static_cast<double>(whole.missing_rows));
  } else {
    part.missing_rows = rows_of(part) - full_rows(part);
  }
}

LoadTable take_ranks(const LoadTable& table, int first, int count) {
  if (first < 0 || count < 1 || count > table.num_ranks() - first) {
    throw InputError({.file = table.name, .field = "load"},
                     fmt::format("has {} ranks, not {} from {}", table.num_ranks(), count, first));
  }
  const auto begin = static_cast<std::size_t>(first);
  auto shape = table.load.shape();
  shape[2] = static_cast<std::size_t>(count);
  LoadTable part = empty_part(table, shape);
  for (std::size_t m = 0; m < shape[0]; ++m) {
    for (std::size_t l = 0; l < shape[1]; ++l) {
      std::ranges::copy(table.load[m][l].flat().subspan(begin * shape[3], shape[2] * shape[3]), part.load[m][l].data());
    }
  }
  for (std::size_t m = 0; m < part.tokens.extent(0); ++m) {
    std::ranges::copy(table.tokens.row(m).subspan(begin, shape[2]), part.tokens.row(m).begin());
  }
  count_missing_rows(table, part);
  return part;
}

LoadTable take_first(const LoadTable& table, int num_micro_steps, int num_layers) {
  auto shape = table.load.shape();
  shape[0] = std::min(shape[0], static_cast<std::size_t>(std::max(num_micro_steps, 0)));
  shape[1] = std::min(shape[1], static_cast<std::size_t>(std::max(num_layers, 0)));
  LoadTable first = empty_part(table, shape);
  for (std::size_t m = 0; m < shape[0]; ++m) {
    std::ranges::copy(table.load[m].flat().first(shape[1] * shape[2] * shape[3]), first.load[m].data());
  }
  std::ranges::copy(table.tokens.flat().first(first.tokens.size()), first.tokens.flat().begin());
  count_missing_rows(table, first);
  return first;
}

LoadTable take_layers(const LoadTable& table, int first, int count) {
  auto shape = table.load.shape();
  shape[1] = static_cast<std::size_t>(count);
  LoadTable part = empty_part(table, shape);
  for (auto [from, to] :
       {std::pair{&table.experts_of_layer, &part.experts_of_layer}, {&table.top_k_of_layer, &part.top_k_of_layer}}) {
    if (!from->empty()) std::copy_n(from->begin() + first, count, to->begin());
  }
  for (std::size_t m = 0; m < shape[0]; ++m) {
    for (std::size_t l = 0; l < shape[1]; ++l) {
      std::ranges::copy(table.load[m][l + static_cast<std::size_t>(first)].flat(), part.load[m][l].data());
    }
  }
  part.tokens = table.tokens;
  count_missing_rows(table, part);
  return part;
}

LoadTable in_more_micro_steps(const LoadTable& table, int factor) {
  const auto [micro_steps, layers, ranks, experts] = table.load.shape();
  const std::size_t parts = static_cast<std::size_t>(factor);
  LoadTable longer = empty_part(table, {micro_steps * parts, layers, ranks / parts, experts});
  longer.missing_rows = table.missing_rows;
  const std::size_t cells = ranks / parts * experts;
  for (std::size_t m = 0; m < longer.load.extent(0); ++m) {
    for (std::size_t l = 0; l < layers; ++l) {
      std::ranges::copy(table.load[m / parts][l].flat().subspan(m % parts * cells, cells), longer.load[m][l].data());
    }
  }
  std::ranges::copy(table.tokens.flat(), longer.tokens.flat().begin());  // the order is the same
  return longer;
}

// Tokens are 64-bit and the machine little-endian (units.h, safetensors.h), so memory is already in digest order.
std::string load_digest(const LoadTable& table) { return sha256_hex(std::as_bytes(table.load.flat())); }

}  // namespace foremoe
