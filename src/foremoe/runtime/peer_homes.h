#pragma once

// Addresses and versions of all home weights, as seen from this rank. Fills the node's arena from these weights.
//
// Homes. Ranks exchange addresses once, at bind; a home that is not mapped here has no address. If peers read each
//   other's slots (residency `free` with copies from peers), ranks also exchange the addresses of slots. Each rank
//   publishes its progress in moving arrived experts from staging buffers to slots.
// Arena. Once per phase, when home weights are final, every node's arena receives the experts that its ranks will
//   fetch. Owners on the node write their own experts. The node's ranks divide the other experts among themselves. A
//   rank reads the owner's memory if it is mapped, and receives a message otherwise.

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
  // Collective. Shares the regions of `homes`, and of `pool` if peers read slots, until destruction or stop_sharing().
  PeerHomes(const PhaseParts& parts, const HomeExperts& homes, const SlotPool& pool, Communicator& communicator);
  PeerHomes(const PeerHomes&) = delete;
  PeerHomes& operator=(const PeerHomes&) = delete;

  std::span<const std::byte* const> home(LayerId layer, ExpertId expert) const;  // [segment]; empty if not mapped
  std::span<const std::byte* const> slot(RankId owner, int buffer) const;        // likewise; staged schedules only
  bool reachable(RankId owner) const;

  // Stops sharing, see PeerAccess::stop_sharing(). Afterwards this rank must not read its peers' memory either.
  void stop_sharing() { sharing_.reset(); }

  // Publishes the version of this rank's homes (release: pairs with published()).
  void publish(std::uint64_t version);
  // The version published by `owner`. If the owner's memory is not mapped, returns this rank's version, since messages
  // contain the owner's version.
  std::uint64_t published(RankId owner) const;

  // Publishes that all copies arriving before this turn are in their slots (release: pairs with in_place()).
  void put_in_place(TurnId before);
  // Returns whether the owner published `before` or a later turn. If unmapped, returns true; the owner's server checks.
  bool in_place(RankId owner, TurnId before) const;

 private:
  // Allows other ranks to read this rank's homes until destruction.
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

  // Returns the segments of one expert, [segment]; empty if not mapped.
  std::span<const std::byte* const> mapped(std::span<const std::byte* const> all, std::size_t expert) const;

  const StepPlan& plan_;
  std::size_t num_segments_;
  SharedMemory version_;                      // version of this rank's homes, then the turn of put_in_place()
  std::vector<const std::byte*> version_of_;  // [rank]; null if not reachable
  std::optional<Sharing> sharing_;            // destroyed before version_
  std::vector<const std::byte*> segments_;    // [layer][expert][segment]
  std::size_t num_slots_ = 0;                 // per rank, over all layers; 0 if no peer reads them
  std::vector<const std::byte*> slots_;       // [rank][buffer][segment]
};

// Collective. Opens the arena of this rank's node, if the schedule stores an expert in it.
std::optional<HostArena> open_arena(const PhaseParts& parts, Communicator& communicator);

// Collective. Writes this rank's share of the arena and publishes it as `version`.
void refresh_arena(const PhaseParts& parts, const PeerHomes& homes, HostArena* arena, std::uint64_t version,
                   Communicator& communicator);

}  // namespace foremoe
