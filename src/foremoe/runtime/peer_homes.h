#pragma once

// Where every expert's home weights are, as seen from this rank, and which version of them is there; and the arena of
// the rank's node, filled from them.
//
// Homes. Ranks tell each other their addresses once, at bind; a home that is not mapped here has none. Where peers read
//   each other's slots (residency `free` from peers), these too, and how far each rank has put in place what arrived.
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
#include "foremoe/runtime/slot_pool.h"
#include "foremoe/transfer/host_arena.h"
#include "foremoe/transfer/shared_memory.h"

namespace foremoe {

class PeerHomes {
 public:
  // Collective. Shares the regions of `homes`, and of `pool` where peers read slots, for as long as this object lives.
  PeerHomes(const PhaseParts& parts, const HomeExperts& homes, const SlotPool& pool, Communicator& communicator);
  PeerHomes(const PeerHomes&) = delete;
  PeerHomes& operator=(const PeerHomes&) = delete;

  std::span<const std::byte* const> home(LayerId layer, ExpertId expert) const;  // [segment]; empty when not mapped
  std::span<const std::byte* const> slot(RankId owner, int buffer) const;        // likewise, of staged schedules alone
  bool reachable(RankId owner) const;

  // No peer reads this rank's memory any more; nor does this rank read theirs.
  void stop_sharing() { sharing_.reset(); }

  // The homes of this rank have this version from now on (release: pairs with published()).
  void publish(std::uint64_t version);
  // Of an owner that is not reachable, what this rank itself has published: its messages carry their own version.
  std::uint64_t published(RankId owner) const;

  // This rank has put in place all that arrives before this turn (release: pairs with in_place()).
  void put_in_place(TurnId before);
  // Has the owner? True of one that is not reachable, which answers for itself.
  bool in_place(RankId owner, TurnId before) const;

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

  // [segment] of the expert-th of all; empty when not mapped.
  std::span<const std::byte* const> mapped(std::span<const std::byte* const> all, std::size_t expert) const;

  const StepPlan& plan_;
  std::size_t num_segments_;
  SharedMemory version_;                      // of this rank's homes, and the turn before which all is in place
  std::vector<const std::byte*> version_of_;  // [rank], null when not reachable
  std::optional<Sharing> sharing_;            // goes before version_
  std::vector<const std::byte*> segments_;    // [layer][expert][segment]
  std::size_t num_slots_ = 0;                 // of a rank, in all layers; 0 where no peer reads them
  std::vector<const std::byte*> slots_;       // [rank][buffer][segment]
};

// Collective. This rank's node's arena; none when the schedule puts nothing into it.
std::optional<HostArena> open_arena(const PhaseParts& parts, Communicator& communicator);

// Collective: returns when all that this rank writes is written and published as `version`.
void refresh_arena(const PhaseParts& parts, const PeerHomes& homes, HostArena* arena, std::uint64_t version,
                   Communicator& communicator);

}  // namespace foremoe
