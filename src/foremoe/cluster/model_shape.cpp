#include "foremoe/cluster/model_shape.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace foremoe {

std::span<const ModelShape> model_shapes() {
  static const std::array<ModelShape, 6> kShapes{{
      // huggingface.co/Qwen/Qwen3-30B-A3B config.json: num_hidden_layers 48, moe_intermediate_size 768
      {.name = "Qwen3-30B-A3B", .moe_layers = 48, .experts = 128, .top_k = 8, .hidden = 2048, .intermediate = 768},
      // huggingface.co/Qwen/Qwen3-235B-A22B config.json: num_hidden_layers 94, moe_intermediate_size 1536
      {.name = "Qwen3-235B-A22B", .moe_layers = 94, .experts = 128, .top_k = 8, .hidden = 4096, .intermediate = 1536},
      // huggingface.co/deepseek-ai/DeepSeek-V3 config.json: num_hidden_layers 61, first_k_dense_replace 3
      {.name = "DeepSeek-V3",
       .moe_layers = 58,
       .dense_layers = 3,
       .experts = 256,
       .top_k = 8,
       .shared_experts = 1,
       .hidden = 7168,
       .intermediate = 2048},
      // huggingface.co/zai-org/GLM-4.5-Air config.json: num_hidden_layers 46, first_k_dense_replace 1
      {.name = "GLM-4.5-Air",
       .moe_layers = 45,
       .dense_layers = 1,
       .experts = 128,
       .top_k = 8,
       .shared_experts = 1,
       .hidden = 4096,
       .intermediate = 1408},
      // huggingface.co/moonshotai/Kimi-K2-Instruct config.json: num_hidden_layers 61, first_k_dense_replace 1
      {.name = "Kimi-K2",
       .moe_layers = 60,
       .dense_layers = 1,
       .experts = 384,
       .top_k = 8,
       .shared_experts = 1,
       .hidden = 7168,
       .intermediate = 2048},
      // huggingface.co/mistralai/Mixtral-8x7B-v0.1 config.json: num_hidden_layers 32, intermediate_size 14336
      {.name = "Mixtral-8x7B", .moe_layers = 32, .experts = 8, .top_k = 2, .hidden = 4096, .intermediate = 14336},
  }};
  return kShapes;
}

std::optional<ModelShape> find_model_shape(std::string_view name) {
  const auto same = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
  };
  const auto shapes = model_shapes();
  const auto found = std::find_if(shapes.begin(), shapes.end(), [&](const ModelShape& shape) {
    return std::equal(name.begin(), name.end(), shape.name.begin(), shape.name.end(), same);
  });
  return found == shapes.end() ? std::nullopt : std::optional(*found);
}

}  // namespace foremoe
