#pragma once

// Filling the arenas: once per phase, after the homes have their final weights, every node's arena receives the
// experts that its ranks will fetch. An owner on the node writes its own; the others are divided among the node's
// ranks, who read the owner's memory where it is mapped and are sent it where it is not.

#include <optional>

#include "foremoe/runtime/peer_homes.h"
#include "foremoe/transfer/host_arena.h"

namespace foremoe {

// Collective. This rank's node's arena; none when the schedule puts nothing into it.
std::optional<HostArena> open_arena(const PhaseParts& parts, Communicator& communicator);

// Collective: returns when all that this rank writes is written and published as `version`.
void refresh_arena(const PhaseParts& parts, const PeerHomes& homes, HostArena* arena, std::uint64_t version,
                   Communicator& communicator, Device& device);

}  // namespace foremoe
