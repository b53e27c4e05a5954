#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"
#include "foremoe/core/mapped_file.h"

namespace foremoe {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxConfigBytes = 1 << 20;
constexpr std::int64_t kMost = 1 << 24;  // upper bound of every count and width

// How a family of models specifies its MoE layers.
enum class MoeLayers : std::uint8_t {
  kAll,
  kAfterFirst,  // after the first first_k_dense_replace layers, which are dense
  kSparseStep,  // every decoder_sparse_step-th layer, except mlp_only_layers
  kInterleaved  // the layers in moe_layers, or without this list every interleave_moe_layer_step-th layer
};

struct Family {
  std::string_view model_type;
  const char* experts;             // key of the number of routed experts
  const char* intermediate;        // key of the width inside one routed expert
  const char* dense_intermediate;  // key of the width inside a dense layer's feed-forward block
  MoeLayers moe_layers;
};

constexpr auto kFamilies = std::to_array<Family>({
    {"mixtral", "num_local_experts", "intermediate_size", "intermediate_size", MoeLayers::kAll},
    {"phimoe", "num_local_experts", "intermediate_size", "intermediate_size", MoeLayers::kAll},
    {"olmoe", "num_experts", "intermediate_size", "intermediate_size", MoeLayers::kAll},
    {"qwen2_moe", "num_experts", "moe_intermediate_size", "intermediate_size", MoeLayers::kSparseStep},
    {"qwen3_moe", "num_experts", "moe_intermediate_size", "intermediate_size", MoeLayers::kSparseStep},
    {"qwen3_vl_moe_text", "num_experts", "moe_intermediate_size", "intermediate_size", MoeLayers::kSparseStep},
    {"deepseek_v2", "n_routed_experts", "moe_intermediate_size", "intermediate_size", MoeLayers::kAfterFirst},
    {"deepseek_v3", "n_routed_experts", "moe_intermediate_size", "intermediate_size", MoeLayers::kAfterFirst},
    {"kimi_k2", "n_routed_experts", "moe_intermediate_size", "intermediate_size", MoeLayers::kAfterFirst},
    {"glm4_moe", "n_routed_experts", "moe_intermediate_size", "intermediate_size", MoeLayers::kAfterFirst},
    {"glm4v_moe_text", "n_routed_experts", "moe_intermediate_size", "intermediate_size", MoeLayers::kAfterFirst},
    {"llama4_text", "num_local_experts", "intermediate_size", "intermediate_size_mlp", MoeLayers::kInterleaved},
});

// Keys that indicate a model with experts.
constexpr std::array kExpertKeys{"num_experts",     "num_local_experts", "n_routed_experts",
                                 "moe_num_experts", "num_moe_experts",   "moe_intermediate_size"};

// Keys that change the number of MoE layers or the type of attention, with the families that may have them.
struct LayerKey {
  const char* key;
  MoeLayers understood_by = MoeLayers::kAll;  // kAll: no family
};
constexpr auto kLayerKeys = std::to_array<LayerKey>({
    {"interleave_moe_layer_step", MoeLayers::kInterleaved},
    {"moe_layers", MoeLayers::kInterleaved},
    {"first_k_dense_replace", MoeLayers::kAfterFirst},
    {"decoder_sparse_step", MoeLayers::kSparseStep},
    {"mlp_only_layers", MoeLayers::kSparseStep},
    {"expert_layer_period"},
    {"expert_layer_offset"},
    {"attn_layer_period"},
    {"attn_layer_offset"},
    {"full_attention_interval"},
    {"moe_layer_interval"},
    {"moe_layer_start_index"},
    {"moe_layer_end_index"},
    {"hybrid_override_pattern"},
    {"attn_type_list"},
});

class ConfigReader {
 public:
  ConfigReader(const json& config, const std::string& file) : config_{config}, file_{file}, family_{family()} {}

