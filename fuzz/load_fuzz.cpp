// Fuzzes foremoe.load/1: every load that can be read can be folded, cut and hashed.

#include "foremoe/rollout/load_file.h"
#include "fuzzed_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace foremoe;
  return read_or_refuse(data, size, [](std::span<const std::byte> bytes) {
    const LoadTable table = read_load(Safetensors::parse(bytes, kFuzzedInput));
    const LoadTable one_rank = fold_ranks(table, 1);
    const LoadTable whole = take_first(table, table.num_micro_steps(), table.num_layers());
    if (load_digest(whole) != load_digest(table)) found("all of a load is not the load");
    if (load_digest(fold_ranks(one_rank, 1)) != load_digest(one_rank))
      found("folding to the same ranks changes a load");
  });
}
