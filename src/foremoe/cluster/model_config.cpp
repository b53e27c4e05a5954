#include "foremoe/cluster/model_config.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <sstream>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

using nlohmann::json;

constexpr std::uintmax_t kMaxFileBytes = 1 << 20;
constexpr std::int64_t kMost = 1 << 24;  // of any count or width

class ConfigReader {
 public:
  ConfigReader(const json& config, const std::string& file) : config_{config}, file_{file} {}

  ModelShape read() const {
    ModelShape shape;
    shape.experts = required({"n_routed_experts", "num_experts", "num_local_experts"});
    shape.top_k = required({"num_experts_per_tok"});
    shape.hidden = required({"hidden_size"});
    shape.intermediate = required({"moe_intermediate_size", "intermediate_size"});
    shape.vocabulary = required({"vocab_size"});
    read_layers(shape);
    read_shared_experts(shape);
    read_attention(shape);
    if (shape.top_k > shape.experts) fail("num_experts_per_tok", "is more than the experts there are");
    return shape;
  }

 private:
  [[noreturn]] void fail(std::string_view key, const std::string& what) const {
    throw InputError({.file = file_, .field = std::string(key), .index = {}}, what);
  }

  // Of the first key that is there and not null; 0 where none is.
  int optional(std::initializer_list<const char*> keys, std::int64_t least = 0) const {
    for (const char* const key : keys) {
      const auto found = config_.find(key);
      if (found == config_.end() || found->is_null()) continue;
      if (!found->is_number_integer()) fail(key, "must be a whole number");
      const auto value = found->get<std::int64_t>();
      if (value < least || value > kMost) fail(key, fmt::format("{} is not between {} and {}", value, least, kMost));
      return static_cast<int>(value);
    }
    return 0;
  }

  int required(std::initializer_list<const char*> keys) const {
    const int value = optional(keys, 1);
    if (value == 0) fail(*keys.begin(), "is missing");
    return value;
  }

  // DeepSeek's first layers are dense; Qwen lists those that are.
  void read_layers(ModelShape& shape) const {
    const int layers = required({"num_hidden_layers"});
    for (const char* const key : {"moe_layer_freq", "decoder_sparse_step"}) {
      if (optional({key}) > 1) fail(key, "above 1, dense layers between MoE layers, is not understood");
    }
    shape.dense_layers = optional({"first_k_dense_replace"});
    const auto listed = config_.find("mlp_only_layers");
    if (listed != config_.end() && listed->is_array()) shape.dense_layers += static_cast<int>(listed->size());
    if (shape.dense_layers >= layers) fail("num_hidden_layers", "leaves no MoE layer");
    shape.moe_layers = layers - shape.dense_layers;
    if (shape.dense_layers > 0) shape.dense_intermediate = required({"intermediate_size"});
  }

  void read_shared_experts(ModelShape& shape) const {
    shape.shared_experts = optional({"n_shared_experts"});
    const int width = optional({"shared_expert_intermediate_size"});
    if (width == 0) return;
    if (width % shape.intermediate != 0) {
      fail("shared_expert_intermediate_size",
           fmt::format("{} is no multiple of moe_intermediate_size, {}", width, shape.intermediate));
    }
    shape.shared_experts = width / shape.intermediate;
  }

  void read_attention(ModelShape& shape) const {
    AttentionShape& a = shape.attention;
    a.heads = required({"num_attention_heads"});
    a.kv_rank = optional({"kv_lora_rank"});
    if (a.kv_rank > 0) {
      a.kv_heads = a.heads;
      a.query_rank = optional({"q_lora_rank"});
      a.rotary_width = required({"qk_rope_head_dim"});
      a.key_width = required({"qk_nope_head_dim"}) + a.rotary_width;
      a.value_width = required({"v_head_dim"});
      return;
    }
    a.kv_heads = optional({"num_key_value_heads", "num_attention_heads"}, 1);
    a.key_width = optional({"head_dim"}, 1);
    if (a.key_width == 0) a.key_width = shape.hidden / a.heads;
    if (a.key_width == 0) fail("num_attention_heads", "is more than hidden_size");
    a.value_width = a.key_width;
  }

  const json& config_;
  const std::string& file_;
};

std::string name_of(const std::string& path) {
  const std::filesystem::path p = std::filesystem::absolute(path).lexically_normal();
  return p.filename() == "config.json" ? p.parent_path().filename().string() : p.stem().string();
}

}  // namespace

ModelShape parse_model_config(std::string_view text, const std::string& file) {
  const json config = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) throw InputError({.file = file, .field = {}, .index = {}}, "is no JSON object");
  const auto inner = config.find("text_config");
  const bool multimodal = inner != config.end() && inner->is_object();
  ModelShape shape = ConfigReader(multimodal ? *inner : config, file).read();
  shape.name = name_of(file);
  return shape;
}

ModelShape read_model_config(const std::string& path) {
  std::error_code error;
  const Where where{.file = path, .field = {}, .index = {}};
  if (!std::filesystem::is_regular_file(path, error)) throw InputError(where, "is no file that can be read");
  if (std::filesystem::file_size(path, error) > kMaxFileBytes)
    throw InputError(where, "is too large for a config.json");
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  if (!in) throw InputError(where, "cannot be read");
  return parse_model_config(text.str(), path);
}

}  // namespace foremoe
