#pragma once

// A plan's copies as work to be done in time: for each, where it comes from, by which path, into which buffer, the
// first turn at which that buffer is free and the turn that waits for it.
//
// Problem. A plan says what every slot holds at every event. Executing it means to start every copy early, but not
//   before the buffer's former contents have been read for the last time, and to have it there when it is first read.
// Leases. A buffer is leased to one expert for [arrives, closes]: from the turn that first reads it to the turn that
//   last reads it. The next copy into that buffer may start at its `opens`, the turn after the former lease's
//   `closes`. No two leases of a buffer overlap: that is how overwriting a slot that someone may still read is
//   designed out. check_leases() proves it anew from the list alone.
// Buffers. A rank's guest buffers are numbered: under `static` and `resident` layer·G + (slot − E/R); under `shared`
//   there are `depth` sets of G which layers borrow in turn (turn t uses set t mod depth); under `free` every slot of
//   a layer can be written: layer·(E/R + G) + slot, and after the last turn the homes that were overwritten are
//   copied back. Copies of `free` from peers arrive in staging buffers behind the slots (staged_copies.h), and what
//   they replace is leased until they arrive, not until they open.
// Paths. `host`: the node's arena, filled once per step with exactly the experts that its ranks will fetch. `peer`:
//   straight from the expert's home, whose slot is pinned inside a step. Under `free`, where homes are not pinned, all
//   copies take one path: the host's, whose arena keeps every home that is overwritten, or where peers are asked for,
//   from whichever rank holds the expert.
//   An expert can pay for its place in an arena when its node fetches it at least twice; the other copies, and as many
//   of those as balance the two paths by bytes ÷ bandwidth, go to peers: copy_paths.h.
// Complexity. O(turns · ranks · slots).
// Guarantee. Same plan, same schedule, on every rank.

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "foremoe/cluster/topology.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/transfer/expert_layout.h"
#include "foremoe/transfer/turn_order.h"

namespace foremoe {

struct Cluster;

enum class Path : std::uint8_t { kHost, kPeer };
enum class PathChoice : std::uint8_t { kAuto, kHost, kPeer };  // kHost, kPeer: that one alone
std::string_view to_string(PathChoice choice);                 // "auto", "host", "peer"

inline constexpr int kDefaultDepth = 2;
inline constexpr int kMostDepth = 1 << 16;

struct ScheduledCopy {
  RankId rank;  // that receives it
  LayerId layer;
  ExpertId expert;
  SlotId slot;     // of the plan
  int buffer = 0;  // of the rank, see above: where the expert is read
  TurnId opens;    // at the beginning of this turn the buffer is free
  TurnId arrives;  // the turn that first reads it; of homes that `free` copies back at the end, one that follows them
  TurnId closes;   // the last turn that reads it
  Path path = Path::kHost;
  RankId source;  // kPeer: the rank that is read; kHost: the expert's home, which fills the arena
  // Of `free` from peers: the buffer of `rank` in which the expert waits until all that arrive with it are there, and
  // the buffer of `source`, maybe the rank itself, that is read. −1: there is none.
  int staging = -1;
  int source_buffer = -1;

  bool staged() const { return staging >= 0; }
  int arrives_in() const { return staged() ? staging : buffer; }  // of the rank's buffers

  friend bool operator==(const ScheduledCopy&, const ScheduledCopy&) = default;
};

struct ArenaExpert {
  LayerId layer;
  ExpertId expert;

  friend auto operator<=>(const ArenaExpert&, const ArenaExpert&) = default;
};

struct TransferSchedule {
  Phase phase = Phase::kRecompute;
  int depth = kDefaultDepth;  // turns ahead of which copies are started; sets of buffers under `shared`
  TurnOrder order;
  std::vector<ScheduledCopy> copies;            // by arrives, rank, slot
  std::vector<ScheduledCopy> from_before;       // leases without a copy: what a former phase has left in slots
  std::vector<std::size_t> first_of_turn;       // [num_turns() + 1], into copies: those that arrive at this turn
  std::vector<std::vector<ArenaExpert>> arena;  // [node], ascending; what its arena holds
  int buffers_per_rank = 0;                     // of guests (under `free`: all slots of all layers, and staging)
  int lent_turns = 0;                           // by lend_turns() so far

  // Those of the order and what follows: one turn at which homes are back, or under `free` from peers one per layer.
  int num_turns() const { return static_cast<int>(first_of_turn.size()) - 1; }
  std::span<const ScheduledCopy> arriving(TurnId t) const;  // of all ranks
  bool any_arrives(TurnId t) const { return !arriving(t).empty(); }
};

struct ScheduleOptions {
  Phase phase = Phase::kRecompute;
  PathChoice path = PathChoice::kAuto;
  int depth = kDefaultDepth;  // ≥ 1
  // Whose links' bandwidths `auto` balances paths by, read during the call alone; null: as if all links were alike.
  const Cluster* cluster = nullptr;
  bool shares_uplink = true;  // host path and network cards meet at the switch
  // Of `free`, for phases that follow each other by the same plan (the simulation's alone): slots begin with what its
  // last event has there, not with homes; what they hold at the end stays.
  bool begins_with_last_placement = false;
  bool leaves_last_placement = false;
};

// The plan must be one that check_plan accepts. Throws InputError for a phase that the plan is not for. Expert sizes
// and bandwidths decide paths.
TransferSchedule make_transfer_schedule(const StepPlan& plan, const ExpertLayout& layout,
                                        const ScheduleOptions& options);

// The same for turns that turns_of() gave, for simulation only.
TransferSchedule make_transfer_schedule(const StepPlan& plan, TurnOrder order, const ExpertLayout& layout,
                                        const ScheduleOptions& options);

// Under `shared`, from peers alone: a schedule without copies yet, and the copies of its next turns up to `end`, whose
// micro-steps the plan has by then. All turns together give the schedule of the whole plan.
TransferSchedule begin_lending(const StepPlan& plan, const ScheduleOptions& options);
void lend_turns(const StepPlan& plan, TurnId end, TransferSchedule& schedule);

int num_buffers(const StepPlan& plan, int depth);  // of a rank, without staging
void index_copies(TransferSchedule& schedule);     // fills in first_of_turn, of copies in order

// Guest memory of one rank, as predicted from the plan.
struct GuestMemory {
  Bytes weights;    // staging buffers included
  Bytes gradients;  // float32; 0 for a phase without backward
};
GuestMemory guest_memory(const StepPlan& plan, const ExpertLayout& layout, const TransferSchedule& schedule);

// The turns of each layer, to ask what a lease is read by. A buffer leased for [arrives, closes] is read at every turn
// of its layer in between.
class LayerTurns {
 public:
  explicit LayerTurns(const TurnOrder& order);

  // The first turn of the layer after this one; none when it was the last.
  std::optional<TurnId> next(LayerId layer, TurnId after) const;
  // Does any reader of this copy need the segment? A copy that arrives after the last turn brings all of them, and so
  // does a staged one, from which others may be made.
  bool needs(const ScheduledCopy& copy, const Segment& segment) const;

 private:
  bool any(const ScheduledCopy& copy, Pass pass) const;

  int num_turns_ = 0;
  std::vector<std::vector<TurnId>> of_layer_;      // [layer], ascending
  std::vector<std::vector<int>> forwards_before_;  // [layer][i]: of the layer's first i turns, how many are forward
};

// Every violated lease in words; empty when the schedule is sound. Shares no code with what made it.
std::vector<std::string> check_leases(const TransferSchedule& schedule, const StepPlan& plan);

}  // namespace foremoe
