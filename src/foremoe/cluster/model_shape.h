#pragma once

// The parts of a model's shape that matter for load balancing, with presets of common models.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/core/units.h"

namespace foremoe {

// One kind of attention. If kv_rank is 0, query heads share key-value heads. Otherwise, queries, keys and values are
// expanded from latent vectors (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434). If `state` is not 0, the
// kind is linear attention, such as gated delta nets or Mamba 2: tokens read and update a state.
struct AttentionShape {
  int heads = 0;           // query heads
  int kv_heads = 0;        // key-value heads; equal to `heads` if latent
  int key_width = 0;       // width of one query or key, per head
  int value_width = 0;     // per head
  int query_rank = 0;      // latent width of queries; 0: projected directly
  int kv_rank = 0;         // latent width of keys and values; 0: projected directly
  int rotary_width = 0;    // latent only: part of key_width that all heads share, outside the latent vector
  int window = 0;          // a token attends to at most this many; 0: to all before it
  int index_width = 0;     // heads · width of an indexer, which scores all tokens to choose `window` of them
  std::int64_t state = 0;  // linear attention: elements of the state of a layer
  std::int64_t other_parameters = 0;  // of a layer, besides queries, keys, values and output: gates, convolutions …
  int layers = 0;                     // that have it; 0: all layers that no other kind has

  std::int64_t parameters(int hidden) const;  // of all projections, and other_parameters
  // FLOPs of attention in the forward pass of one token that attends to `context` others, without projections.
  std::int64_t flops_per_token(int context) const;
  // FLOPs of the forward pass of causal attention, without projections. squared_lengths: Σ length² over sequences.
  double score_flops(double tokens, double squared_lengths) const;
  // Elements of queries, keys, values and results of one token.
  std::int64_t token_width() const;
};

// Divides a layer's experts into contiguous groups of equal size. A token chooses its experts from at most `per_token`
// groups (DeepSeek-V3, arXiv 2412.19437, §2.1.2).
struct ExpertGroups {
  int count = 1;
  int per_token = 1;

  // True if the groups exclude some sets of top_k experts.
  bool restrict_tokens(int top_k) const { return per_token < std::min(count, top_k); }

  friend bool operator==(const ExpertGroups&, const ExpertGroups&) = default;
};

// Throws InputError, field `expert_groups` or `groups_per_token` of `file`, unless the groups are valid and a token can
// choose top_k experts from them.
void expect_groups_fit(const ExpertGroups& groups, int experts, int top_k, const std::string& file = {});

// What a decoder layer has besides attention.
enum class LayerKind : std::uint8_t {
  kDense,    // an ordinary feed-forward block
  kMoe,      // experts that a router chooses
  kHashMoe,  // experts that a token's id determines (hash routing): nothing to record or replay
  kNone      // nothing, as in the attention and Mamba layers of Nemotron-H
};

struct ModelShape {
  std::string name = {};
  int moe_layers = 0;
  int dense_layers = 0;           // layers with an ordinary feed-forward block
  int experts = 0;                // routed experts per MoE layer
  int top_k = 0;                  // routed experts per token
  ExpertGroups groups = {};       // of the routed experts
  int shared_experts = 0;         // run on every token's own rank, in addition to top_k
  int hidden = 0;                 // width of a token
  int intermediate = 0;           // width inside one routed expert
  int dense_intermediate = 0;     // width inside the feed-forward block of a dense layer; 0 without one
  int vocabulary = 0;             // the embedding and the output head each have hidden · vocabulary parameters
  AttentionShape attention = {};  // of every layer that none of other_attention has
  std::vector<AttentionShape> other_attention = {};  // with their numbers of layers
  int shared_intermediate = 0;          // width inside all shared experts together; 0: shared_experts · intermediate
  int latent = 0;                       // width of tokens that routed experts receive (latent MoE); 0: `hidden`
  int expert_matrices = 3;              // of an expert or feed-forward block: gate, up and down; 2: up and down
  bool tied = false;                    // the output head is the embedding
  bool has_embedding = true;            // false: another stage of the pipeline has it
  bool has_head = true;                 // likewise
  std::int64_t other_parameters = 0;    // such as those of a vision tower
  bool automatic = true;                // may be chosen for a load by its experts and top-k
  std::vector<std::string> notes = {};  // what a reader of its parameters and times must know

