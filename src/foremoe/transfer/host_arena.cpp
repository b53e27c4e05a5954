#include "foremoe/transfer/host_arena.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstring>
#include <utility>

#include "foremoe/core/error.h"

namespace foremoe {

// Memory: the header, one entry per expert (its version, then one checksum per segment), then the experts.
struct HostArena::Header {
  std::uint64_t magic = 0x414E455241454F4D;  // distinguishes arenas from other segments
  std::uint64_t experts = 0;                 // number of experts, then a checksum over their layers and ids
  std::uint64_t experts_checksum = 0;
  std::uint64_t segments = 0;
  std::uint64_t expert_bytes = 0;

  friend bool operator==(const Header&, const Header&) = default;
};

struct HostArena::Entry {
  std::atomic<std::uint64_t> version;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "else it could not be shared between processes");

namespace {

constexpr std::size_t kLine = 64;  // bytes

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

std::size_t entry_bytes(const ExpertLayout& layout) {
  return aligned(sizeof(std::uint64_t) * (1 + layout.num_segments()));
}

}  // namespace

HostArena::HostArena(SharedMemory memory, std::span<const ArenaExpert> experts, ExpertLayout layout)
    : memory_(std::move(memory)), experts_(experts.begin(), experts.end()), layout_(std::move(layout)) {
  assert(std::is_sorted(experts_.begin(), experts_.end()));
}

HostArena::Header HostArena::expected_header() const {
  return {.experts = experts_.size(),
          .experts_checksum = foremoe::checksum(std::as_bytes(std::span(experts_))),
          .segments = layout_.num_segments(),
          .expert_bytes = static_cast<std::uint64_t>(layout_.bytes().value)};
}

std::size_t HostArena::first_expert() const { return aligned(sizeof(Header)) + experts_.size() * entry_bytes(layout_); }

HostArena HostArena::create(std::span<const ArenaExpert> experts, const ExpertLayout& layout) {
  HostArena arena({}, experts, layout);
  const std::size_t bytes = arena.first_expert() + experts.size() * static_cast<std::size_t>(layout.bytes().value);
  arena.memory_ = SharedMemory::create("arena", Bytes{bytes});
  const Header header = arena.expected_header();
  std::memcpy(arena.memory_.bytes().data(), &header, sizeof header);
  return arena;
}

HostArena HostArena::open(const std::string& name, std::span<const ArenaExpert> experts, const ExpertLayout& layout) {
  HostArena arena(SharedMemory::open(name), experts, layout);
  Header header;
  const std::size_t bytes = arena.first_expert() + experts.size() * static_cast<std::size_t>(layout.bytes().value);
  if (arena.memory_.bytes().size() == bytes) std::memcpy(&header, arena.memory_.bytes().data(), sizeof header);
  if (header != arena.expected_header()) {
    throw InputError({.file = name}, fmt::format("is not an arena of these {} experts of {} bytes", experts.size(),
                                                 layout.bytes().value));
  }
  return arena;
}

Bytes HostArena::bytes() const { return Bytes{memory_.bytes().size()}; }

int HostArena::index_of(ArenaExpert expert) const {
  const auto at = std::lower_bound(experts_.begin(), experts_.end(), expert);
  return at != experts_.end() && *at == expert ? static_cast<int>(at - experts_.begin()) : -1;
}

HostArena::Entry& HostArena::entry(int index) const {
  assert(index >= 0 && static_cast<std::size_t>(index) < experts_.size());
  return *reinterpret_cast<Entry*>(memory_.bytes().data() + aligned(sizeof(Header)) +
                                   static_cast<std::size_t>(index) * entry_bytes(layout_));
}

std::uint64_t* HostArena::checksums(int index) const {
  return reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::byte*>(&entry(index)) + sizeof(Entry));
}

std::byte* HostArena::expert(int index) const {
  return memory_.bytes().data() + first_expert() +
         static_cast<std::size_t>(index) * static_cast<std::size_t>(layout_.bytes().value);
}

void HostArena::publish(int index, std::uint64_t version, std::span<const std::byte* const> segments) {
  assert(version > 0 && segments.size() == layout_.num_segments());
  entry(index).version.exchange(0, std::memory_order_acq_rel);  // later writes stay after this
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const auto bytes = static_cast<std::size_t>(layout_.segments()[s].bytes().value);
    checksums(index)[s] = copy_and_checksum(expert(index) + layout_.offset(s), {segments[s], bytes});
  }
  entry(index).version.store(version, std::memory_order_release);  // pairs with version()
}

std::uint64_t HostArena::version(int index) const { return entry(index).version.load(std::memory_order_acquire); }

std::uint64_t HostArena::checksum(int index, std::size_t segment) const { return checksums(index)[segment]; }

const std::byte* HostArena::segment(int index, std::size_t segment) const {
  return expert(index) + layout_.offset(segment);
}

}  // namespace foremoe
