#pragma once

// Everything that travels beside a phase's turns: the copies of its transfer schedule, and the gradients of its guests.
//
// Copies. They are those that the engine executes (transfer/transfer_schedule.h) and may begin when the engine would
//   begin them: when their buffer is free, at most `depth` turns ahead. Where a policy works online, a copy for a
//   forward turn begins when that turn's router has run, or, where own experts come first, its dispatch; it comes from
//   peers by the policy's `sources`, or from an arena that holds all experts. Under `shared` such a policy has one set
//   of buffers, so that a copy for a backward turn begins with its turn; where it keeps guests, there is none. A plan
//   of residency `free` is forward-only in execution; here its leases in the policy update last until the backward of
//   their micro-steps, and homes are not copied back, for the optimizer writes them anew. What its copies from peers
//   take to go from staging buffers into slots is not charged: memory of one device is quick.
// Gradients. A guest that has served a backward turn sends its gradient home after the last turn of its lease, or to
//   the rank that its weights came from where gradients are added up on the way (copy_sources.h). It must
//   be gone when another guest begins to accumulate in that place; else by the end of the phase. Under `shared` the
//   places of all layers are the same.
// Complexity. O(turns · ranks · slots).

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/sim/simulation.h"
#include "foremoe/transfer/cluster_links.h"

namespace foremoe {

// The moments of a turn at which something may begin to travel.
enum class Moment : std::uint8_t { kTurn, kRouter, kDispatched, kExpertsDone };
inline constexpr int kNumMoments = 4;

struct Transfer {
  Way way;
  ExpertId expert;  // kNoExpert: parts of several
  Bytes bytes;
  TurnId begins;
  Moment moment = Moment::kTurn;
  bool gradient = false;
  TurnId deadline;  // the turn whose experts wait for it; num_turns: the end of the phase
};

struct PhaseTransfers {
  TurnOrder order;
  int depth = kDefaultDepth;                    // turns ahead of which copies may begin
  std::vector<Transfer> transfers;              // by begins, moment
  std::vector<std::size_t> first_beginning;     // [turns · moments + 1], into transfers
  std::vector<std::size_t> by_deadline;         // into transfers
  std::vector<std::size_t> first_due;           // [turns + 2], into by_deadline
  std::vector<std::vector<ArenaExpert>> arena;  // [node]
  std::int64_t num_copies = 0;
  int staging_buffers = 0;   // of a rank, where a plan of residency `free` takes its copies from peers
  bool has_guests = false;   // in any slot
  bool guests_stay = false;  // under `shared`, from a micro-step's forward to its backward

  std::span<const Transfer> beginning(TurnId t, Moment moment) const;
  std::span<const std::size_t> due(TurnId t) const;
};

// Where experts are sharded, sharded_experts.h says what travels instead.
PhaseTransfers make_phase_transfers(const SimulationInput& input, const SimulationOptions& options);

}  // namespace foremoe
