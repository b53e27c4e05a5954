#include "foremoe/runtime/peer_homes.h"

#include <atomic>
#include <bit>

namespace foremoe {
namespace {

std::atomic_ref<std::uint64_t> version_at(const std::byte* memory) {
  // atomic_ref takes no const in C++20; readers only load.
  return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(memory)));
}

}  // namespace

PeerHomes::PeerHomes(const PhaseParts& parts, const HomeExperts& homes, Communicator& communicator)
    : plan_(parts.plan),
      num_segments_(parts.layout.num_segments()),
      version_(SharedMemory::create("version", Bytes{64})),
      sharing_(communicator) {
  std::vector<SharedRegion> regions = homes.regions;
  regions.push_back({version_.bytes(), version_.name()});
  communicator.share(regions);

  // Mine: the version's address, then [layer][home slot][segment].
  std::vector<std::uintptr_t> mine = {std::bit_cast<std::uintptr_t>(version_.bytes().data())};
  for (const HomeExpert& expert : homes.experts.flat()) {
    for (const std::byte* segment : expert.weights) mine.push_back(std::bit_cast<std::uintptr_t>(segment));
  }
  const auto num_ranks = static_cast<std::size_t>(plan_.num_ranks());
  std::vector<std::uintptr_t> all(mine.size() * num_ranks);
  communicator.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));

  const auto address = [&](RankId rank, std::size_t i) {
    return communicator.local(rank, std::bit_cast<const std::byte*>(all[rank.index() * mine.size() + i]));
  };
  for (int r = 0; r < plan_.num_ranks(); ++r) version_of_.push_back(address(RankId{r}, 0));

  const auto layers = static_cast<std::size_t>(plan_.num_layers());
  const auto experts = static_cast<std::size_t>(plan_.num_experts());
  segments_.resize(layers * experts * num_segments_);
  std::vector<std::size_t> next(num_ranks);  // homes on a rank are in ascending order of experts
  for (std::size_t l = 0; l < layers; ++l) {
    for (std::size_t e = 0; e < experts; ++e) {
      const RankId owner = plan_.home(l, e);
      for (std::size_t i = 0; i < num_segments_; ++i) {
        segments_[(l * experts + e) * num_segments_ + i] = address(owner, 1 + next[owner.index()]++);
      }
    }
  }
}

std::span<const std::byte* const> PeerHomes::home(LayerId layer, ExpertId expert) const {
  const std::size_t at =
      (layer.index() * static_cast<std::size_t>(plan_.num_experts()) + expert.index()) * num_segments_;
  const std::span segments = std::span(segments_).subspan(at, num_segments_);
  for (const std::byte* segment : segments) {
    if (segment == nullptr) return {};
  }
  return segments;
}

bool PeerHomes::reachable(RankId owner) const { return version_of_[owner.index()] != nullptr; }

void PeerHomes::publish(std::uint64_t version) {
  version_at(version_.bytes().data()).store(version, std::memory_order_release);
}

std::uint64_t PeerHomes::published(RankId owner) const {
  const std::byte* version = reachable(owner) ? version_of_[owner.index()] : version_.bytes().data();
  return version_at(version).load(std::memory_order_acquire);  // pairs with publish()
}

}  // namespace foremoe
