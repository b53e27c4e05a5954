// Fuzzes model files (TOML): every model that can be read has sizes.

#include <string_view>

#include "foremoe/cluster/model_shape.h"
#include "fuzzed_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace foremoe;
  return read_or_refuse(data, size, [](std::span<const std::byte> bytes) {
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const ModelShape model = parse_model(text, kFuzzedInput);
    if (model.experts < 1 || model.top_k < 1 || model.top_k > model.experts) found("a model without experts or top_k");
    if (model.layers() < model.moe_layers || model.expert_parameters() < 1) found("a model without layers");
  });
}
