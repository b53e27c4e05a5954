#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "foremoe/cluster/model_formula.h"
#include "foremoe/cluster/model_shape.h"
#include "foremoe/cluster/toml_file.h"
#include "foremoe/core/error.h"
#include "foremoe/core/mapped_file.h"

namespace foremoe {

std::span<const EmbeddedFile> embedded_families();  // data/families, embedded by src/foremoe/CMakeLists.txt

namespace {

constexpr std::size_t kMaxConfigBytes = 64 << 20;  // lists of quantised modules have some megabytes
constexpr std::size_t kMaxModelBytes = 1 << 20;
constexpr double kMost = 1 << 24;  // upper bound of every count and width
constexpr double kMostParameters = 1e15;
constexpr double kMostLayers = 4096;

// Keys of a model file whose values are numbers. Those with a least value of 1 are required.
template <class Shape>
struct NumberKey {
  const char* name;
  int Shape::*member;
  int least;
};
constexpr auto kModelKeys = std::to_array<NumberKey<ModelShape>>({
    {"hidden", &ModelShape::hidden, 1},
    {"intermediate", &ModelShape::intermediate, 1},
    {"vocabulary", &ModelShape::vocabulary, 1},
    {"shared_experts", &ModelShape::shared_experts, 0},
    {"shared_intermediate", &ModelShape::shared_intermediate, 0},
    {"latent", &ModelShape::latent, 0},
    {"expert_matrices", &ModelShape::expert_matrices, 0},
    {"weightless_experts", &ModelShape::weightless_experts, 0},
});
constexpr auto kAttentionKeys = std::to_array<NumberKey<AttentionShape>>({
    {"heads", &AttentionShape::heads, 1},
    {"kv_heads", &AttentionShape::kv_heads, 1},
    {"key_width", &AttentionShape::key_width, 1},
    {"value_width", &AttentionShape::value_width, 1},
    {"query_rank", &AttentionShape::query_rank, 0},
    {"kv_rank", &AttentionShape::kv_rank, 0},
    {"rotary_width", &AttentionShape::rotary_width, 0},
    {"window", &AttentionShape::window, 0},
    {"index_width", &AttentionShape::index_width, 0},
    {"layers", &AttentionShape::layers, 0},
});
constexpr std::string_view kOtherKeys =
    " name moe_layers dense_layers layers layer_kinds experts top_k expert_groups groups_per_token tied_embeddings "
    "automatic other_parameters notes attention dense_intermediate model_types defaults layer_keys when none state ";
constexpr std::array kLayerKinds{"dense", "moe", "hash", "none"};  // in the order of LayerKind

nlohmann::json json_of(const toml::node& node) {
  if (const auto* const text = node.as_string()) return text->get();
  if (const auto* const whole = node.as_integer()) return whole->get();
  if (const auto* const real = node.as_floating_point()) return real->get();
  if (const auto* const yes = node.as_boolean()) return yes->get();
  nlohmann::json list = nlohmann::json::array();
  if (node.is_array()) std::ranges::transform(*node.as_array(), std::back_inserter(list), json_of);
  return node.is_array() ? list : nlohmann::json("a table");
}

bool is_key(std::string_view name) {
  const auto same = [&](const auto& key) { return name == key.name; };
  return std::ranges::any_of(kModelKeys, same) || std::ranges::any_of(kAttentionKeys, same) ||
         kOtherKeys.find(fmt::format(" {} ", name)) != std::string_view::npos;
}

// A config.json and how to read it.
struct Config {
  std::vector<const nlohmann::json*> objects;  // the text model's object, then those around it
  std::string model_type;
  const toml::table& family;
  const toml::table& any;  // any.toml: what the file of a family does not say
};

// Reads the keys of a model file. If `config` is given, the file is a family's, in which texts are formulas.
class ModelReader {
 public:
  ModelReader(const toml::table& root, std::string file, const Config* config = nullptr)
      : root_{root}, file_{std::move(file)}, config_{config} {
    expect_known_keys(root_, "");
  }

