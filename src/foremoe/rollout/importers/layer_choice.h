#pragma once

// Which recorded layers a trace keeps. Engines record all decoder layers or only those with experts, and zeros where
// they have no routes: in dense layers, but also in hash-routed layers, which have experts. Only the model can tell.

#include <optional>
#include <string>
#include <vector>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/error.h"

namespace foremoe {

struct LayerChoice {
  std::vector<bool> kept;    // [recorded layers]
  std::vector<int> numbers;  // [recorded layers], in the model; empty: 0, 1, …
  std::vector<std::string> notes;
};

// `empty`: [recorded layers], without any route. Throws InputError at `where` if the model has other
// layers, or if drop_empty would drop layers with experts.
LayerChoice choose_layers(const std::vector<bool>& empty, const std::optional<ModelShape>& model, bool drop_empty,
                          const Where& where);

}  // namespace foremoe
