// Importers of arrays: .npy, .npz, base64 of them, NeMo-RL's envelope, SGLang's flat int32.

#include "fuzzed_import.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using enum foremoe::ImportFormat;
  return foremoe::read_or_refuse(data, size, [](std::span<const std::byte> bytes) {
    foremoe::import_fuzzed(bytes, std::array{kNpy, kNpz, kNpyBase64, kNrlre1, kSglang});
  });
}
