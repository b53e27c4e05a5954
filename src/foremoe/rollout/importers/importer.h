#pragma once

// Reads routes recorded by rollout engines and trainers, in their formats.
//
//   Imported in = import_files(paths, {.num_experts = 128});
//   if (const RoutingTrace* trace = in.trace()) …
//
// Several sources become several sequences in the given order (Megatron: one file per rank). The formats do not reveal
// three errors: padding with 0, 1, …, k−1 looks like a route, padding with zeros looks like a top-1 route, and
// recomputed layers repeat records. The report contains counts that help to detect these errors.

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
  kNpy,             // numpy array [tokens, layers, top_k], one sequence
  kNpz,             // zip of .npy members, one sequence each; Python decodes this and the next five
  kTorch,           // torch.save() of a rollout of slime or miles, with a sequence in each sample
  kNpyBase64,       // base64 of .npy, one sequence per line
  kJson,            // responses of vLLM (≥ 0.22: base64 of .npy; 0.21: nested lists) and SGLang (base64 of int32)
  kSglang,          // int32 [tokens, layers, top_k] without a header, raw or one base64 per line; needs layers, top_k
  kNrlre1,          // NeMo-RL text envelope, one sequence per line
  kMegatronTrace,   // router_trace_rank{N}.jsonl
  kMegatronCounts,  // tokens_per_expert/rank{N}.jsonl: yields a LoadTable
  kCounts  // tokens per expert without source ranks, such as dumps of SGLang and vLLM, decoded by Python: a load
};

std::string_view name_of(ImportFormat format);  // "npy", "npy-base64", "megatron-trace", …
std::optional<ImportFormat> import_format_named(std::string_view name);
std::vector<std::string> import_format_names();

struct ImportSource {
  std::string name;                  // as given by the user, for messages; Megatron counts parse the rank from it
  std::span<const std::byte> bytes;  // read only during import
};

// Integer array [tokens, layers, top_k], little-endian; for counts, int64 [steps, layers, experts].
struct IntegerArray {
  std::span<const std::byte> bytes;  // exactly the bytes of the array
  int type_bytes = 4;                // 1, 2, 4 or 8
  bool is_signed = true;
  std::array<std::uint64_t, 3> shape{};  // shape given by the header
  bool fortran_order = false;            // first axis fastest
};

// One sequence of a source, decoded by Python.
struct DecodedSequence {
  Where where;                                                     // for messages
  std::variant<std::span<const std::byte>, IntegerArray> content;  // the bytes of an .npy file, or an array
  std::int32_t prompt_length = -1;                                 // tokens; −1: unknown
  std::optional<std::int64_t> num_tokens;                          // number given by the response
  std::string counted_in = {};                                     // where num_tokens is from, such as "usage"
  std::int64_t omitted_rows = 0;             // of the first tokens, if the rows lack exactly so many: in a prefix cache
  std::string prompt = {};                   // equal if prompts are; empty: unknown
  std::string problem = {};                  // not empty: the sample cannot be read, for this reason
  std::vector<std::string> weight_versions;  // those that sampled it; empty: unknown
  std::shared_ptr<const void> owner = {};    // keeps the memory of `content` alive
  std::optional<std::int64_t> forward_pass = {};  // counts of one pass are added, such as those of several ranks
};
// Decodes a source whose format is neither .npy nor one of Megatron-LM's.
using Decode = std::function<std::vector<DecodedSequence>(ImportFormat, const ImportSource&)>;

// Point at which Megatron's tokens per expert were counted.
enum class CountsAt : std::uint8_t {
  kAuto,     // from num_experts if given, otherwise from the sums; see megatron_counts.cpp
  kSource,   // a rank counts its own tokens over all experts
  kReceived  // a rank counts the tokens that its own experts received; assumes uniform sources
};

struct ImportOptions {
  std::optional<ImportFormat> format;  // none: detected per source
  bool counts = false;                 // reads all sources as kCounts
  int num_experts = 0;                 // with weights; 0: largest id + 1
  int weightless_experts = 0;          // ids from num_experts on, which need no expert; needs num_experts
  bool drop_repeating_rows = false;    // accept any number of rows with repeated ids, as missing
  std::vector<int> experts_of_layer;   // of a known model, [its layers]; not a user's option
  std::vector<int> top_k_of_layer;
  int num_layers = 0;              // for headerless arrays; otherwise 0 or the recorded number
  int top_k = 0;                   // for headerless arrays and counts (0: 1 for counts); otherwise 0 or as recorded
  int ranks = 0;                   // of the load, for counts without source ranks
  int ranks_per_node = 0;          // 0: min(8, ranks)
  int pipeline_stages = 1;         // Megatron: ascending ranks are split evenly into this many pipeline stages
  bool drop_recomputed = false;    // Megatron trace: drop calls that equal an earlier call of their layer
  bool drop_empty_layers = false;  // drop layers without any route, such as dense layers
  bool strict = false;             // end at the first sample that cannot be read, instead of skipping it
  bool fill_prefixes = false;      // take rows of first tokens without routes from a sibling with the same prompt
  bool keep_invalid_rows = false;  // keep repeated ids and other shapes, for route_checks.h; not a user's option
  CountsAt counts_at = CountsAt::kAuto;
  std::string model;  // metadata. A preset or config.json is compared, and sets num_experts, and top_k of counts
};

