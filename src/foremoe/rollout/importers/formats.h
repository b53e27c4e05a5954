#pragma once

// The importers behind import_rollout. All take bytes in memory and throw InputError with
// source, field and index. Those that read sequences append them to an assembler.

#include <string_view>

#include "foremoe/rollout/importers/importer.h"
#include "foremoe/rollout/importers/trace_assembler.h"

namespace foremoe {

void import_npy(const ImportSource& source, TraceAssembler& assembler);
void import_npz(const ImportSource& source, TraceAssembler& assembler);
void import_npy_base64(const ImportSource& source, TraceAssembler& assembler);
void import_json(const ImportSource& source, const ImportOptions& options, TraceAssembler& assembler);
void import_payload(const ImportSource& payload, const ImportOptions& options, TraceAssembler& assembler);
void import_sglang(const ImportSource& source, const ImportOptions& options, TraceAssembler& assembler);
void import_nrlre1(const ImportSource& source, TraceAssembler& assembler);

// All rank files at once: their calls interleave into micro-steps.
void import_megatron_trace(std::span<const ImportSource> sources, const ImportOptions& options,
                           TraceAssembler& assembler);
Imported import_megatron_counts(std::span<const ImportSource> sources, const ImportOptions& options);

// An .npy file's bytes, wherever they came from, as one sequence. `where` names file and member.
void add_npy(TraceAssembler& assembler, const Where& where, std::span<const std::byte> bytes);

// Throws InputError unless these bytes begin an .npy file of three axes that is `size` bytes long.
void expect_npy(std::span<const std::byte> beginning, std::uint64_t size, const Where& where);

// "nrlre1:<dtype>:<S>x<L>x<K>:<base64>"
void add_nrlre1(TraceAssembler& assembler, const Where& where, std::string_view envelope);

// Headerless int32 [tokens, layers, top_k] whose layers and top_k the options give.
void add_flat_int32(TraceAssembler& assembler, const Where& where, std::span<const std::byte> bytes,
                    const ImportOptions& options);

inline std::string_view text_of(const ImportSource& source) {
  return {reinterpret_cast<const char*>(source.bytes.data()), source.bytes.size()};
}

}  // namespace foremoe
