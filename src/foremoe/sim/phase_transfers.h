#pragma once

// All transfers concurrent with a phase's turns: the copies of its transfer schedule and the gradients of its guests.
//
// Copies. The engine executes the same copies (transfer/transfer_schedule.h) and begins them at the same time: when
//   their buffer is free, at most `depth` turns ahead. If a policy works online, a copy for a forward turn begins after
//   that turn's router, or after its dispatch if own experts come first. Its source is a peer chosen by the policy's
//   `sources`, or an arena with all experts. Under `shared`, online policies have one set of buffers, so a copy for a
//   backward turn begins with its turn. If the policy keeps guests, the backward needs no copy. The engine executes
//   plans of residency `free` forward only. In a simulated policy update, their leases last until the backward of their
//   micro-steps, and homes are not copied back, since the optimizer writes them. Moves from staging buffers into slots
//   are not charged: they stay within one device.
// Gradients. After the last turn of its lease, a guest that has served a backward turn sends its gradient home, or to
//   the source of its weights if gradients are accumulated on the way (copy_sources.h). The transfer must end before
//   another guest accumulates in the same buffer, or at the end of the phase. Under `shared` all layers use the same
//   buffers.
// Complexity. O(turns · ranks · slots).

#include <cstdint>
#include <span>
#include <vector>

#include "foremoe/sim/simulation.h"
#include "foremoe/transfer/cluster_links.h"

namespace foremoe {

// The moments of a turn at which transfers may begin.
enum class Moment : std::uint8_t { kTurn, kRouter, kDispatched, kExpertsDone };
inline constexpr int kNumMoments = 4;

struct Transfer {
  Way way;
  ExpertId expert;  // kNoExpert: parts of several experts
  Bytes bytes;
  TurnId begins;
  Moment moment = Moment::kTurn;
  bool gradient = false;
  TurnId deadline;  // the turn whose experts wait for it; num_turns: the end of the phase
};

struct PhaseTransfers {
  TurnOrder order;
  int depth = kDefaultDepth;                    // turns ahead of which copies may begin
  std::vector<Transfer> transfers;              // sorted by begins, then moment
  std::vector<std::size_t> first_beginning;     // [turns · moments + 1], into transfers
  std::vector<std::size_t> by_deadline;         // into transfers
  std::vector<std::size_t> first_due;           // [turns + 2], into by_deadline
  std::vector<std::vector<ArenaExpert>> arena;  // [node]
  std::int64_t num_copies = 0;
  int staging_buffers = 0;   // per rank, if a plan of residency `free` copies from peers
  bool has_guests = false;   // in any slot
  bool guests_stay = false;  // under `shared`, from a micro-step's forward to its backward

  std::span<const Transfer> beginning(TurnId t, Moment moment) const;
  std::span<const std::size_t> due(TurnId t) const;
};

// For sharded experts, the transfers are those of sharded_experts.h.
PhaseTransfers make_phase_transfers(const SimulationInput& input, const SimulationOptions& options);

}  // namespace foremoe
