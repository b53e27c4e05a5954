#pragma once

// foremoe.load/1 or 2: the counts of a load table as a safetensors file (docs/users/formats.md).
//
//   load  [micro_steps, layers, ranks, experts]  U16, U32, I32 or I64; tokens, never negative
//   tokens  [micro_steps, ranks]  I64, optional
//   metadata: num_experts, top_k, ranks_per_node; optional missing_rows, name and other entries;
//     version 2: experts_of_layer, top_k_of_layer

#include <string>

#include "foremoe/core/safetensors.h"
#include "foremoe/rollout/load_table.h"

namespace foremoe {

// Throws InputError with file, field and index. The table's name comes from the metadata, or else is the file's stem.
LoadTable read_load(const Safetensors& file);
LoadTable read_load(const std::string& path);

// Uses the narrowest of U16, U32 and I64 that fits the largest load, and version 2 only if layers differ or rows are
// short (has_short_rows). `extra` metadata (origin, parameters, …) cannot
// override entries of the format.
void write_load(const LoadTable& table, const std::string& path, const Metadata& extra = {});

}  // namespace foremoe
