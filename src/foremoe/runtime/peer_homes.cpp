#include "foremoe/runtime/peer_homes.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cassert>
#include <cstring>

namespace foremoe {
namespace {

std::atomic_ref<std::uint64_t> version_at(const std::byte* memory) {
  // C++20's atomic_ref does not accept const. Readers only load.
  return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(memory)));
}

constexpr std::size_t kInPlace = sizeof(std::uint64_t);  // offset of the put_in_place() counter, after the version

bool any_staged(const TransferSchedule& schedule) {
  return std::ranges::any_of(schedule.copies, &ScheduledCopy::staged);
}

using Name = std::array<char, 128>;

// Returns the rank that writes the i-th expert of a node's arena.
RankId writer_of(std::size_t i, NodeId node, RankId owner, const Topology& topology) {
  if (topology.node_of(owner) == node) return owner;
  const RankRange ranks = topology.ranks_of(node);
  return RankId{ranks.first + static_cast<int>(i) % ranks.size()};
}

// Sends weights to arena writers that cannot read the owner's memory. Exchanges one layer at a time to limit memory.
class Messages {
 public:
  Messages(const PhaseParts& parts, const PeerHomes& homes, Communicator& communicator)
      : parts_(parts), homes_(homes), communicator_(communicator) {}

  void exchange_layer(LayerId layer, HostArena* arena, std::uint64_t version);

 private:
  // Calls f(index in the arena, expert, writer, owner) for each expert whose writer is not its owner, in node order.
  template <class F>
  void for_each(LayerId layer, F f) const {
    const Topology& topology = communicator_.topology();
    for (int n = 0; n < topology.num_nodes(); ++n) {
      const std::vector<ArenaExpert>& experts = parts_.schedule().arena[static_cast<std::size_t>(n)];
      for (std::size_t i = 0; i < experts.size(); ++i) {
        if (experts[i].layer != layer) continue;
        const RankId owner = parts_.plan().home(layer, experts[i].expert);
        const RankId writer = writer_of(i, NodeId{n}, owner, topology);
        if (writer != owner) f(static_cast<int>(i), experts[i], writer, owner);
      }
    }
  }

  const PhaseParts& parts_;
  const PeerHomes& homes_;
  Communicator& communicator_;
};

void Messages::exchange_layer(LayerId layer, HostArena* arena, std::uint64_t version) {
  const RankId self = communicator_.rank();
  const auto bytes = static_cast<std::size_t>(parts_.layout.bytes().value);
  const auto num_ranks = static_cast<std::size_t>(communicator_.num_ranks());
  std::vector<std::vector<std::byte>> to(num_ranks);
  std::vector<std::vector<int>> from(num_ranks);  // indices in this node's arena, in order of arrival
  for_each(layer, [&](int index, ArenaExpert expert, RankId writer, RankId owner) {
    // Mapping is mutual: a rank that cannot read this rank's homes cannot be read by this rank.
    if (owner == self && !homes_.reachable(writer)) {
      std::vector<std::byte>& out = to[writer.index()];
      const std::size_t at = out.size();
      out.resize(at + bytes);
      const auto segments = homes_.home(layer, expert.expert);
      for (std::size_t i = 0; i < segments.size(); ++i) {
        std::memcpy(out.data() + at + parts_.layout.offset(i), segments[i],
                    static_cast<std::size_t>(parts_.layout.segments()[i].bytes().value));
      }
    }
    if (writer == self && !homes_.reachable(owner)) from[owner.index()].push_back(index);
  });

  std::vector<std::byte> send;
  std::vector<std::int64_t> send_bytes;
  std::vector<std::int64_t> receive_bytes;
  std::int64_t received = 0;
  for (std::size_t r = 0; r < num_ranks; ++r) {
    send.insert(send.end(), to[r].begin(), to[r].end());
    send_bytes.push_back(static_cast<std::int64_t>(to[r].size()));
    receive_bytes.push_back(static_cast<std::int64_t>(from[r].size() * bytes));
    received += receive_bytes.back();
  }
  std::vector<std::byte> receive(static_cast<std::size_t>(received));
  communicator_.exchange({send.data(), send_bytes, receive.data(), receive_bytes});

  const std::byte* next = receive.data();
  std::vector<const std::byte*> segments(parts_.layout.num_segments());
  for (const std::vector<int>& indices : from) {
    for (const int index : indices) {
      for (std::size_t i = 0; i < segments.size(); ++i) segments[i] = next + parts_.layout.offset(i);
      arena->publish(index, version, segments);
      next += bytes;
    }
  }
}

}  // namespace

