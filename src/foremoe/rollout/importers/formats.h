#pragma once

// Importers used by import_rollout. The importers read bytes in memory and throw InputError with source, field and
// index. Importers of sequences append to an assembler.

#include <string_view>

#include "foremoe/rollout/importers/importer.h"
#include "foremoe/rollout/importers/trace_assembler.h"

namespace foremoe {

void import_npy(const ImportSource& source, TraceAssembler& assembler);
void add_sequence(TraceAssembler& assembler, const DecodedSequence& sequence);

// Imports all rank files together, since their calls interleave into micro-steps.
void import_megatron_trace(std::span<const ImportSource> sources, const ImportOptions& options,
                           TraceAssembler& assembler);
// Shares the expert's tokens evenly among the load's ranks.
void share_evenly(std::int64_t tokens, std::size_t micro_step, std::size_t layer, std::size_t expert, LoadTable& table);
Imported import_megatron_counts(std::span<const ImportSource> sources, const ImportOptions& options);

inline std::string_view text_of(const ImportSource& source) {
  return {reinterpret_cast<const char*>(source.bytes.data()), source.bytes.size()};
}

}  // namespace foremoe
