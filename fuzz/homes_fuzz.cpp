// Fuzzes foremoe.homes/1: homes that can be read have a digest and every expert a rank.

#include "foremoe/plan/homes_file.h"
#include "fuzzed_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace foremoe;
  return read_or_refuse(data, size, [](std::span<const std::byte> bytes) {
    const Homes homes = read_homes(Safetensors::parse(bytes, kFuzzedInput));
    if (homes_digest(homes.home).size() != 64) found("homes without a digest");
    for (const RankId rank : homes.home.flat()) {
      if (rank < RankId{0}) found("an expert without a rank");
    }
  });
}