  ModelShape read() const {
    expect_understood_layers();
    ModelShape shape;
    shape.experts = experts();
    shape.top_k = required({"num_experts_per_tok"});
    shape.hidden = required({"hidden_size"});
    shape.intermediate = required({family_.intermediate});
    shape.vocabulary = required({"vocab_size"});
    const int layers = required({"num_hidden_layers"});
    shape.moe_layers = moe_layers(layers);
    shape.dense_layers = layers - shape.moe_layers;
    if (shape.moe_layers <= 0) fail("num_hidden_layers", "leaves no MoE layer");
    if (shape.dense_layers > 0) shape.dense_intermediate = required({family_.dense_intermediate});
    read_shared_experts(shape);
    read_attention(shape);
    if (shape.top_k > shape.experts) fail("num_experts_per_tok", "is more than the number of experts");
    read_groups(shape);
    return shape;
  }

 private:
  [[noreturn]] void fail(std::string_view key, const std::string& what) const {
    throw InputError({.file = file_, .field = std::string(key)}, what);
  }

  // Null if the key is missing or null.
  const json* find(const char* key) const {
    const auto found = config_.find(key);
    return found == config_.end() || found->is_null() ? nullptr : &*found;
  }

  const Family& family() const {
    const json* const type = find("model_type");
    if (type == nullptr || !type->is_string()) fail("model_type", "is missing");
    const auto& name = type->get_ref<const std::string&>();
    const auto* const found = std::ranges::find(kFamilies, name, &Family::model_type);
    if (found != kFamilies.end()) return *found;
    if (std::ranges::none_of(kExpertKeys, [&](const char* key) { return find(key) != nullptr; })) {
      fail("model_type", fmt::format("'{}' is a dense model: it has no experts", name));
    }
    std::vector<std::string_view> known;
    for (const Family& family : kFamilies) known.push_back(family.model_type);
    fail("model_type", fmt::format("'{}' is not supported; expected one of {}", name, fmt::join(known, ", ")));
  }

