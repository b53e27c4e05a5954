#include "foremoe/rollout/importers/importer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>

#include "foremoe/core/mapped_file.h"
#include "foremoe/rollout/importers/base64.h"
#include "foremoe/rollout/importers/formats.h"
#include "foremoe/rollout/importers/lines.h"

namespace foremoe {

namespace {

constexpr std::array<std::pair<ImportFormat, std::string_view>, 8> kNames{
    {{ImportFormat::kNpy, "npy"},
     {ImportFormat::kNpz, "npz"},
     {ImportFormat::kNpyBase64, "npy-base64"},
     {ImportFormat::kJson, "json"},
     {ImportFormat::kSglang, "sglang"},
     {ImportFormat::kNrlre1, "nrlre1"},
     {ImportFormat::kMegatronTrace, "megatron-trace"},
     {ImportFormat::kMegatronCounts, "megatron-counts"}}};

void check_options(const ImportOptions& options) {
  const auto not_negative = [](const char* field, int value) {
    if (value < 0) throw InputError({.field = field}, fmt::format("{} is negative", value));
  };
  not_negative("num_experts", options.num_experts);
  if (options.num_experts > kMaxImportedExperts) {
    throw InputError({.field = "num_experts"},
                     fmt::format("{} is more than {}", options.num_experts, kMaxImportedExperts));
  }
  not_negative("num_layers", options.num_layers);
  not_negative("top_k", options.top_k);
  not_negative("ranks_per_node", options.ranks_per_node);
}

void import_sequences(ImportFormat format, const ImportSource& source, const ImportOptions& options,
                      TraceAssembler& assembler) {
  switch (format) {
    case ImportFormat::kNpy:
      return import_npy(source, assembler);
    case ImportFormat::kNpz:
      return import_npz(source, assembler);
    case ImportFormat::kNpyBase64:
      return import_npy_base64(source, assembler);
    case ImportFormat::kJson:
      return import_json(source, options, assembler);
    case ImportFormat::kSglang:
      return import_sglang(source, options, assembler);
    case ImportFormat::kNrlre1:
      return import_nrlre1(source, assembler);
    case ImportFormat::kMegatronTrace:
    case ImportFormat::kMegatronCounts:
      throw InputError({.file = source.name},
                       fmt::format("is a {} file, which does not mix with other formats", name_of(format)));
  }
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

ImportFormat detect_format(const ImportSource& source, const ImportOptions& options) {
  const std::string_view text = text_of(source);
  if (text.starts_with("\x93NUMPY")) return ImportFormat::kNpy;
  if (text.starts_with("PK\x03\x04") || text.starts_with("PK\x05\x06")) return ImportFormat::kNpz;
  const std::string_view content = trimmed(text);
  const std::string_view first_line = trimmed(content.substr(0, content.find('\n')));
  if (first_line.starts_with("nrlre1:")) return ImportFormat::kNrlre1;
  if (first_line.starts_with("k05VTVBZ") && looks_like_base64(first_line)) return ImportFormat::kNpyBase64;
  if (first_line.starts_with('{') || first_line.starts_with('[')) {
    if (first_line.find("\"top_indices\"") != std::string_view::npos) return ImportFormat::kMegatronTrace;
    if (first_line.find("\"tpe\"") != std::string_view::npos) return ImportFormat::kMegatronCounts;
    return ImportFormat::kJson;
  }
  if (!content.empty() && options.num_layers > 0 && options.top_k > 0) return ImportFormat::kSglang;
  throw InputError({.file = source.name},
                   "is in no format that could be recognised (a headerless array needs its layers and top_k)");
}

Imported import_rollout(std::span<const ImportSource> sources, const ImportOptions& options) {
  if (sources.empty()) throw InputError({}, "no file to import");
  check_options(options);
  const auto format_of = [&](const ImportSource& source) {
    return options.format ? *options.format : detect_format(source, options);
  };
  const ImportFormat first = format_of(sources.front());
  const bool together = first == ImportFormat::kMegatronTrace || first == ImportFormat::kMegatronCounts;
  std::vector<ImportFormat> formats;  // those that occur
  for (const ImportSource& source : sources) {
    const ImportFormat format = format_of(source);
    if (together && format != first) {
      throw InputError({.file = source.name},
                       fmt::format("is a {} file, but {} is a {} file, which does not mix with other formats",
                                   name_of(format), sources.front().name, name_of(first)));
    }
    if (std::find(formats.begin(), formats.end(), format) == formats.end()) formats.push_back(format);
  }
  const auto imported = [&] {
    if (first == ImportFormat::kMegatronCounts) return import_megatron_counts(sources, options);
    TraceAssembler assembler(options);
    if (together) {
      import_megatron_trace(sources, options, assembler);
    } else {
      for (const ImportSource& source : sources) {
        const std::size_t before = assembler.num_sequences();
        import_sequences(format_of(source), source, options, assembler);
        if (assembler.num_sequences() == before) throw InputError({.file = source.name}, "holds no sequence");
      }
    }
    return std::move(assembler).finish();
  };
  Imported result = imported();
  result.report.format = first;
  if (auto* trace = std::get_if<RoutingTrace>(&result.value)) {
    std::string names;
    for (const ImportFormat format : formats) names += fmt::format("{}{}", names.empty() ? "" : ", ", name_of(format));
    trace->origin = fmt::format("imported from {} {} of {} {}", sources.size(), sources.size() == 1 ? "file" : "files",
                                formats.size() == 1 ? "format" : "formats", names);
    if (formats.size() > 1) result.report.notes.push_back("the files are of several formats: " + names);
  }
  return result;
}

Imported import_files(std::span<const std::string> paths, const ImportOptions& options) {
  std::vector<std::unique_ptr<MappedFile>> files;
  std::vector<ImportSource> sources;
  for (const std::string& path : paths) {
    files.push_back(std::make_unique<MappedFile>(path));
    sources.push_back({path, files.back()->bytes()});
  }
  return import_rollout(sources, options);
}

}  // namespace foremoe