  ModelShape read() {
    ModelShape s;
    if (config_ == nullptr) s.name = read_toml_name(root_, file_);
    read_layers(s);
    read_per_layer("experts", s, s.experts, s.experts_of_layer);
    read_per_layer("top_k", s, s.top_k, s.top_k_of_layer);
    read_numbers(root_, kModelKeys, s);
    if (s.dense_layers > 0) s.dense_intermediate = integer(root_, "dense_intermediate", 1);
    if (s.top_k > s.experts + s.weightless_experts) fail("top_k", "is more than the number of experts");
    s.groups = {.count = integer(root_, "expert_groups", 1, 1), .per_token = integer(root_, "groups_per_token", 1, 1)};
    try {
      expect_groups_fit(s.groups, s.experts, std::min(s.top_k, s.experts));
    } catch (const InputError& error) {
      fail(error.where().field, error.problem());
    }
    s.tied = integer(root_, "tied_embeddings", 0, 0) != 0;
    s.automatic = integer(root_, "automatic", 0, 1) != 0;
    s.other_parameters = parameters(root_, "other_parameters");
    read_attention(s);
    if (config_ != nullptr) expect_understood_layers();
    read_notes(s);
    return s;
  }

  nlohmann::json try_number(const char* key) {  // of the model or its first kind of attention; null instead of an error
    try {
      const bool of_model = node_of(root_, key) != nullptr;
      return whole_number(value(of_model ? root_ : *root_.at_path("attention[0]").as_table(), key), {});
    } catch (const InputError&) {
      return {};
    }
  }

 private:
  Where where_of(const std::string& key) const {
    const auto found = where_.find(key);
    return found == where_.end() ? Where{.file = file_, .field = key} : found->second;
  }
  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    throw InputError(where_of(key), what);
  }

  void expect_known_keys(const toml::table& table, const std::string& section) const {
    for (const auto& [key, node] : table) {
      if (is_key(key.str())) continue;
      throw InputError({.file = file_, .field = section + std::string(key.str()), .index = line_of(node)},
                       "is not a key of a model file");
    }
  }

  const toml::node* node_of(const toml::table& table, const std::string& key) const {
    const toml::node* const own = table.get(key);
    if (own != nullptr || config_ == nullptr) return own;
    return (&table == &root_ ? config_->any.at_path(key) : config_->any.at_path("attention[0]." + key)).node();
  }

  // Null if the key is missing. Remembers for where_of() where the value is from.
  nlohmann::json value(const toml::table& table, const std::string& key) {
    const toml::node* const node = node_of(table, key);
    Where& where = where_[key] = {.file = file_, .field = (&table == &root_ ? "" : "attention.") + key};
    if (node == nullptr) return {};
    if (config_ == nullptr) where.index = line_of(*node);
    if (config_ == nullptr || !node->is_string()) return json_of(*node);
    FormulaValue result = formula(**node->as_string());
    if (!result.key.empty()) where.field = result.key;
    return std::move(result.value);
  }

  FormulaValue formula(std::string_view text) {
    FormulaValue result = evaluate_formula(text, file_, [&](const std::string& key) { return find(key); });
    read_.merge(result.keys);
    return result;
  }

  nlohmann::json find(const std::string& key) {
    if (key == "layer") return layer_;
    std::vector<const nlohmann::json*> objects = config_->objects;
    if (key == "tie_word_embeddings") std::ranges::reverse(objects);  // the outer object decides, as in transformers
    for (const nlohmann::json* const object : objects) {
      const auto found = object->find(key);
      if (found != object->end() && !found->is_null()) return *found;
    }
    for (const toml::table* const table : {&config_->family, &config_->any}) {
      const toml::node* const node = table->at_path("defaults." + key).node();
      if (node != nullptr) return node->is_string() ? formula(**node->as_string()).value : json_of(*node);
    }
    return {};
  }

  double number(const std::string& key, double least, double most, const nlohmann::json& found) const {
    const double n = whole_number(found, where_of(key));
    if (n < least || n > most) fail(key, fmt::format("{} is not between {} and {}", n, least, most));
    return n;
  }
  // `otherwise` replaces a missing key.
  double number_in(const toml::table& table, const std::string& key, double least, double most,
                   const nlohmann::json& otherwise) {
    const nlohmann::json found = value(table, key);
    return number(key, least, most, node_of(table, key) == nullptr ? otherwise : found);
  }
  int integer(const toml::table& table, const std::string& key, double least, const nlohmann::json& otherwise = {}) {
    return static_cast<int>(number_in(table, key, least, kMost, otherwise));
  }
  std::int64_t parameters(const toml::table& table, const std::string& key, double least = 0) {
    return static_cast<std::int64_t>(number_in(table, key, least, kMostParameters, 0));
  }
  template <class Keys, class Shape>
  void read_numbers(const toml::table& table, const Keys& keys, Shape& shape) {
    for (const auto& key : keys) {
      const int initial = shape.*key.member;
      shape.*key.member = integer(table, key.name, key.least,
                                  key.least > 0 && initial == 0 ? nlohmann::json() : nlohmann::json(initial));
    }
  }

