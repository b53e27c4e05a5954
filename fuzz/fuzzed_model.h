#pragma once

#include <string_view>

#include "foremoe/cluster/model_shape.h"
#include "fuzzed_input.h"

namespace foremoe {

// Every model that can be read has sizes.
template <class Parse>
int read_model_or_refuse(const std::uint8_t* data, std::size_t size, Parse&& parse) {
  return read_or_refuse(data, size, [&](std::span<const std::byte> bytes) {
    const ModelShape model =
        parse(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()), kFuzzedInput);
    if (model.experts < 1 || model.top_k < 1 || model.top_k > model.experts) found("a model without experts or top_k");
    if (model.layers() < model.moe_layers || model.expert_parameters() < 1) found("a model without layers");
  });
}

}  // namespace foremoe