  std::vector<LayerKind> layer_kinds = {};  // [decoder layers]; empty: unknown, dense layers are assumed to be first
  int weightless_experts = 0;               // ids from `experts` on that have no weights, such as LongCat's
  std::vector<int> experts_of_layer = {};   // [moe_layers]; empty: `experts` in all
  std::vector<int> top_k_of_layer = {};     // [moe_layers]; empty: `top_k` in all

  // Numbers of the layers with experts, hash-routed ones included, ascending: [moe_layers].
  std::vector<int> moe_layer_numbers() const;

  int layers() const { return layer_kinds.empty() ? moe_layers + dense_layers : static_cast<int>(layer_kinds.size()); }
  int row_width() const { return latent > 0 ? latent : hidden; }  // of a token that is sent to an expert
  int shared_width() const { return shared_intermediate > 0 ? shared_intermediate : shared_experts * intermediate; }
  // Projections of one routed expert (gate, up and down, or only up and down).
  std::int64_t expert_parameters() const { return std::int64_t{expert_matrices} * row_width() * intermediate; }
  Bytes expert_bytes(int bytes_per_parameter = 2) const { return Bytes{expert_parameters() * bytes_per_parameter}; }

  // FLOPs of one token in one routed expert, in the forward pass.
  std::int64_t flops_per_assignment() const { return 2 * expert_parameters(); }

  // Calls visit(kind, layers) for each kind of attention, with its number of layers.
  template <class Visit>
  void visit_attention(const Visit& visit) const {
    int others = 0;
    for (const AttentionShape& kind : other_attention) others += kind.layers;
    visit(attention, attention.layers > 0 ? attention.layers : layers() - others);
    for (const AttentionShape& kind : other_attention) visit(kind, kind.layers);
  }

  std::int64_t attention_parameters() const { return attention.parameters(hidden); }  // per layer of the first kind
  // Per MoE layer: shared experts, and projections to and from the width `latent`.
  std::int64_t shared_parameters() const {
    return std::int64_t{expert_matrices} * hidden * shared_width() + std::int64_t{2} * hidden * latent;
  }
  std::int64_t router_parameters() const { return std::int64_t{hidden} * (experts + weightless_experts); }
  std::int64_t dense_parameters() const { return std::int64_t{expert_matrices} * hidden * dense_intermediate; }
  std::int64_t head_parameters() const { return std::int64_t{hidden} * vocabulary; }  // the embedding has as many again
  // Numbers of parameters in routed experts, outside them (stored on every rank), in total, and of one token: all but
  // those of experts that it did not choose. They exclude norms and biases.
  std::int64_t parameters_in_experts() const;
  std::int64_t parameters_besides_experts() const;
  std::int64_t parameters() const { return parameters_besides_experts() + parameters_in_experts(); }
  std::int64_t active_parameters() const;
};

// Number of the first MoE layer of a pipeline's stage, among the MoE layers. Stages differ by at most one MoE layer,
// and stage 0, whose micro-steps in flight are the most, has the fewest.
int first_moe_layer_of(const ModelShape& model, int stage, int stages);

// Returns one stage of a pipeline of at most moe_layers stages. A stage ends with its last MoE layer, so dense layers
// before the first MoE layer are in stage 0, which also has the embedding and other_parameters. The last stage has the
// output head and all layers that remain. Kinds of attention are assumed to be spread evenly over the layers.
ModelShape stage_of(const ModelShape& model, int stage, int stages);

std::span<const ModelShape> model_shapes();  // data/models, embedded by src/foremoe/CMakeLists.txt
std::vector<std::string> model_names();      // names of the presets

// Finds a preset by name, ignoring case: "qwen3-30b-a3b". None if unknown.
std::optional<ModelShape> find_model_shape(std::string_view name);

// Finds a preset by name, or reads the file at this path: a model that is described by hand if its name ends in .toml,
// else a config.json. Throws InputError with this field if neither exists.
ModelShape model_named(const std::string& name_or_path, const std::string& field = "model");

// Reads a model in the format of data/models (docs/users/formats.md). Throws InputError with file, key and line.
ModelShape parse_model(std::string_view text, const std::string& file);  // `file` names the text in errors

// Reads the shape from a model's config.json. data/families describes how: a family of model_types has formulas of the
// config's keys. Reads the text model of a multimodal model. Rejects dense models and all other model_types; the
// message contains a file that describes the model by hand. The model is named after the folder if the file is called
// config.json, else after the file. Throws InputError with file, key and problem.
ModelShape read_model_config(const std::string& path);
ModelShape parse_model_config(std::string_view text, const std::string& file);

}  // namespace foremoe
