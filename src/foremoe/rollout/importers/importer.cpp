#include "foremoe/rollout/importers/importer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <iterator>
#include <limits>
#include <memory>

#include "foremoe/cluster/model_shape.h"
#include "foremoe/core/mapped_file.h"
#include "foremoe/core/safetensors.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/importers/text.h"

namespace foremoe {

namespace {

constexpr std::array<std::pair<ImportFormat, std::string_view>, 10> kNames{
    {{ImportFormat::kNpy, "npy"},
     {ImportFormat::kNpz, "npz"},
     {ImportFormat::kTorch, "torch"},
     {ImportFormat::kNpyBase64, "npy-base64"},
     {ImportFormat::kJson, "json"},
     {ImportFormat::kSglang, "sglang"},
     {ImportFormat::kNrlre1, "nrlre1"},
     {ImportFormat::kMegatronTrace, "megatron-trace"},
     {ImportFormat::kMegatronCounts, "megatron-counts"},
     {ImportFormat::kCounts, "counts"}}};

// Keys of dumps that contain counts. foremoe/_counts.py reads them.
constexpr std::array<std::string_view, 9> kKeysOfCounts{
    "logical_count", "global_physical_count",     "physical_count", "expert_load_window", "expert_load_pass",
    "expert_load",   "global_expert_load_window", "expert_counts",  "expert_count"};

void check_options(const ImportOptions& options) {
  const auto expect = [](const char* field, int value, int most) {
    if (value < 0 || value > most) {
      throw InputError({.field = field}, fmt::format("{} (is {}; 0: unknown)", must_be_integer(0, most), value));
    }
  };
  constexpr int kMost = std::numeric_limits<int>::max();
  expect("experts", options.num_experts, kMaxImportedExperts);
  expect("weightless_experts", options.weightless_experts, kMaxImportedExperts - options.num_experts);
  if (options.weightless_experts > 0 && options.num_experts == 0) {
    throw InputError({.field = "weightless_experts"}, "needs `experts`, the number of experts with weights");
  }
  expect("layers", options.num_layers, kMost);
  expect("top_k", options.top_k, kMost);
  expect("ranks", options.ranks, static_cast<int>(kMaxRanks));
  expect("ranks_per_node", options.ranks_per_node, kMost);
}

}  // namespace

std::string_view name_of(ImportFormat format) {
  return std::find_if(kNames.begin(), kNames.end(), [=](const auto& entry) { return entry.first == format; })->second;
}

std::optional<ImportFormat> import_format_named(std::string_view name) {
  const auto found =
      std::find_if(kNames.begin(), kNames.end(), [=](const auto& entry) { return entry.second == name; });
  return found == kNames.end() ? std::nullopt : std::optional(found->first);
}

std::vector<std::string> import_format_names() {
  std::vector<std::string> names;
  for (const auto& entry : kNames) names.emplace_back(entry.second);
  return names;
}

// Returns the format if the metadata identifies the file as one of ForeMoE's, otherwise an empty string.
static std::string format_of_ours(const ImportSource& source) {
  try {
    const std::string format = Safetensors::parse(source.bytes, source.name).text_or("format", "");
    return format.starts_with("foremoe.") ? format : "";
  } catch (const InputError&) {
    return {};
  }
}

// Returns the name of a zip archive's first member.
static std::string_view first_member(std::string_view zip) {
  constexpr std::size_t kNameLengthAt = 26;
  constexpr std::size_t kNameAt = 30;
  if (zip.size() < kNameAt) return {};
  const auto byte = [&](std::size_t at) { return static_cast<std::size_t>(static_cast<unsigned char>(zip[at])); };
  return zip.substr(kNameAt, byte(kNameLengthAt) | byte(kNameLengthAt + 1) << 8U);
}

// Looks for the key near the beginning and the end, where dumps have their keys.
static bool has_key(std::string_view text, std::string_view key) {
  constexpr std::size_t kWindow = std::size_t{1} << 16;
  return text.substr(0, kWindow).find(key) != std::string_view::npos ||
         text.substr(text.size() - std::min(text.size(), kWindow)).find(key) != std::string_view::npos;
}

static bool has_key_of_counts(std::string_view text, std::string_view before, std::string_view after) {
  return !has_key(text, "routed_experts") && std::ranges::any_of(kKeysOfCounts, [&](std::string_view key) {
    return has_key(text, fmt::format("{}{}{}", before, key, after));
  });
}

static ImportFormat format_of_json(const ImportSource& source, std::string_view first_line) {
  const std::string_view text = text_of(source);
  const auto refuse = [&](const std::string& what) { throw InputError({.file = source.name}, what); };
  if (first_line.find("\"top_indices\"") != std::string_view::npos) return ImportFormat::kMegatronTrace;
  if (first_line.find("\"tpe\"") != std::string_view::npos) return ImportFormat::kMegatronCounts;
  if (has_key_of_counts(text, "\"", "\"")) return ImportFormat::kCounts;
  if (!has_key(text, "routed_experts")) {
    if (has_key(text, "\"model_type\""))
      refuse("is a model's config.json, which simulate, fit and compare read as `model`");
    if (has_key(text, "physical_to_logical_map\"")) refuse("is a map for an engine, without counts");
  }
  return ImportFormat::kJson;
}

std::optional<ImportFormat> find_format(const ImportSource& source, const ImportOptions& options) {
  const std::string_view text = text_of(source);
  const auto refuse = [&](const std::string& what) { throw InputError({.file = source.name}, what); };
  if (const std::string format = format_of_ours(source); !format.empty()) {
    refuse(fmt::format("is a {} file already: there is nothing to import, use it as it is", format));
  }
  if (text.empty()) refuse("is empty");
  if (text.starts_with("\x93NUMPY")) return ImportFormat::kNpy;
  if (text.starts_with("PK\x03\x04") || text.starts_with("PK\x05\x06")) {
    if (has_key_of_counts(text, "", "")) return ImportFormat::kCounts;
    return first_member(text).ends_with("/data.pkl") ? ImportFormat::kTorch : ImportFormat::kNpz;
  }
  const std::string_view content = trimmed(text);
  if (content.empty()) throw InputError({.file = source.name}, "is empty");
  const std::string_view first_line = trimmed(content.substr(0, content.find('\n')));
  if (first_line.starts_with("nrlre1:")) return ImportFormat::kNrlre1;
  if (first_line.starts_with("k05VTVBZ")) return ImportFormat::kNpyBase64;
  if (first_line.starts_with('{') || first_line.starts_with('[')) return format_of_json(source, first_line);
  if (options.num_layers > 0 && options.top_k > 0) return ImportFormat::kSglang;
  if (source.name.ends_with(".toml"))
    refuse("is a TOML file; simulate, fit and compare read that of a cluster as `cluster`, and of a model as `model`");
  return std::nullopt;
}

ImportFormat detect_format(const ImportSource& source, const ImportOptions& options) {
  if (const auto format = find_format(source, options)) return *format;
  throw InputError(
      {.file = source.name},
      fmt::format("is in none of the formats {}. For sglang, an array without a header, give `layers` and `top_k`",
                  fmt::join(import_format_names(), ", ")));
}

static bool is_empty(const ImportSource& source) { return trimmed(text_of(source)).empty(); }

static std::optional<ImportFormat> asked_format(const ImportOptions& options) {
  if (!options.counts) return options.format;
  if (options.format.value_or(ImportFormat::kCounts) != ImportFormat::kCounts)
    throw InputError({.field = "counts"}, "cannot be combined with another `format`");
  return ImportFormat::kCounts;
}

static ImportFormat format_of(const ImportSource& source, const ImportOptions& options) {
  const std::optional<ImportFormat> asked = asked_format(options);
  return asked ? *asked : detect_format(source, options);
}

static bool is_decoded(ImportFormat format) {
  return format != ImportFormat::kNpy && format != ImportFormat::kMegatronTrace &&
         format != ImportFormat::kMegatronCounts;
}

// Returns whether all sources must have this format.
static bool is_together(ImportFormat format) {
  return format == ImportFormat::kMegatronTrace || format == ImportFormat::kMegatronCounts ||
         format == ImportFormat::kCounts;
}

bool needs_decoder(const std::string& path, const ImportOptions& options) {
  if (const auto format = asked_format(options)) return is_decoded(*format);
  if (is_stream(path)) return true;
  const MappedFile file(path);
  if (is_empty({path, file.bytes()})) return false;
  return is_decoded(detect_format({path, file.bytes()}, options));
}

// LongCat's routers choose among experts with and without weights, which ids alone do not distinguish.
static void expect_weightless_known(const ImportOptions& options) {
  std::string name = options.model;
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
  if (name.find("longcat") == std::string::npos || options.weightless_experts > 0) return;
  throw InputError({.field = "weightless_experts"},
                   fmt::format("is needed for {}, some of whose ids have no weights: give `experts`, the number of "
                               "those with weights, and `weightless_experts`, or LongCat-Flash as `model`",
                               options.model));
}

// Returns the shape of a known model, or of a config.json.
static std::optional<ModelShape> shape_of_model(const std::string& model) {
  const bool is_path = model.ends_with(".json") || model.ends_with(".toml") || std::filesystem::is_regular_file(model);
  return is_path ? model_named(model) : find_model_shape(model);
}

// Completes the options with the shape of a known model. Throws InputError if they contradict it.
static ImportOptions complete(ImportOptions options, bool counts, const std::optional<ModelShape>& shape,
                              std::vector<std::string>& notes) {
  if (!shape) {
    if (!counts) expect_weightless_known(options);
    if (!options.model.empty())
      notes.push_back(fmt::format("{} is no known model: nothing was compared", options.model));
    return options;
  }
  options.model = shape->name;
  const auto expect = [&](const char* field, int given, int of_model) {
    if (given == 0 || given == of_model) return;
    throw InputError({.field = field}, fmt::format("{}, but {} (`model`) has {}", given, shape->name, of_model));
  };
  expect("experts", options.num_experts, shape->experts);
  expect("weightless_experts", options.weightless_experts, shape->weightless_experts);
  expect("top_k", options.top_k, shape->top_k);
  if (options.num_experts == 0) {
    options.num_experts = shape->experts;
    notes.push_back(fmt::format("num_experts = {} is taken from {}", shape->experts, shape->name));
  }
  if (options.num_experts == shape->experts && options.weightless_experts == 0) {
    options.weightless_experts = shape->weightless_experts;
  }
  options.experts_of_layer = shape->experts_of_layer;
  options.top_k_of_layer = shape->top_k_of_layer;
  if (counts && options.top_k == 0) {
    options.top_k = shape->top_k;
    notes.push_back(fmt::format("top_k = {} is taken from {}", shape->top_k, shape->name));
  }
  return options;
}

// Reads a source in one of the formats that Python decodes.
static std::vector<DecodedSequence> decoded(ImportFormat format, const ImportSource& source, const Decode& decode) {
  if (!decode) {
    throw InputError({.file = source.name},
                     fmt::format("is a {} file, which requires the Python package: pip install .", name_of(format)));
  }
  return decode(format, source);
}

// Reads a source of routes in any format except Megatron-LM's.
static void read_source(ImportFormat format, const ImportSource& source, const Decode& decode,
                        TraceAssembler& assembler) {
  if (format == ImportFormat::kNpy) return import_npy(source, assembler);
  if (is_together(format)) {
    throw InputError({.file = source.name},
                     fmt::format("is a {} file, which cannot be combined with other formats", name_of(format)));
  }
  for (const DecodedSequence& sequence : decoded(format, source, decode)) add_sequence(assembler, sequence);
}

static Imported read_counts(std::span<const ImportSource> sources, const ImportOptions& options, const Decode& decode) {
  std::vector<DecodedSequence> parts;
  for (const ImportSource& source : sources) {
    std::ranges::move(decoded(ImportFormat::kCounts, source, decode), std::back_inserter(parts));
  }
  if (options.keep_invalid_rows) throw InputError({.file = sources.front().name}, "contains counts, not routes");
  if (parts.empty()) throw InputError({.file = sources.front().name}, "contains no counts");
  return import_counts(parts, options);
}

namespace {

// The formats of an import's sources.
struct Formats {
  ImportFormat first;              // of the first source that is not empty
  std::vector<ImportFormat> each;  // once, in the order of the sources
};

Formats formats_of(std::span<const ImportSource> sources, const ImportOptions& options) {
  const auto nonempty = std::ranges::find_if_not(sources, is_empty);
  Formats formats{.first = format_of(nonempty == sources.end() ? sources.front() : *nonempty, options), .each = {}};
  const bool together = is_together(formats.first);
  for (const ImportSource& source : sources) {
    if (is_empty(source) && !together) continue;
    const ImportFormat format = format_of(source, options);
    if (together && format != formats.first) {
      throw InputError({.file = source.name},
                       fmt::format("is a {} file, but {} is a {} file, which cannot be combined with other formats",
                                   name_of(format), sources.front().name, name_of(formats.first)));
    }
    if (std::ranges::find(formats.each, format) == formats.each.end()) formats.each.push_back(format);
  }
  return formats;
}

Imported read_routes(std::span<const ImportSource> sources, ImportFormat first, const ImportOptions& options,
                     const std::optional<ModelShape>& model, const Decode& decode) {
  TraceAssembler assembler(options, model);
  if (is_together(first)) {
    import_megatron_trace(sources, options, assembler);
    return std::move(assembler).finish();
  }
  for (const ImportSource& source : sources) {
    if (is_empty(source) && !options.format) {
      assembler.add_sample([&] { throw InputError({.file = source.name}, "is empty"); });
      continue;
    }
    const std::size_t before = assembler.num_samples();
    read_source(format_of(source, options), source, decode, assembler);
    if (assembler.num_samples() == before) throw InputError({.file = source.name}, "holds no sequence");
  }
  return std::move(assembler).finish();
}

// Adds the lists per layer of the model. Throws InputError if the load has other layers.
void complete(LoadTable& load, const ModelShape& model, const ImportOptions& options, const std::string& name) {
  if (load.num_layers() != model.moe_layers) {
    throw InputError({.file = name}, fmt::format("has {} layers with tokens, but {} (`model`) has {} with experts",
                                                 load.num_layers(), model.name, model.moe_layers));
  }
  load.experts_of_layer = options.experts_of_layer;
  load.top_k_of_layer = options.top_k_of_layer;
  expect_valid(load, name);
}

std::string names_of(std::span<const ImportFormat> formats) {
  std::string names;
  for (const ImportFormat format : formats) names += fmt::format("{}{}", names.empty() ? "" : ", ", name_of(format));
  return names;
}

}  // namespace

Imported import_rollout(std::span<const ImportSource> sources, const ImportOptions& given, const Decode& decode) {
  if (sources.empty()) throw InputError({}, "no file to import");
  check_options(given);
  const auto [first, formats] = formats_of(sources, given);
  if (given.ranks != 0 && first != ImportFormat::kCounts) {
    throw InputError({.field = "ranks"}, fmt::format("applies only to counts without source ranks, but {} is a {} file",
                                                     sources.front().name, name_of(first)));
  }
  std::vector<std::string> notes;
  const bool counts = first == ImportFormat::kMegatronCounts || first == ImportFormat::kCounts;
  const std::optional<ModelShape> model = shape_of_model(given.model);
  const ImportOptions options = complete(given, counts, model, notes);
  Imported result = first == ImportFormat::kMegatronCounts ? import_megatron_counts(sources, options)
                    : first == ImportFormat::kCounts       ? read_counts(sources, options, decode)
                                                           : read_routes(sources, first, options, model, decode);
  if (auto* const load = std::get_if<LoadTable>(&result.value); load != nullptr && model) {
    complete(*load, *model, options, sources.front().name);
  }
  result.report.format = first;
  result.report.notes.insert(result.report.notes.begin(), notes.begin(), notes.end());
  if (auto* trace = std::get_if<RoutingTrace>(&result.value)) {
    const std::string names = names_of(formats);
    trace->whole_batches = is_together(first);
    trace->origin = fmt::format("imported from {} {} of {} {}", sources.size(), sources.size() == 1 ? "file" : "files",
                                formats.size() == 1 ? "format" : "formats", names);
    if (formats.size() > 1) result.report.notes.push_back("the files are of several formats: " + names);
  }
  return result;
}

RoutingTrace import_sequences(std::span<const DecodedSequence> sequences, ImportOptions options) {
  if (sequences.empty()) throw InputError({}, "no sequence to import");
  check_options(options);
  options.strict = true;
  TraceAssembler assembler(options);
  for (const DecodedSequence& sequence : sequences) add_sequence(assembler, sequence);
  return std::get<RoutingTrace>(std::move(assembler).finish().value);
}

Imported import_files(std::span<const std::string> paths, const ImportOptions& options, const Decode& decode) {
  std::vector<std::unique_ptr<const MappedFile>> files;
  std::vector<ImportSource> sources;
  std::size_t most_copied = MappedFile::kMostCopied;  // of all files
  for (const std::string& path : paths) {
    files.push_back(MappedFile::or_stream(path, most_copied));
    most_copied -= std::min(most_copied, files.back()->bytes().size());
    sources.push_back({path == "-" ? "standard input" : path, files.back()->bytes()});
  }
  return import_rollout(sources, options, decode);
}

}  // namespace foremoe
