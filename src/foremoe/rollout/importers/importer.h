#pragma once

// Reads the routes that rollout engines and trainers record, in their formats.
//
//   Imported in = import_files(paths, {.num_experts = 128});
//   if (const RoutingTrace* trace = in.trace()) …
//
// Several sources are several sequences in the order given (Megatron: one file per rank). Three things look right but
// may be wrong, and no format tells: padding of 0, 1, …, k−1 looks like a route, at top-1 padding of zeros does, and
// recomputed layers repeat records. The report counts what helps to see it.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/core/option.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

enum class ImportFormat : std::uint8_t {
  kNpy,            // numpy array [tokens, layers, top_k], one sequence
  kNpz,            // zip of .npy members, one sequence each; this and the next four are decoded by Python
  kNpyBase64,      // base64 of .npy, one sequence per line
  kJson,           // responses of vLLM (≥ 0.22: base64 of .npy; 0.21: nested lists) and SGLang (base64 of int32)
  kSglang,         // int32 [tokens, layers, top_k] without a header, raw or one base64 per line; needs layers, top_k
  kNrlre1,         // NeMo-RL text envelope, one sequence per line
  kMegatronTrace,  // router_trace_rank{N}.jsonl
  kMegatronCounts  // tokens_per_expert/rank{N}.jsonl: yields a LoadTable
};

std::string_view name_of(ImportFormat format);  // "npy", "npy-base64", "megatron-trace", …
std::optional<ImportFormat> import_format_named(std::string_view name);

struct ImportSource {
  std::string name;                  // as the user gave it, for messages; Megatron counts take the rank from it
  std::span<const std::byte> bytes;  // only read while importing
};

// Integers [tokens, layers, top_k], little-endian.
struct IntegerArray {
  std::span<const std::byte> bytes;  // exactly the array
  int type_bytes = 4;                // 1, 2, 4 or 8
  bool is_signed = true;
  std::array<std::uint64_t, 3> shape{};  // as claimed
  bool fortran_order = false;            // first axis fastest
};

// One sequence of a source, as Python decoded it.
struct DecodedSequence {
  Where where;                                                     // for messages
  std::variant<std::span<const std::byte>, IntegerArray> content;  // the bytes of an .npy file, or an array
  std::int32_t prompt_length = -1;                                 // tokens; −1: unknown
  std::optional<std::int64_t> num_tokens;                          // that the response claims
  std::shared_ptr<const void> owner = {};                          // of the content's memory
};
// Decodes a source of a format that is neither .npy nor Megatron-LM's.
using Decode = std::function<std::vector<DecodedSequence>(ImportFormat, const ImportSource&)>;

// Where Megatron's tokens per expert were counted.
enum class CountsAt : std::uint8_t {
  kAuto,     // by num_experts if given, else by the sums; see megatron_counts.cpp
  kSource,   // a rank counts its own tokens over all experts
  kReceived  // a rank counts what its own experts received; sources are then taken to be even
};

struct ImportOptions {
  std::optional<ImportFormat> format;  // none: detected, for each source
  int num_experts = 0;                 // 0: largest id + 1
  int num_layers = 0;                  // of headerless arrays; elsewhere 0 or as recorded
  int top_k = 0;                       // of headerless arrays and of counts (there 0 means 1); else 0 or as recorded
  int ranks_per_node = 0;              // 0: min(8, ranks)
  int pipeline_stages = 1;             // Megatron: the ranks, ascending, are this many stages whose layers follow
  bool drop_recomputed = false;    // Megatron trace: a call equal to an earlier call of its layer is its recomputation
  bool drop_empty_layers = false;  // layers without any route, such as dense ones, leave the trace
  CountsAt counts_at = CountsAt::kAuto;
  std::string model;  // for the trace's metadata; of a known model num_experts, and top_k of counts, unless given
};

// Of the fields above; `experts` and `layers` set num_experts and num_layers.
std::vector<Option> options_of(ImportOptions& options);

struct ImportReport {
  ImportFormat format = ImportFormat::kNpy;    // of the first source
  std::int64_t rows = 0;                       // (token, layer) pairs read
  std::int64_t rows_recorded_missing = 0;      // rows of −1 or of an unsigned type's largest value
  std::int64_t rows_repeating = 0;             // rows with repeated ids, no legal route: turned into missing ones
  std::int64_t rows_skipped = 0;               // rows of calls that were not recorded: filled in as missing ones
  std::int64_t last_tokens_without_route = 0;  // sequences whose last token has no row, or none with a route
  bool num_experts_inferred = false;           // from the largest id
  std::vector<std::string> notes;              // sentences about what was assumed
};

struct Imported {
  std::variant<RoutingTrace, LoadTable> value;
  ImportReport report;

  const RoutingTrace* trace() const { return std::get_if<RoutingTrace>(&value); }
  const LoadTable* load() const { return std::get_if<LoadTable>(&value); }
};

// What the bytes look like. Throws InputError when they look like nothing known, or like a file of ours.
ImportFormat detect_format(const ImportSource& source, const ImportOptions& options = {});

// Whether the file is of a format that `Decode` must read. Throws InputError as detect_format, and for a path that
// cannot be read.
bool needs_decoder(const std::string& path, const ImportOptions& options);

// Reads all sources into one trace or load. Throws InputError naming source, field and index, also for a source that
// `decode` must read where it is empty. Memory stays proportional to the bytes given, whatever a header claims.
Imported import_rollout(std::span<const ImportSource> sources, const ImportOptions& options = {},
                        const Decode& decode = {});

// The same for files, which are mapped while they are read. Throws InputError for a path that cannot be read.
Imported import_files(std::span<const std::string> paths, const ImportOptions& options = {}, const Decode& decode = {});

// The sequences as one trace. Throws InputError as import_rollout.
RoutingTrace import_sequences(std::span<const DecodedSequence> sequences, const ImportOptions& options);

}  // namespace foremoe
