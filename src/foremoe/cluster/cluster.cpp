#include "foremoe/cluster/cluster.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <set>
#include <span>
#include <type_traits>
#include <utility>

#include "foremoe/cluster/toml_file.h"
#include "foremoe/core/did_you_mean.h"
#include "foremoe/core/error.h"
#include "foremoe/core/mapped_file.h"

namespace foremoe {

std::span<const EmbeddedFile> cluster_presets();  // data/clusters, embedded by src/foremoe/CMakeLists.txt

namespace {

std::string dotted(std::string_view section, std::string_view key) {
  return section.empty() ? std::string(key) : fmt::format("{}.{}", section, key);
}

bool same_name(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) == std::tolower(static_cast<unsigned char>(y));
  });
}

const EmbeddedFile* find_preset(std::string_view name) {
  for (const EmbeddedFile& preset : cluster_presets()) {
    if (same_name(preset.name, name)) return &preset;
  }
  return nullptr;
}

// Converts one parsed cluster file into a Cluster, key by key.
class ClusterReader {
 public:
  ClusterReader(toml::table root, const std::string& file) : root_{std::move(root)}, file_{file} {}

  Cluster read() {
    const bool is_whole = root_.get("base") == nullptr;
    Cluster cluster = is_whole ? Cluster{} : base();
    expect_known_keys(cluster);
    cluster.name = read_toml_name(root_, file_);
    visit_keys(cluster, [&](std::string_view section, std::string_view key, auto& member, const KeyRange& range) {
      using Member = std::remove_reference_t<decltype(member)>;
      constexpr bool kWhole = !std::is_same_v<Member, double>;
      const toml::node* const node = find(section, key);
      if (node == nullptr && (range.optional || !is_whole)) return;
      if (node == nullptr) throw InputError({.file = file_, .field = dotted(section, key)}, "is missing");
      const double value = read_number(*node, dotted(section, key), range, kWhole);  // exact: integers are below 2^53
      if constexpr (std::is_same_v<Member, Bytes>) {
        member = Bytes{static_cast<std::int64_t>(value)};
      } else {
        member = static_cast<Member>(value);
      }
    });
    if (cluster.ranks_per_switch > cluster.ranks_per_node) {
      throw InputError(
          {.file = file_, .field = "node.ranks_per_switch"},
          fmt::format("{} is more than the {} ranks of a node", cluster.ranks_per_switch, cluster.ranks_per_node));
    }
    return cluster;
  }

 private:
  // Returns the preset that has the values of all keys that the file leaves out.
  Cluster base() const {
    const toml::node& node = *root_.get("base");
    const EmbeddedFile* const preset = node.is_string() ? find_preset(node.as_string()->get()) : nullptr;
    if (preset == nullptr) {
      throw InputError({.file = file_, .field = "base", .index = line_of(node)},
                       fmt::format("must be one of {}, in quotes", fmt::join(cluster_names(), ", ")));
    }
    return parse_cluster(preset->text, fmt::format("{}.toml", preset->name));
  }

  const toml::node* find(std::string_view section, std::string_view key) const {
    const toml::table* table = &root_;
    if (!section.empty()) {
      const toml::node* const node = root_.get(section);
      if (node != nullptr && !node->is_table()) {
        throw InputError({.file = file_, .field = std::string(section), .index = line_of(*node)},
                         fmt::format("must be a section, [{}]", section));
      }
      table = node == nullptr ? nullptr : node->as_table();
    }
    return table == nullptr ? nullptr : table->get(key);
  }

  double read_number(const toml::node& node, const std::string& name, const KeyRange& range, bool whole) const {
    const Where where{.file = file_, .field = name, .index = line_of(node)};
    const auto* const integer = node.as_integer();
    const auto* const real = node.as_floating_point();
    if (integer == nullptr && real == nullptr) throw InputError(where, fmt::format("must be a number, {}", range.unit));
    const double value = integer != nullptr ? static_cast<double>(integer->get()) : real->get();
    if (!(value >= range.least && value <= range.most)) {  // also rejects nan
      throw InputError(
          where, fmt::format("{:g} is not between {:g} and {:g} ({})", value, range.least, range.most, range.unit));
    }
    if (whole && value != std::floor(value)) throw InputError(where, fmt::format("{} is not a whole number", value));
    return value;
  }

  // Runs first, so that a misspelt key is reported as unknown, not as missing.
  void expect_known_keys(const Cluster& cluster) {
    known_.insert({"base", "name"});
    visit_keys(cluster, [&](std::string_view section, std::string_view key, const auto&, const KeyRange&) {
      if (!section.empty()) known_.insert(std::string(section));
      known_.insert(dotted(section, key));
    });
    expect_known(root_, "");
  }

  void expect_known(const toml::table& table, std::string_view section) {
    for (const auto& [key, node] : table) {
      const std::string name = dotted(section, key.str());
      if (!known_.contains(name)) {
        throw InputError({.file = file_, .field = name, .index = line_of(node)}, "is not a key of a cluster file");
      }
      if (node.is_table()) expect_known(*node.as_table(), name);
    }
  }

  const toml::table root_;
  const std::string& file_;
  std::set<std::string, std::less<>> known_;  // valid sections and keys
};

// Uses the short form if parsing it returns the same value: 9.894e+14, not 989400000000000.0.
std::string number(double value) {
  const std::string brief = fmt::format("{:g}", value);
  return std::stod(brief) == value ? brief : fmt::format("{}", value);
}
std::string number(int value) { return fmt::format("{}", value); }
std::string number(Bytes value) { return fmt::format("{}", value.value); }

// Returns the text as a TOML basic string, with quotes, backslashes and control characters escaped.
std::string in_quotes(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (is_control(c)) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

Cluster parse_cluster(std::string_view text, const std::string& file) {
  return ClusterReader(parse_toml(text, file), file).read();
}

Cluster read_cluster(const std::string& path) { return parse_cluster(MappedFile(path).text(), path); }

std::string to_toml(const Cluster& cluster, const ClusterNotes& notes) {
  const auto line = [&](const std::string& name, std::string_view key, const std::string& value) {
    const auto note = notes.find(name);
    std::string comment = note == notes.end() ? "" : "  # " + note->second;
    std::replace(comment.begin(), comment.end(), '\n', ' ');
    return fmt::format("{} = {}{}\n", key, value, comment);
  };
  std::string out = line("name", "name", in_quotes(cluster.name));
  std::string_view section_now;
  visit_keys(cluster, [&](std::string_view section, std::string_view key, const auto& value, const KeyRange&) {
    if (section != section_now) out += fmt::format("\n[{}]\n", section);
    section_now = section;
    out += line(dotted(section, key), key, number(value));
  });
  return out;
}

std::vector<std::string> cluster_names() {
  std::vector<std::string> names;
  for (const EmbeddedFile& preset : cluster_presets()) names.emplace_back(preset.name);
  return names;
}

Cluster find_cluster(std::string_view name_or_path) {
  if (const EmbeddedFile* const preset = find_preset(name_or_path)) {
    return parse_cluster(preset->text, fmt::format("{}.toml", preset->name));
  }
  const std::string path(name_or_path);
  std::error_code error;
  if (!path.empty() && std::filesystem::exists(path, error)) return read_cluster(path);
  throw InputError({.field = "cluster"},
                   fmt::format("'{}' is neither a file nor one of {}{}", path, fmt::join(cluster_names(), ", "),
                               did_you_mean(name_or_path, cluster_names())));
}

}  // namespace foremoe