  void read_layers(ModelShape& s) {
    const toml::node* const kinds = node_of(root_, "layer_kinds");
    if (kinds == nullptr) {
      s.moe_layers = static_cast<int>(number("moe_layers", 1, kMostLayers, value(root_, "moe_layers")));
      s.dense_layers = integer(root_, "dense_layers", 0, 0);
      return;
    }
    const nlohmann::json all = config_ != nullptr ? value(root_, "layers") : json_of(*kinds);
    const auto layers = number("layers", 1, kMostLayers, all.is_array() ? nlohmann::json(all.size()) : all);
    for (int l = 0; l < static_cast<int>(layers); ++l) {
      layer_ = l;
      const nlohmann::json kind = config_ != nullptr ? value(root_, "layer_kinds") : all[static_cast<std::size_t>(l)];
      const auto* const found = std::ranges::find(kLayerKinds, kind);
      if (found == kLayerKinds.end()) {
        fail("layer_kinds",
             fmt::format("{} (layer {}) is not one of {}", kind.dump(), l, fmt::join(kLayerKinds, ", ")));
      }
      s.layer_kinds.push_back(static_cast<LayerKind>(found - kLayerKinds.begin()));
    }
    layer_ = nullptr;
    s.dense_layers = static_cast<int>(std::ranges::count(s.layer_kinds, LayerKind::kDense));
    s.moe_layers = static_cast<int>(s.moe_layer_numbers().size());
    if (s.moe_layers == 0) fail("layers", "leaves no MoE layer");
  }

  void read_per_layer(const std::string& key, const ModelShape& s, int& most, std::vector<int>& of_layer) {
    for (const int l : s.moe_layer_numbers()) {
      layer_ = l;
      nlohmann::json found = value(root_, key);
      if (found.is_array()) {
        if (std::ssize(found) != s.moe_layers) {
          fail(key, fmt::format("has {} values, but there are {} MoE layers", found.size(), s.moe_layers));
        }
        found = nlohmann::json(found[of_layer.size()]);
      }
      of_layer.push_back(static_cast<int>(number(key, 1, kMost, found)));
    }
    layer_ = nullptr;
    most = *std::ranges::max_element(of_layer);
    if (std::ranges::count(of_layer, most) == s.moe_layers) of_layer.clear();
  }

  void read_attention(ModelShape& s) {
    const toml::node* const node = node_of(root_, "attention");
    std::vector<const toml::table*> kinds;
    if (node != nullptr && node->is_table()) kinds.push_back(node->as_table());
    if (node != nullptr && node->is_array()) {
      for (const toml::node& kind : *node->as_array()) {
        if (kind.is_table()) kinds.push_back(kind.as_table());
      }
    }
    if (kinds.empty()) fail("attention", "must be a section, [attention]");
    const std::vector<int> layers = config_ != nullptr ? layers_of(kinds, s.layers()) : std::vector<int>(kinds.size());
    std::vector<AttentionShape> shapes;
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      const toml::table& kind = *kinds[i];
      if (kind.contains("none") || (config_ != nullptr && layers[i] == 0)) continue;
      expect_known_keys(kind, "attention.");
      AttentionShape a{.layers = layers[i] == s.layers() ? 0 : layers[i]};
      a.heads = a.kv_heads = integer(kind, "heads", 1);
      a.key_width = a.value_width = integer(kind, "key_width", 1);
      read_numbers(kind, kAttentionKeys, a);
      a.state = parameters(kind, "state");
      a.other_parameters = parameters(kind, "other_parameters", -kMostParameters);
      if (a.kv_rank == 0 && a.heads % a.kv_heads != 0) {
        fail("kv_heads", fmt::format("{} does not divide {}, {}", a.kv_heads, where_["heads"].field, a.heads));
      }
      if (a.rotary_width >= a.key_width) fail("rotary_width", "leaves nothing of the width of a key");
      if (a.layers == 0 && !shapes.empty()) fail("layers", "is needed for every kind of attention but the first");
      shapes.push_back(a);
    }
    if (shapes.empty()) fail("attention", "is missing");
    s.attention = shapes.front();
    s.other_attention.assign(shapes.begin() + 1, shapes.end());
    int least = 0;
    s.visit_attention([&](const AttentionShape&, int n) { least = std::min(least, n); });
    if (least < 0) fail("layers", fmt::format("is more than the {} layers of the model", s.layers()));
  }

