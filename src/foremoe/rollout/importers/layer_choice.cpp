#include "foremoe/rollout/importers/layer_choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace foremoe {

template <class Fits>
static const ModelShape* only_shape(const Fits& fits) {
  const auto shapes = model_shapes();
  return std::ranges::count_if(shapes, fits) == 1 ? &*std::ranges::find_if(shapes, fits) : nullptr;
}

std::string find_hash_layers(const std::vector<bool>& empty, int experts, int top_k) {
  const auto num_empty = std::ranges::count(empty, true);
  const ModelShape* const model = only_shape([&](const ModelShape& m) {
    return num_empty > 0 && m.experts == experts && m.top_k == top_k &&
           std::ranges::equal(m.layer_kinds, empty,
                              [](auto kind, bool e) { return (kind == LayerKind::kHashMoe) == e; });
  });
  if (model == nullptr) return {};
  return fmt::format(
      "{} of {} layers have no route: with {} experts and top-{}, they are those that {} routes by hash, which have "
      "experts; the capture lost their routes",
      num_empty, empty.size(), experts, top_k, model->name);
}

std::string find_weightless_experts(RoutingTrace& trace) {
  const ModelShape* const model = only_shape([&, ids = trace.num_experts](const ModelShape& m) {
    return m.top_k == trace.top_k && m.experts < ids && ids <= m.experts + m.weightless_experts;
  });
  if (model == nullptr) return {};
  trace.num_experts = model->experts;
  trace.weightless_experts = model->weightless_experts;
  return fmt::format(
      "num_experts = {0} and {1} ids without weights are those of {2} (top-{3} of {4} ids); if all have weights, give "
      "--experts {4}",
      model->experts, model->weightless_experts, model->name, model->top_k, model->experts + model->weightless_experts);
}

static LayerChoice choose_without_model(const std::vector<bool>& empty, bool drop_empty, const Where& where,
                                        const std::string& hash_layers) {
  LayerChoice choice{.kept = std::vector<bool>(empty.size(), true)};
  const auto num_empty = std::ranges::count(empty, true);
  if (num_empty == 0 || num_empty == std::ssize(empty)) return choice;
  if (!hash_layers.empty()) {
    if (drop_empty) throw InputError(where, hash_layers + "; `drop_empty_layers` would drop them: " + kRecordThem);
    choice.notes.push_back(hash_layers);
    return choice;
  }
  if (drop_empty) {
    choice.kept = empty;
    choice.kept.flip();
  }
  choice.notes.push_back(
      fmt::format("{} of {} layers have no route in any token{}: dense layers have none, but nor have hash-routed "
                  "layers (DeepSeek-V4) in some captures; --model decides",
                  num_empty, empty.size(), drop_empty ? "; they were dropped" : ""));
  return choice;
}

// Returns the numbers of the decoder layers with experts. `all`: the routes are those of all decoder layers.
static std::vector<int> layers_with_experts(const ModelShape& model, const std::vector<bool>& empty, bool all) {
  const auto num_empty = std::ranges::count(empty, true);
  // Dense layers may be anywhere.
  if (!all || !model.layer_kinds.empty() || num_empty != model.dense_layers) return model.moe_layer_numbers();
  std::vector<int> numbers;
  for (int l = 0; l < static_cast<int>(empty.size()); ++l) {
    if (!empty[static_cast<std::size_t>(l)]) numbers.push_back(l);
  }
  return numbers;
}

LayerChoice choose_layers(const std::vector<bool>& empty, const std::optional<ModelShape>& model, bool drop_empty,
                          const Where& where, const std::string& hash_layers) {
  if (!model) return choose_without_model(empty, drop_empty, where, hash_layers);
  LayerChoice choice{.kept = std::vector<bool>(empty.size(), true)};
  std::vector<bool>& kept = choice.kept;
  const std::size_t layers = empty.size();
  const auto num_empty = std::ranges::count(empty, true);
  const auto fail = [&](const std::string& what) { throw InputError(where, what); };
  const std::size_t decoder = std::max(model->layer_kinds.size(), static_cast<std::size_t>(model->layers()));
  const bool all = empty.size() == decoder;  // decoder layers
  const std::vector<int> moe = layers_with_experts(*model, empty, all);
  if (!all && empty.size() != moe.size()) {
    fail(fmt::format("has {} layers, but {} has {} with experts, of {}{}", layers, model->name, moe.size(), decoder,
                     empty.size() == moe.size() + 1 || empty.size() == decoder + 1
                         ? ": one of multi-token prediction or of a draft model was recorded too"
                         : ""));
  }
  if (!all) choice.numbers = moe;
  std::vector<int> lost;
  for (std::size_t l = 0; l < empty.size(); ++l) {
    const int number = all ? static_cast<int>(l) : moe[l];
    kept[l] = std::ranges::binary_search(moe, number);
    if (kept[l] && empty[l]) lost.push_back(number);
    if (!kept[l] && !empty[l]) {
      fail(
          fmt::format("layer {} has routes, but {} has no experts there: a draft model wrote into it, or layers are "
                      "shifted",
                      l, model->name));
    }
  }
  if (!lost.empty() && num_empty < std::ssize(empty)) {
    const std::string what = fmt::format(
        "layers {} have no route, but {} has experts there: they were not recorded, or are routed by hash "
        "(the experts of tid2eid[token])",
        fmt::join(lost, ", "), model->name);
    if (drop_empty) fail(what + ", so they cannot be dropped (`drop_empty_layers`)");
    choice.notes.push_back(what);
  }
  if (all && moe.size() < decoder) {
    choice.notes.push_back(fmt::format("{} of {} layers have no experts in {}, and were dropped", decoder - moe.size(),
                                       decoder, model->name));
  }
  return choice;
}

}  // namespace foremoe