// Options for the fields above; `experts` and `layers` set num_experts and num_layers.
std::vector<Option> options_of(ImportOptions& options);

struct SkippedSample {
  int sample = 0;  // number in the sources
  Where where;
  std::string problem;
};

// Origin of a sequence.
struct SampleFacts {
  int sample = 0;                          // number in the sources, where skipped samples count too
  std::optional<std::int64_t> num_tokens;  // this and the next are as DecodedSequence has them
  std::string counted_in;
  std::string prompt;
  std::vector<std::string> weight_versions;
};

struct RowCounts {
  std::int64_t rows = 0;                       // (token, layer) pairs read
  std::int64_t rows_recorded_missing = 0;      // missing rows: all −1 or an unsigned type's largest value
  std::int64_t rows_repeating = 0;             // rows with repeated ids, which are invalid; imported as missing
  std::int64_t rows_remapped = 0;              // of these, rows whose entries are not all equal
  std::int64_t rows_partial = 0;               // rows with a route of fewer than top_k ids
  std::int64_t rows_skipped = 0;               // rows of unrecorded calls; imported as missing
  std::int64_t rows_omitted = 0;               // rows that a prefix cache omitted, as counts say; imported as missing
  std::int64_t last_tokens_without_route = 0;  // sequences whose last token has no row, or only missing rows
};

struct ImportReport : RowCounts {
  ImportFormat format = ImportFormat::kNpy;  // format of the first source
  std::int64_t rows_filled = 0;              // missing rows that were taken from siblings
  std::vector<SkippedSample> skipped;
  std::vector<SampleFacts> sequences;  // [sequences]

  std::int64_t rows_missing() const {
    return rows_recorded_missing + rows_repeating + rows_skipped + rows_omitted - rows_filled;
  }
  bool num_experts_inferred = false;  // num_experts is the largest id + 1
  std::vector<int> layer_ids;         // of a load: numbers of its layers in the file; empty: all layers
  std::vector<std::string> notes;     // assumptions made, as sentences
};

struct Imported {
  std::variant<RoutingTrace, LoadTable> value;
  ImportReport report;

  const RoutingTrace* trace() const { return std::get_if<RoutingTrace>(&value); }
  const LoadTable* load() const { return std::get_if<LoadTable>(&value); }
};

// Detects the format from the contents; nullopt: unknown. Throws InputError with what the file is if it is known but
// cannot be imported: ForeMoE's own files, config.json, TOML, maps of engines, empty files.
std::optional<ImportFormat> find_format(const ImportSource& source, const ImportOptions& options = {});
// As above, but throws InputError if the format is unknown.
ImportFormat detect_format(const ImportSource& source, const ImportOptions& options = {});

// Returns whether the file needs `Decode`, or may need it since it is a stream. Throws InputError like detect_format,
// and also if the path cannot be read.
bool needs_decoder(const std::string& path, const ImportOptions& options);

// Reads all sources into one trace or load. Throws InputError with source, field and index, also if a source needs
// `decode` but `decode` is empty. Memory is proportional to the bytes given, not to sizes claimed by headers, except
// for omitted rows: at most 2²⁰ tokens of a sequence. Unless options.strict, samples that cannot be read are skipped.
Imported import_rollout(std::span<const ImportSource> sources, const ImportOptions& options = {},
                        const Decode& decode = {});

// Imports files, which are memory-mapped during import, and streams. Throws InputError if a path cannot be read.
Imported import_files(std::span<const std::string> paths, const ImportOptions& options = {}, const Decode& decode = {});

// Makes a load of counts without source ranks, each int64 [steps, layers, experts], steps after steps. Every rank sends
// an even part of each expert's tokens; the remainder starts at another rank for each expert. Layers and steps without
// tokens are dropped. Throws InputError, in particular if `ranks` or `top_k` is missing.
Imported import_counts(std::span<const DecodedSequence> counts, const ImportOptions& options);

// Assembles sequences into one trace. Throws InputError like import_rollout.
RoutingTrace import_sequences(std::span<const DecodedSequence> sequences, ImportOptions options);

}  // namespace foremoe
