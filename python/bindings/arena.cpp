// HostArena: expert weights in shared memory of one node.
//
// Unlike other objects exposed to Python, an arena is mutable: this and other processes write it with publish().
// Readers check version and checksums.

#include "foremoe/transfer/host_arena.h"

#include <fmt/format.h>

#include "bindings.h"
#include "foremoe/core/error.h"

namespace foremoe::python {
namespace {

using Bytes8 = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes8 = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Arena {
  HostArena arena;
  ExpertLayout layout;

  int at(int place) const {
    const auto last = static_cast<int>(arena.num_experts()) - 1;
    if (place >= 0 && place <= last) return place;
    throw InputError({.field = "place"}, fmt::format("{}, {}", place, must_be_integer(0, last)));
  }

  std::span<const std::byte> segment(int index, std::size_t s) const {
    return {arena.segment(index, s), static_cast<std::size_t>(layout.segments()[s].bytes().value)};
  }
};

// Returns placeholder ids, one per place. Python assigns experts to places, differently in each phase.
std::vector<ArenaExpert> numbered(int places) {
  if (places < 1) throw InputError({.field = "places"}, fmt::format("{}, must be above 0", places));
  std::vector<ArenaExpert> list;
  for (int place = 0; place < places; ++place) list.push_back({.layer = LayerId{0}, .expert = ExpertId{place}});
  return list;
}

// Makes a layout from segment sizes only.
ExpertLayout layout_of(const std::vector<std::int64_t>& segment_bytes) {
  constexpr std::int64_t kElement = 2;  // bytes of the shortest type
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

// Returns pointers to the arrays' data. Throws InputError if their number or sizes differ from the segments'.
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

void publish(Arena& self, int place, std::uint64_t version, const std::vector<ConstBytes8>& segments) {
  const int index = self.at(place);
  if (version == 0) throw InputError({.field = "version"}, "must be above 0");
  const auto pointers = pointers_to<const std::byte*>(segments, self);
  const ReleasedGil release;
  self.arena.publish(index, version, pointers);
}

bool is_intact(const Arena& self, int place, std::uint64_t version) {
  const int index = self.at(place);
  const ReleasedGil release;
  if (self.arena.version(index) != version) return false;
  for (std::size_t s = 0; s < self.layout.num_segments(); ++s) {
    if (checksum(self.segment(index, s)) != self.arena.checksum(index, s)) return false;
  }
  return true;
}

bool copy(const Arena& self, int place, std::uint64_t version, const std::vector<Bytes8>& segments) {
  const int index = self.at(place);
  const auto pointers = pointers_to<std::byte*>(segments, self);
  const ReleasedGil release;
  if (self.arena.version(index) != version) return false;
  bool intact = true;
  for (std::size_t s = 0; s < pointers.size(); ++s) {
    if (copy_and_checksum(pointers[s], self.segment(index, s)) != self.arena.checksum(index, s)) intact = false;
  }
  return intact;
}

std::vector<nb::ndarray<nb::numpy, std::uint8_t>> segments_of(const nb::object& self, int place) {
  const auto& arena = nb::cast<const Arena&>(self);
  const int index = arena.at(place);
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
  nb::class_<Arena>(m, "HostArena", R"(Places for experts in shared memory of one node.

An expert consists of byte segments, one per weight. Each publication has a version and a checksum per segment. Used by
foremoe.torch.)")
      .def_static(
          "create",
          [](int places, const std::vector<std::int64_t>& segment_bytes) {
            const ExpertLayout layout = layout_of(segment_bytes);
            return Arena{HostArena::create(numbered(places), layout), layout};
          },
          "places"_a, "segment_bytes"_a,
          R"(Creates shared memory under a new name.

Args:
    places: Number of experts that it can contain.
    segment_bytes: Size of each segment of an expert, even.

Raises:
    InputError: if there is too little memory.)")
      .def_static(
          "open",
          [](const std::string& name, int places, const std::vector<std::int64_t>& segment_bytes) {
            const ExpertLayout layout = layout_of(segment_bytes);
            return Arena{HostArena::open(name, numbered(places), layout), layout};
          },
          "name"_a, "places"_a, "segment_bytes"_a,
          R"(Opens the arena that another process created.

Raises:
    InputError: if no such memory exists or its places differ.)")
      .def_prop_ro("name", [](const Arena& a) { return a.arena.name(); })
      .def_prop_ro("num_bytes", [](const Arena& a) { return a.arena.bytes().value; })
      .def(
          "remove_name", [](Arena& a) { a.arena.remove_name(); },
          "Removes the name, so that no process can open the arena. Memory is freed after the last process closes it. "
          "Only the creator may call this.")
      .def("publish", &publish, "place"_a, "version"_a, "segments"_a.noconvert(),
           "Writes an expert, given as one uint8 array per segment, and then its version (> 0). One writer per place.")
      .def(
          "version", [](const Arena& a, int place) { return a.arena.version(a.at(place)); }, "place"_a,
          "Version of the expert at this place; 0 if none has been published.")
      .def("is_intact", &is_intact, "place"_a, "version"_a,
           "Returns whether this place contains this version with the published bytes.")
      .def("copy", &copy, "place"_a, "version"_a, "segments"_a.noconvert(),
           R"(Copies an expert into uint8 arrays, one per segment.

Returns:
    False if the version differs or the bytes are not those published. The arrays' contents are then undefined.)")
      .def("segments", &segments_of, "place"_a, "Writable views of an expert's segments, uint8 [bytes] each.")
      .def("__repr__", [](const Arena& a) {
        return fmt::format("<foremoe.HostArena: {} places, {} bytes>", a.arena.num_experts(), a.arena.bytes().value);
      });
}

}  // namespace foremoe::python
