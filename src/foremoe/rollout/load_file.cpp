#include "foremoe/rollout/load_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <utility>
#include <vector>

#include "foremoe/rollout/file_kind.h"

namespace foremoe {

namespace {

template <class T>
void write_as(const LoadTable& table, const std::string& path, const Metadata& metadata) {
  expect_memory(bytes_of<T>(table.load.shape()), {.file = path});
  std::vector<T> values(table.load.size());
  std::ranges::transform(table.load.flat(), values.begin(), [](Tokens t) { return static_cast<T>(t.value); });
  const auto& shape = table.load.shape();
  std::vector<TensorData> tensors{tensor_data("load", std::span<const T>(values), {shape.begin(), shape.end()})};
  static_assert(sizeof(Tokens) == sizeof(std::int64_t));
  const auto* const tokens = reinterpret_cast<const std::int64_t*>(table.tokens.flat().data());
  if (table.tokens.size() > 0) {
    tensors.push_back(tensor_data("tokens", std::span(tokens, table.tokens.size()), {shape[0], shape[2]}));
  }
  write_safetensors(path, std::move(tensors), metadata);
}

}  // namespace

LoadTable read_load(const Safetensors& file) {
  expect_format(file, kLoadFormat, kLoadFormat2);
  const TensorView& load = file.tensor("load", {DType::kU16, DType::kU32, DType::kI32, DType::kI64}, 4);
  const std::array<std::size_t, 4> shape{load.shape[0], load.shape[1], load.shape[2], load.shape[3]};
  expect_load_shape(shape, file.name());
  const auto experts = static_cast<std::int64_t>(load.shape[3]);
  const auto ranks = static_cast<int>(load.shape[2]);
  file.integer("num_experts", experts, experts);
  LoadTable table;
  table.top_k = static_cast<int>(file.integer("top_k", 1, experts));
  table.ranks_per_node = std::min(ranks, static_cast<int>(file.integer("ranks_per_node", 1, kMaxRanks)));
  table.name = file.text_or("name", std::filesystem::path(file.name()).stem().string());
  table.load = Array<Tokens, 4>(shape);
  load.copy_to(table.load.flat());
  table.experts_of_layer = read_per_layer(file, "experts_of_layer", shape[1], 1);
  table.top_k_of_layer = read_per_layer(file, "top_k_of_layer", shape[1], 1);
  if (file.has("tokens")) {
    table.tokens = Array<Tokens, 2>({shape[0], shape[2]});
    file.tensor("tokens", {DType::kI64}, std::vector{shape[0], shape[2]}).copy_to(table.tokens.flat());
  }
  if (file.metadata().contains("missing_rows")) {
    table.missing_rows = file.integer("missing_rows", 0, std::numeric_limits<std::int64_t>::max());
  }
  expect_valid(table, file.name());
  return table;
}

LoadTable read_load(const std::string& path) { return read_load(open_input(path)); }

void write_load(const LoadTable& table, const std::string& path, const Metadata& extra) {
  const bool is_new = !table.experts_of_layer.empty() || !table.top_k_of_layer.empty() || has_short_rows(table);
  Metadata metadata{{"format", std::string(is_new ? kLoadFormat2 : kLoadFormat)},
                    {"num_experts", fmt::to_string(table.num_experts())},
                    {"top_k", fmt::to_string(table.top_k)},
                    {"ranks_per_node", fmt::to_string(table.ranks_per_node)}};
  if (!table.name.empty()) metadata.emplace("name", table.name);
  if (table.tokens.size() > 0) metadata.emplace("missing_rows", fmt::to_string(table.missing_rows));
  add_per_layer(metadata, "experts_of_layer", table.experts_of_layer);
  add_per_layer(metadata, "top_k_of_layer", table.top_k_of_layer);
  metadata.insert(extra.begin(), extra.end());
  const auto values = table.load.flat();
  const std::int64_t largest = values.empty() ? 0 : std::ranges::max(values).value;
  if (largest <= std::numeric_limits<std::uint16_t>::max()) {
    write_as<std::uint16_t>(table, path, metadata);
  } else if (largest <= std::numeric_limits<std::uint32_t>::max()) {
    write_as<std::uint32_t>(table, path, metadata);
  } else {
    write_as<std::int64_t>(table, path, metadata);
  }
}

}  // namespace foremoe