  // Returns the value of the first key that is present and not null; 0 if there is none.
  int optional(std::initializer_list<const char*> keys, std::int64_t least = 0) const {
    for (const char* const key : keys) {
      const json* const found = find(key);
      if (found == nullptr) continue;
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

  // Returns the number of experts from any of these keys. All keys that are present must agree.
  int experts() const {
    const std::initializer_list<const char*> keys{family_.experts, "num_experts", "num_local_experts",
                                                  "n_routed_experts"};
    const int value = required(keys);
    for (const char* const key : keys) {
      const int other = optional({key}, 1);
      if (other != 0 && other != value) fail(key, fmt::format("{} experts, but another key says {}", other, value));
    }
    return value;
  }

  void expect_understood_layers() const {
    for (const LayerKey& layer_key : kLayerKeys) {
      const json* const value = find(layer_key.key);
      const bool understood =
          layer_key.understood_by != MoeLayers::kAll && layer_key.understood_by == family_.moe_layers;
      if (value == nullptr || understood || (value->is_array() && value->empty())) continue;
      fail(layer_key.key, fmt::format("is not supported in a {} model", family_.model_type));
    }
    if (optional({"moe_layer_freq"}) > 1) fail("moe_layer_freq", "above 1 is not supported");
    const json* const types = find("layer_types");
    if (types == nullptr) return;
    const bool chunks = family_.moe_layers == MoeLayers::kInterleaved;  // of 8,192 tokens; modelled sequences are short
    for (const json& type : *types) {
      if (type == "full_attention" || (chunks && type == "chunked_attention")) continue;
      fail("layer_types", fmt::format("{} is not supported; expected \"full_attention\"", type.dump()));
    }
  }

  // Counts the distinct layers in [0, layers) that a list contains.
  int num_listed(const char* key, int layers) const {
    const json& list = *find(key);
    if (!list.is_array()) fail(key, "must be a list of layers");
    std::vector<bool> listed(static_cast<std::size_t>(layers));
    for (const json& layer : list) {
      if (!layer.is_number_unsigned() || layer.get<std::uint64_t>() >= listed.size()) {
        fail(key, fmt::format("{} is not a layer from 0 to {}", layer.dump(), layers - 1));
      }
      listed[layer.get<std::size_t>()] = true;
    }
    return static_cast<int>(std::ranges::count(listed, true));
  }

  int moe_layers(int layers) const {
    switch (family_.moe_layers) {
      case MoeLayers::kAll:
        return layers;
      case MoeLayers::kAfterFirst:
        return layers - optional({"first_k_dense_replace"});
      case MoeLayers::kInterleaved:
        if (find("moe_layers") != nullptr) return num_listed("moe_layers", layers);
        return layers / std::max(1, optional({"interleave_moe_layer_step"}, 1));
      case MoeLayers::kSparseStep:
        break;
    }
    const int step = std::max(1, optional({"decoder_sparse_step"}, 1));
    if (find("mlp_only_layers") == nullptr) return layers / step;
    const int listed = num_listed("mlp_only_layers", layers);
    if (listed > 0 && step > 1) fail("mlp_only_layers", "is not supported if decoder_sparse_step is above 1");
    return layers / step - listed;
  }

  void read_groups(ModelShape& shape) const {
    const json* const method = find("topk_method");
    if (method != nullptr && *method == "greedy") return;  // chooses among all experts, regardless of the other keys
    const int count = optional({"n_group"}, 1);
    const int per_token = optional({"topk_group"}, 1);
    if (count <= 1) return;
    if (shape.experts % count != 0) fail("n_group", fmt::format("{} does not divide {} experts", count, shape.experts));
    if (per_token == 0) fail("topk_group", "is missing");
    if (per_token > count) fail("topk_group", fmt::format("{} is more than n_group, {}", per_token, count));
    if (shape.experts / count * per_token < shape.top_k) {
      fail("topk_group", fmt::format("{} groups have fewer experts than a token chooses", per_token));
    }
    shape.groups = {.count = count, .per_token = per_token};
  }

  void read_shared_experts(ModelShape& shape) const {
    if (family_.moe_layers == MoeLayers::kInterleaved) {
      shape.shared_experts = 1;  // Llama 4 has one in every MoE layer, without a key for it
      return;
    }
    shape.shared_experts = optional({"n_shared_experts"});
    const int width = optional({"shared_expert_intermediate_size"});
    if (width == 0) return;
    if (width % shape.intermediate != 0) {
      fail("shared_expert_intermediate_size",
           fmt::format("{} is not a multiple of moe_intermediate_size, {}", width, shape.intermediate));
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
    if (a.heads % a.kv_heads != 0) {
      fail("num_key_value_heads", fmt::format("{} does not divide num_attention_heads, {}", a.kv_heads, a.heads));
    }
    a.key_width = optional({"head_dim"}, 1);
    if (a.key_width == 0) {
      if (shape.hidden % a.heads != 0) {
        fail("num_attention_heads", fmt::format("{} does not divide hidden_size, {}", a.heads, shape.hidden));
      }
      a.key_width = shape.hidden / a.heads;
    }
    a.value_width = a.key_width;
  }

  const json& config_;
  const std::string& file_;
  const Family& family_;
};

std::string name_of(const std::string& path) {
  const std::filesystem::path p = std::filesystem::absolute(path).lexically_normal();
  return p.filename() == "config.json" ? p.parent_path().filename().string() : p.stem().string();
}

}  // namespace

ModelShape parse_model_config(std::string_view text, const std::string& file) {
  std::vector<std::set<std::string>> keys;  // of the objects being parsed, outermost first
  const auto refuse_repeated_keys = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      throw InputError({.file = file, .field = value.get<std::string>()}, "appears twice");
    }
    return true;
  };
  const json config = json::parse(text, refuse_repeated_keys, /*allow_exceptions=*/false);
  if (!config.is_object()) throw InputError({.file = file}, "is not a JSON object");
  const auto inner = config.find("text_config");
  const bool multimodal = inner != config.end() && inner->is_object();
  ModelShape shape = ConfigReader(multimodal ? *inner : config, file).read();
  shape.name = name_of(file);
  return shape;
}

ModelShape read_model_config(const std::string& path) {
  const MappedFile file(path);
  if (file.bytes().size() > kMaxConfigBytes) throw InputError({.file = path}, "is too large for a config.json");
  return parse_model_config(file.text(), path);
}

}  // namespace foremoe
