// Fuzzes model files (TOML): every model that can be read has sizes.

#include "fuzzed_model.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return foremoe::read_model_or_refuse(data, size, foremoe::parse_model);
}