  // [kind], layers whose first section with a true condition it is.
  std::vector<int> layers_of(const std::vector<const toml::table*>& kinds, int layers) {
    std::vector<int> layers_of(kinds.size());
    for (int l = 0; l < layers; ++l) {
      layer_ = l;
      std::string key;
      const auto holds = [&](const toml::table* kind) {
        if (!kind->contains("when")) return true;
        const FormulaValue when = formula(*kind->at_path("when").value<std::string>());
        if (!when.key.empty()) key = when.key;
        return whole_number(when.value, {.file = file_, .field = key}) != 0;
      };
      const auto found = std::ranges::find_if(kinds, holds);
      if (found == kinds.end()) {
        const nlohmann::json types = find("layer_types");
        if (types.is_array()) key = "layer_types";
        fail(key, fmt::format("{} of layer {} is not supported in a {} model",
                              types.is_array() ? types[static_cast<std::size_t>(l)].dump() : "the attention", l,
                              config_->model_type));
      }
      ++layers_of[static_cast<std::size_t>(found - kinds.begin())];
    }
    layer_ = nullptr;
    return layers_of;
  }

  // Refuses keys that change the layers or their attention and that the family's formulas do not read.
  void expect_understood_layers() const {
    for (const toml::node& node : *config_->any.at_path("layer_keys").as_array()) {
      const std::string key = *node.value<std::string>();
      const nlohmann::json& config = *config_->objects.front();
      const auto found = config.find(key);
      if (read_.contains(key) || found == config.end() || found->is_null()) continue;
      if (found->is_array() && found->empty()) continue;
      fail(key, fmt::format("is not supported in a {} model", config_->model_type));
    }
  }

  void read_notes(ModelShape& s) {
    if (config_ == nullptr) {
      const nlohmann::json list = value(root_, "notes");
      for (const nlohmann::json& note : list) {
        if (!note.is_string()) fail("notes", "must be a list of texts");
        s.notes.push_back(note.get<std::string>());
      }
      return;
    }
    for (const toml::table* const table : {&config_->family, &config_->any}) {
      const auto* const notes = table->at_path("notes").as_table();
      if (notes == nullptr) continue;
      for (const auto& [note, condition] : *notes) {
        const FormulaValue holds = formula(*condition.value<std::string>());
        if (whole_number(holds.value, {.file = file_, .field = holds.key}) != 0) s.notes.emplace_back(note.str());
      }
    }
  }

  const toml::table& root_;
  std::string file_;
  const Config* config_;
  nlohmann::json layer_;                // number of the layer that formulas are evaluated for, or null
  std::map<std::string, Where> where_;  // of the values that were read
  std::set<std::string> read_;          // keys of the config.json that formulas contain
};

std::string name_of(const std::string& path) {
  const std::filesystem::path p = std::filesystem::absolute(path).lexically_normal();
  return p.filename() == "config.json" ? p.parent_path().filename().string() : p.stem().string();
}

struct Families {
  std::map<std::string, toml::table> by_type;  // [model_type]
  toml::table any;
};

const Families& families() {
  static const auto& families = *new Families([] {  // never destroyed; see all_systems()
    Families all;
    for (const EmbeddedFile& file : embedded_families()) {
      const toml::table table = parse_toml(file.text, fmt::format("{}.toml", file.name));
      if (file.name == "any") all.any = table;
      if (!table.contains("model_types")) continue;
      for (const nlohmann::json& type : json_of(*table.get("model_types")))
        all.by_type.emplace(type.get<std::string>(), table);
    }
    return all;
  }());
  return families;
}

