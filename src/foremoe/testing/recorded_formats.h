#pragma once

// For the importers' tests: bytes of recorded formats, and results of imports.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/core/error.h"
#include "foremoe/rollout/importers/importer.h"

namespace foremoe::testing {

using Ids = std::vector<std::int64_t>;

// Encodes ids as little-endian integers of `bytes` bytes each.
inline std::string raw(const Ids& ids, std::size_t bytes) {
  std::string out;
  for (const std::int64_t id : ids) {
    for (std::size_t b = 0; b < bytes; ++b) out.push_back(static_cast<char>(static_cast<std::uint64_t>(id) >> 8 * b));
  }
  return out;
}

inline std::string npy_with_header(std::string header, std::string_view payload) {
  header += '\n';
  return std::string("\x93NUMPY\x01\x00", 8) + raw({static_cast<std::int64_t>(header.size())}, 2) + header +
         std::string(payload);
}

// Makes a .npy file. `descr`: for example "|u1"; `shape`: for example "(2, 1, 2)".
inline std::string npy(const std::string& descr, const std::string& shape, std::string_view payload,
                       bool fortran = false) {
  return npy_with_header(
      "{'descr': '" + descr + "', 'fortran_order': " + (fortran ? "True" : "False") + ", 'shape': " + shape + ", }",
      payload);
}

struct NamedText {
  std::string name;
  std::string text;
};

inline Imported import_texts(const std::vector<NamedText>& files, const ImportOptions& options = {}) {
  std::vector<ImportSource> sources;
  for (const NamedText& file : files) {
    sources.push_back({file.name, {reinterpret_cast<const std::byte*>(file.text.data()), file.text.size()}});
  }
  return import_rollout(sources, options);
}

inline Imported import_text(const std::string& text, const ImportOptions& options = {}) {
  return import_texts({{"in", text}}, options);
}

// Returns the message of the InputError that the import throws; empty if it throws none.
inline std::string error_of(const std::vector<NamedText>& files, const ImportOptions& options = {}) {
  try {
    import_texts(files, options);
    return {};
  } catch (const InputError& error) {
    return error.what();
  }
}

inline std::string error_of(const std::string& text, const ImportOptions& options = {}) {
  return error_of({{"in", text}}, options);
}

// Returns all entries, widened to int64, as [tokens][layers][top_k]; −1 in missing rows.
inline Ids routes_of(const RoutingTrace& trace) {
  Ids out;
  std::vector<ExpertId> row(static_cast<std::size_t>(trace.top_k));
  for (std::int64_t t = 0; t < trace.num_tokens; ++t) {
    for (int l = 0; l < trace.num_layers; ++l) {
      trace.route(t, LayerId{l}, row);
      for (const ExpertId expert : row) out.push_back(expert.value);
    }
  }
  return out;
}

inline Ids routes_of(const Imported& imported) { return routes_of(*imported.trace()); }

}  // namespace foremoe::testing
