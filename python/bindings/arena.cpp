// HostArena: weights of experts in memory that the processes of one node share.
//
// Unlike what else Python holds, an arena changes: publish() writes it, and other processes do. Its readers learn from
// version and checksums what they have read.

#include "foremoe/transfer/host_arena.h"

#include <fmt/format.h>

#include <algorithm>

#include "bindings.h"
#include "foremoe/core/error.h"

namespace foremoe::python {
namespace {

using Experts = std::vector<std::pair<int, int>>;
using Bytes8 = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes8 = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Arena {
  HostArena arena;
  ExpertLayout layout;

  int index_of(std::pair<int, int> expert) const {
    const int index = arena.index_of({LayerId{expert.first}, ExpertId{expert.second}});
    if (index >= 0) return index;
    throw InputError({.field = "expert"}, fmt::format("layer {}, expert {} is not in it", expert.first, expert.second));
  }

  std::span<const std::byte> segment(int index, std::size_t s) const {
    return {arena.segment(index, s), static_cast<std::size_t>(layout.segments()[s].bytes().value)};
  }
};

std::vector<ArenaExpert> listed(const Experts& experts) {
  std::vector<ArenaExpert> list;
  for (const auto& [layer, expert] : experts) list.push_back({.layer = LayerId{layer}, .expert = ExpertId{expert}});
  if (std::ranges::is_sorted(list)) return list;
  throw InputError({.field = "experts"}, "must ascend");
}

// Of segments that are known by their sizes alone.
ExpertLayout layout_of(const std::vector<std::int64_t>& segment_bytes) {
  constexpr std::int64_t kElement = 2;  // bytes, of the shortest type
  constexpr std::int64_t kMost = std::int64_t{1} << 36;
  std::vector<Segment> segments;
  for (const std::int64_t bytes : segment_bytes) {
    if (bytes <= 0 || bytes > kMost || bytes % kElement != 0) {
      throw InputError({.field = "segment_bytes"}, fmt::format("{} is not an even number in 2 … {}", bytes, kMost));
    }
    segments.push_back({.name = fmt::format("segment {}", segments.size()),
                        .elements = bytes / kElement,
                        .type = DataType::kBfloat16});
  }
  return ExpertLayout(std::move(segments));
}

// Pointers to arrays that are as long as the segments.
template <class Pointer, class Array>
std::vector<Pointer> pointers_to(const std::vector<Array>& arrays, const Arena& arena) {
  if (arrays.size() != arena.layout.num_segments()) {
    throw InputError({.field = "segments"},
                     fmt::format("{} arrays, expected {}", arrays.size(), arena.layout.num_segments()));
  }
  std::vector<Pointer> pointers;
  for (std::size_t s = 0; s < arrays.size(); ++s) {
    if (arrays[s].size() != arena.segment(0, s).size()) {
      throw InputError({.field = "segments", .index = fmt::format("[{}]", s)},
                       fmt::format("{} bytes, expected {}", arrays[s].size(), arena.segment(0, s).size()));
    }
    pointers.push_back(reinterpret_cast<Pointer>(arrays[s].data()));
  }
  return pointers;
}

void publish(Arena& self, std::pair<int, int> expert, std::uint64_t version, const std::vector<ConstBytes8>& segments) {
  const int index = self.index_of(expert);
  if (version == 0) throw InputError({.field = "version"}, "must be above 0");
  const auto pointers = pointers_to<const std::byte*>(segments, self);
  const nb::gil_scoped_release release;
  self.arena.publish(index, version, pointers);
}

bool is_intact(const Arena& self, std::pair<int, int> expert, std::uint64_t version) {
  const int index = self.index_of(expert);
  const nb::gil_scoped_release release;
  if (self.arena.version(index) != version) return false;
  for (std::size_t s = 0; s < self.layout.num_segments(); ++s) {
    if (checksum(self.segment(index, s)) != self.arena.checksum(index, s)) return false;
  }
  return true;
}

bool copy(const Arena& self, std::pair<int, int> expert, std::uint64_t version, const std::vector<Bytes8>& segments) {
  const int index = self.index_of(expert);
  const auto pointers = pointers_to<std::byte*>(segments, self);
  const nb::gil_scoped_release release;
  if (self.arena.version(index) != version) return false;
  bool intact = true;
  for (std::size_t s = 0; s < pointers.size(); ++s) {
    if (copy_and_checksum(pointers[s], self.segment(index, s)) != self.arena.checksum(index, s)) intact = false;
  }
  return intact;
}

std::vector<nb::ndarray<nb::numpy, std::uint8_t>> segments_of(const nb::object& self, std::pair<int, int> expert) {
  const auto& arena = nb::cast<const Arena&>(self);
  const int index = arena.index_of(expert);
  std::vector<nb::ndarray<nb::numpy, std::uint8_t>> segments;
  for (std::size_t s = 0; s < arena.layout.num_segments(); ++s) {
    const std::span<const std::byte> bytes = arena.segment(index, s);
    const std::size_t size = bytes.size();
    segments.emplace_back(const_cast<std::byte*>(bytes.data()), 1, &size, self);
  }
  return segments;
}

}  // namespace

void bind_arena(nb::module_& m) {
  nb::class_<Arena>(m, "HostArena", R"(Weights of experts in memory that the processes of one node share.

An expert is (layer, expert), and consists of segments of bytes: its weights, one after the other. It is written under a
version, with a checksum of each segment. Used by foremoe.torch.)")
      .def_static(
          "create",
          [](const Experts& experts, const std::vector<std::int64_t>& segment_bytes) {
            const ExpertLayout layout = layout_of(segment_bytes);
            return Arena{HostArena::create(listed(experts), layout), layout};
          },
          "experts"_a, "segment_bytes"_a,
          R"(Memory of a new name for these experts, ascending. segment_bytes: of each segment, even.

Raises InputError where there is too little memory.)")
      .def_static(
          "open",
          [](const std::string& name, const Experts& experts, const std::vector<std::int64_t>& segment_bytes) {
            const ExpertLayout layout = layout_of(segment_bytes);
            return Arena{HostArena::open(name, listed(experts), layout), layout};
          },
          "name"_a, "experts"_a, "segment_bytes"_a,
          "What another process has created. Raises InputError where there is no such memory, or it is of others.")
      .def_prop_ro("name", [](const Arena& a) { return a.arena.name(); })
      .def_prop_ro("num_bytes", [](const Arena& a) { return a.arena.bytes().value; })
      .def(
          "remove_name", [](Arena& a) { a.arena.remove_name(); },
          "Nobody can open it any more; it lives until the last process that has it lets go. By its creator.")
      .def("publish", &publish, "expert"_a, "version"_a, "segments"_a.noconvert(),
           "Writes an expert, uint8 arrays of its segments, then its version, above 0. One writer per expert.")
      .def(
          "version", [](const Arena& a, std::pair<int, int> expert) { return a.arena.version(a.index_of(expert)); },
          "expert"_a, "Under which the expert was published; 0: not yet.")
      .def("is_intact", &is_intact, "expert"_a, "version"_a,
           "Is the expert there in this version, with the bytes that were published?")
      .def("copy", &copy, "expert"_a, "version"_a, "segments"_a.noconvert(),
           R"(Copies an expert into uint8 arrays, one per segment; False: not that version, or not the bytes published.

Then what the arrays hold is undefined.)")
      .def("segments", &segments_of, "expert"_a, "Views of an expert's segments, uint8 [bytes] each, writable.")
      .def("__repr__", [](const Arena& a) {
        return fmt::format("<foremoe.HostArena: {} experts, {} bytes>", a.arena.num_experts(), a.arena.bytes().value);
      });
}

}  // namespace foremoe::python