// The error for an unknown family, with a model file that contains what the config says.
[[noreturn]] void refuse(const Config& config, const std::string& file) {
  ModelReader reader(config.any, file, &config);
  const bool has_experts = !reader.try_number("experts").is_null();
  std::string lines;
  const auto add = [&](const std::string& line) { lines += fmt::format(" '{}'", line); };
  const auto add_number = [&](const char* key, const char* from) {
    const nlohmann::json number = reader.try_number(from);
    add(fmt::format("{} = {}", key, number.is_null() ? "?" : fmt::format("{}", number.get<std::int64_t>())));
  };
  std::string name = name_of(file);
  std::ranges::replace_if(
      name, [](char c) { return c == '\'' || c == '"' || c == '\\'; }, '_');
  add(fmt::format("name = \"{}\"", name));
  add_number("moe_layers", "layers");
  add("dense_layers = 0");
  for (const char* const key : {"experts", "top_k", "hidden", "intermediate", "vocabulary"}) add_number(key, key);
  add("[attention]");
  for (const char* const key : {"heads", "kv_heads", "key_width"}) add_number(key, key);
  throw InputError(
      {.file = file, .field = "model_type"},
      fmt::format(
          "'{}' is not supported{}. Describe the model by hand (docs/users/formats.md lists more keys): correct "
          "and run printf '%s\\n'{} > model.toml, and give model.toml as `model`",
          config.model_type,
          has_experts ? "" : ", and no known key says how many experts it has (a dense model has none)", lines));
}

// Python writes NaN and Infinity. Replaces them by null.
std::string without_infinity(std::string_view text) {
  std::string out;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size();) {
    constexpr std::array<std::string_view, 3> kWords{"-Infinity", "Infinity", "NaN"};
    const auto* const word = std::ranges::find_if(kWords, [&](auto w) { return text.substr(i).starts_with(w); });
    if (!quoted && word != kWords.end()) {
      out += "null";
      i += word->size();
      continue;
    }
    if (text[i] == '"') quoted = !quoted;
    const std::size_t length = quoted && text[i] == '\\' ? 2 : 1;
    out += text.substr(i, length);
    i += length;
  }
  return out;
}

nlohmann::json parse_json(std::string_view text, const std::string& file) {
  std::vector<std::set<std::string>> keys;  // of the objects being parsed, outermost first
  const auto refuse_repeated_keys = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (event == nlohmann::json::parse_event_t::object_start) keys.emplace_back();
    if (event == nlohmann::json::parse_event_t::object_end) keys.pop_back();
    if (event == nlohmann::json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      throw InputError({.file = file, .field = value.get<std::string>()}, "appears twice");
    }
    return true;
  };
  nlohmann::json config =
      nlohmann::json::parse(without_infinity(text), refuse_repeated_keys, /*allow_exceptions=*/false);
  if (config.is_discarded()) throw InputError({.file = file}, "is not JSON");
  if (!config.is_object()) throw InputError({.file = file}, "is not a JSON object");
  return config;
}

// The config and the objects in it that describe its text model, innermost first.
std::vector<const nlohmann::json*> text_configs(const nlohmann::json& config) {
  std::vector<const nlohmann::json*> objects{&config};
  for (bool deeper = true; deeper;) {
    deeper = false;
    for (const char* const key : {"thinker_config", "llm_config", "language_config", "text_config"}) {
      const auto inner = objects.front()->find(key);
      if (inner == objects.front()->end() || !inner->is_object()) continue;
      objects.insert(objects.begin(), &*inner);
      deeper = true;
      break;
    }
  }
  return objects;
}

}  // namespace

ModelShape parse_model(std::string_view text, const std::string& file) {
  if (text.size() > kMaxModelBytes) throw InputError({.file = file}, "is too large for a model file");
  const toml::table root = parse_toml(text, file);
  return ModelReader(root, file).read();
}

ModelShape parse_model_config(std::string_view text, const std::string& file) {
  const nlohmann::json config = parse_json(text, file);
  const std::vector<const nlohmann::json*> objects = text_configs(config);
  std::string first_type;
  for (const nlohmann::json* const object : objects) {
    const auto type = object->find("model_type");
    if (type == object->end() || !type->is_string() || type->get_ref<const std::string&>().empty()) continue;
    const auto name = type->get<std::string>();
    if (first_type.empty()) first_type = name;
    const auto family = families().by_type.find(name);
    if (family == families().by_type.end()) continue;
    const Config found{.objects = objects, .model_type = name, .family = family->second, .any = families().any};
    ModelShape shape = ModelReader(family->second, file, &found).read();
    shape.name = name_of(file);
    return shape;
  }
  if (first_type.empty()) throw InputError({.file = file, .field = "model_type"}, "is missing");
  refuse({.objects = objects, .model_type = first_type, .family = families().any, .any = families().any}, file);
}

ModelShape read_model_config(const std::string& path) {
  const MappedFile file(path);
  if (file.bytes().size() > kMaxConfigBytes) throw InputError({.file = path}, "is too large for a config.json");
  return parse_model_config(file.text(), path);
}

}  // namespace foremoe