PeerHomes::PeerHomes(const PhaseParts& parts, const HomeExperts& homes, const SlotPool& pool,
                     Communicator& communicator)
    : plan_(parts.plan()),
      num_segments_(parts.layout.num_segments()),
      version_(SharedMemory::create("version", Bytes{64})),
      sharing_(std::in_place, communicator.peers()) {
  std::vector<SharedRegion> regions = homes.regions;
  regions.push_back({version_.bytes(), version_.name()});
  if (any_staged(parts.schedule())) {
    num_slots_ = static_cast<std::size_t>(num_buffers(plan_, parts.schedule().depth));
    regions.push_back(pool.region());
  }
  communicator.peers().share(regions);

  // Layout of `mine`: address of the version, then [layer][home slot][segment], then [buffer][segment].
  std::vector<std::uintptr_t> mine = {std::bit_cast<std::uintptr_t>(version_.bytes().data())};
  for (const HomeExpert& expert : homes.experts.flat()) {
    for (const std::byte* segment : expert.weights) mine.push_back(std::bit_cast<std::uintptr_t>(segment));
  }
  for (std::size_t b = 0; b < num_slots_; ++b) {
    for (const std::byte* segment : pool.buffer(static_cast<int>(b))) {
      mine.push_back(std::bit_cast<std::uintptr_t>(segment));
    }
  }
  const auto num_ranks = static_cast<std::size_t>(plan_.num_ranks());
  std::vector<std::uintptr_t> all(mine.size() * num_ranks);
  communicator.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));

  const auto address = [&](RankId rank, std::size_t i) {
    return communicator.peers().local(rank, std::bit_cast<const std::byte*>(all[rank.index() * mine.size() + i]));
  };
  for (int r = 0; r < plan_.num_ranks(); ++r) version_of_.push_back(address(RankId{r}, 0));

  const auto layers = static_cast<std::size_t>(plan_.num_layers());
  const auto experts = static_cast<std::size_t>(plan_.num_experts());
  segments_.resize(layers * experts * num_segments_);
  for (std::size_t l = 0; l < layers; ++l) {
    const std::vector<SlotId> slots = home_slots(plan_.home.row(l));
    for (std::size_t e = 0; e < experts; ++e) {
      const std::size_t first = 1 + (l * homes.experts.extent(1) + slots[e].index()) * num_segments_;
      for (std::size_t i = 0; i < num_segments_; ++i) {
        segments_[(l * experts + e) * num_segments_ + i] = address(plan_.home(l, e), first + i);
      }
    }
  }
  const std::size_t first_slot = 1 + homes.experts.size() * num_segments_;
  for (int r = 0; r < plan_.num_ranks(); ++r) {
    for (std::size_t i = 0; i < num_slots_ * num_segments_; ++i) {
      slots_.push_back(address(RankId{r}, first_slot + i));
    }
  }
}

std::span<const std::byte* const> PeerHomes::mapped(std::span<const std::byte* const> all, std::size_t expert) const {
  const std::span segments = all.subspan(expert * num_segments_, num_segments_);
  const bool missing = std::ranges::find(segments, nullptr) != segments.end();
  return missing ? std::span<const std::byte* const>() : segments;
}

std::span<const std::byte* const> PeerHomes::home(LayerId layer, ExpertId expert) const {
  return mapped(segments_, layer.index() * static_cast<std::size_t>(plan_.num_experts()) + expert.index());
}

std::span<const std::byte* const> PeerHomes::slot(RankId owner, int buffer) const {
  return mapped(slots_, owner.index() * num_slots_ + static_cast<std::size_t>(buffer));
}

bool PeerHomes::reachable(RankId owner) const { return version_of_[owner.index()] != nullptr; }

void PeerHomes::publish(std::uint64_t version) {
  version_at(version_.bytes().data()).store(version, std::memory_order_release);
}

std::uint64_t PeerHomes::published(RankId owner) const {
  const std::byte* version = reachable(owner) ? version_of_[owner.index()] : version_.bytes().data();
  return version_at(version).load(std::memory_order_acquire);  // pairs with release in publish()
}

void PeerHomes::put_in_place(TurnId before) {
  version_at(version_.bytes().data() + kInPlace).store(before.index(), std::memory_order_release);
}

bool PeerHomes::in_place(RankId owner, TurnId before) const {
  if (!reachable(owner)) return true;
  // acquire: pairs with release in put_in_place()
  return version_at(version_of_[owner.index()] + kInPlace).load(std::memory_order_acquire) >= before.index();
}

std::optional<HostArena> open_arena(const PhaseParts& parts, Communicator& communicator) {
  const Topology& topology = communicator.topology();
  const NodeId node = topology.node_of(communicator.rank());
  const RankId first_rank{topology.ranks_of(node).first};
  const std::vector<ArenaExpert>& experts = parts.schedule().arena[node.index()];

  std::optional<HostArena> arena;
  Name name{};
  if (communicator.rank() == first_rank && !experts.empty()) {
    arena = HostArena::create(experts, parts.layout);
    assert(arena->name().size() < name.size());
    std::ranges::copy(arena->name(), name.begin());
  }
  std::vector<Name> names(static_cast<std::size_t>(communicator.num_ranks()));
  communicator.all_gather(std::as_bytes(std::span(name)), std::as_writable_bytes(std::span(names)));
  if (!arena && !experts.empty()) {
    arena = HostArena::open(names[first_rank.index()].data(), experts, parts.layout);
  }
  return arena;
}

void refresh_arena(const PhaseParts& parts, const PeerHomes& homes, HostArena* arena, std::uint64_t version,
                   Communicator& communicator) {
  const Topology& topology = communicator.topology();
  const RankId self = communicator.rank();
  const NodeId node = topology.node_of(self);

  const std::vector<ArenaExpert>& experts = parts.schedule().arena[node.index()];
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const RankId owner = parts.plan().home(experts[i].layer, experts[i].expert);
    if (writer_of(i, node, owner, topology) != self) continue;
    if (const auto segments = homes.home(experts[i].layer, experts[i].expert); !segments.empty()) {
      arena->publish(static_cast<int>(i), version, segments);
    }
  }

  bool all_reachable = true;  // equal on all ranks: threads reach all ranks, processes those of their node
  for (int r = 0; r < communicator.num_ranks(); ++r) all_reachable &= homes.reachable(RankId{r});
  if (all_reachable) return;
  Messages messages(parts, homes, communicator);
  for (int l = 0; l < parts.plan().num_layers(); ++l) messages.exchange_layer(LayerId{l}, arena, version);
}

}  // namespace foremoe
