#pragma once

// Where every expert's home weights are, as seen from this rank, and which version of them is there; and the arena of
// the rank's node, filled from them.
//
// Homes. Ranks tell each other their addresses once, at bind; a home that is not mapped here has none.
// Arena. Once per phase, after the homes have their final weights, every node's arena receives the experts that its
//   ranks will fetch. An owner on the node writes its own; the others are divided among the node's ranks, who read the
//   owner's memory where it is mapped and are sent it where it is not.

#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <vector>

#include "foremoe/runtime/communicator.h"
#include "foremoe/runtime/phase_executor.h"
#include "foremoe/transfer/host_arena.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {

class PeerHomes {
 public:
  // Collective. Shares the regions of `homes` for as long as this object lives.
  PeerHomes(const PhaseParts& parts, const HomeExperts& homes, Communicator& communicator);
  PeerHomes(const PeerHomes&) = delete;
  PeerHomes& operator=(const PeerHomes&) = delete;

  std::span<const std::byte* const> home(LayerId layer, ExpertId expert) const;  // [segment]; empty when not mapped
  bool reachable(RankId owner) const;

  // The homes of this rank have this version from now on (release: pairs with published()).
  void publish(std::uint64_t version);
  // Of an owner that is not reachable, what this rank itself has published: its messages carry their own version.
  std::uint64_t published(RankId owner) const;

 private:
  // As long as it lives, others may read this rank's homes. When it goes, nobody does.
  class Sharing {
   public:
    explicit Sharing(PeerAccess& peers) : peers_(peers) {}
    ~Sharing() { peers_.stop_sharing(std::uncaught_exceptions() > uncaught_); }
    Sharing(const Sharing&) = delete;
    Sharing& operator=(const Sharing&) = delete;

   private:
    PeerAccess& peers_;
    int uncaught_ = std::uncaught_exceptions();
  };

  const StepPlan& plan_;
  std::size_t num_segments_;
  SharedMemory version_;                      // of this rank's homes
  std::vector<const std::byte*> version_of_;  // [rank], null when not reachable
  Sharing sharing_;                           // goes before version_
  std::vector<const std::byte*> segments_;    // [layer][expert][segment]
};

// Collective. This rank's node's arena; none when the schedule puts nothing into it.
std::optional<HostArena> open_arena(const PhaseParts& parts, Communicator& communicator);

// Collective: returns when all that this rank writes is written and published as `version`.
void refresh_arena(const PhaseParts& parts, const PeerHomes& homes, HostArena* arena, std::uint64_t version,
                   Communicator& communicator);

}  // namespace foremoe
