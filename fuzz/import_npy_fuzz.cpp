// Fuzzes the importer of .npy files and format detection.

#include "fuzzed_import.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using enum foremoe::ImportFormat;
  return foremoe::read_or_refuse(
      data, size, [](std::span<const std::byte> bytes) { foremoe::import_fuzzed(bytes, std::array{kNpy}); });
}
