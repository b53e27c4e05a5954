#pragma once

// Transfer schedule of a plan. Gives each copy's source, path and buffer, the first turn at which the buffer is free,
// and the turn that waits for the copy.
//
// Problem. A plan specifies the contents of every slot at every event. To execute the plan, start every copy early, but
//   not before the last read of the buffer's previous contents, and complete the copy before its first read.
// Leases. A buffer is leased to one expert for [arrives, closes]: from the first to the last turn that reads it. The
//   next copy into that buffer may start at its `opens`, the turn after the previous lease's `closes`. Leases of a
//   buffer never overlap, so no slot is overwritten while a turn may read it. check_leases() verifies this
//   independently.
// Buffers. A rank's guest buffers are numbered layer·G + (slot − E/R) under `static` and `resident`. Under `shared`,
//   layers share `depth` sets of G buffers (turn t uses set t mod depth). Under `free`, every slot of a layer can be
//   written: layer·(E/R + G) + slot. Overwritten homes are copied back after the last turn. Copies of `free` from peers
//   arrive in staging buffers after the slots (staged_copies.h); the replaced lease ends when the copies arrive, not
//   when they open.
// Paths. `host`: the node's arena, filled once per step with exactly the experts that its ranks will fetch. `peer`:
//   directly from the expert's home, whose slot is pinned during the step. Under `free`, homes are not pinned and all
//   copies take one path. The default is `host`, with every overwritten home in the arena. On request it is `peer`,
//   from any rank with the expert. Otherwise, an arena entry can pay off if its node fetches the expert at least twice.
//   Peers serve all other copies, and some arena copies to balance bytes ÷ bandwidth (copy_paths.h).
// Complexity. O(turns · ranks · slots). Guarantee. The same plan produces the same schedule on every rank.

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
enum class PathChoice : std::uint8_t { kAuto, kHost, kPeer };  // kHost, kPeer: this path alone
std::string_view to_string(PathChoice choice);                 // "auto", "host", "peer"

inline constexpr int kDefaultDepth = 2;
inline constexpr int kMostDepth = 1 << 16;

struct ScheduledCopy {
  RankId rank;  // receiver
  LayerId layer;
  ExpertId expert;
  SlotId slot;     // of the plan
  int buffer = 0;  // of the rank (see above), where the expert is read
  TurnId opens;    // first turn at whose start the buffer is free
  TurnId arrives;  // first turn that reads it; for homes that `free` restores, a turn after the order's last
  TurnId closes;   // last turn that reads it
  Path path = Path::kHost;
  RankId source;  // kPeer: rank that is read; kHost: the expert's home, which fills the arena
  // Only for `free` from peers, else −1. staging: buffer of `rank` that stores the expert until all copies of the turn
  // have arrived. source_buffer: buffer of `source` (possibly the same rank) that is read.
  int staging = -1;
  int source_buffer = -1;

  bool staged() const { return staging >= 0; }
  int arrives_in() const { return staged() ? staging : buffer; }  // index of the rank's buffer

  friend bool operator==(const ScheduledCopy&, const ScheduledCopy&) = default;
};

struct ArenaExpert {
  LayerId layer;
  ExpertId expert;

  friend auto operator<=>(const ArenaExpert&, const ArenaExpert&) = default;
};

struct TransferSchedule {
  Phase phase = Phase::kRecompute;
  int depth = kDefaultDepth;  // number of turns that copies may start ahead; under `shared`, also of sets of buffers
  TurnOrder order;
  std::vector<ScheduledCopy> copies;            // by arrives, rank, slot
  std::vector<ScheduledCopy> from_before;       // leases without a copy: experts left in slots by the previous phase
  std::vector<std::size_t> first_of_turn;       // [num_turns() + 1], first of the copies that arrive at this turn
  std::vector<std::vector<ArenaExpert>> arena;  // [node], ascending; contents of its arena
  int buffers_per_rank = 0;                     // guest buffers (under `free`: all slots of all layers, and staging)
  int lent_turns = 0;                           // turns added by lend_turns() so far

  // Turns of the order, plus those at which homes return: under `free` one, or from peers one per layer.
  int num_turns() const { return static_cast<int>(first_of_turn.size()) - 1; }
  std::span<const ScheduledCopy> arriving(TurnId t) const;  // of all ranks
  bool any_arrives(TurnId t) const { return !arriving(t).empty(); }
};

struct ScheduleOptions {
  Phase phase = Phase::kRecompute;
  PathChoice path = PathChoice::kAuto;
  int depth = kDefaultDepth;  // ≥ 1
  // Cluster whose bandwidths `auto` uses to balance paths, read only during the call. Null: uniform links.
  const Cluster* cluster = nullptr;
  bool shares_uplink = true;  // host path and network cards share the switch's uplink
  // `free`, for consecutive phases of the same plan (simulation only): slots start with the contents of the plan's last
  // event instead of homes, and keep their contents at the end.
  bool begins_with_last_placement = false;
  bool leaves_last_placement = false;
};

// The plan must pass check_plan. Throws the errors of expect_valid(plan), and InputError for a phase that the plan does
// not support. Expert sizes and bandwidths determine the paths.
TransferSchedule make_transfer_schedule(const StepPlan& plan, const ExpertLayout& layout,
                                        const ScheduleOptions& options);

// Like the function above, with turns from turns_of(); for simulation only.
TransferSchedule make_transfer_schedule(const StepPlan& plan, TurnOrder order, const ExpertLayout& layout,
                                        const ScheduleOptions& options);

// Under `shared` with copies from peers: begin_lending() returns a schedule without copies, and lend_turns() adds the
// copies of the next turns before `end`. The plan must then contain the micro-steps of these turns. Once all turns are
// added, the schedule is that of the whole plan.
TransferSchedule begin_lending(const StepPlan& plan, const ScheduleOptions& options);
void lend_turns(const StepPlan& plan, TurnId end, TransferSchedule& schedule);

int num_buffers(const StepPlan& plan, int depth);  // per rank, without staging
void index_copies(TransferSchedule& schedule);     // computes first_of_turn from the sorted copies

// Guest memory of one rank, computed from the plan.
struct GuestMemory {
  Bytes weights;    // including staging buffers
  Bytes gradients;  // float32; 0 for a forward-only phase
};
GuestMemory guest_memory(const StepPlan& plan, const ExpertLayout& layout, const TransferSchedule& schedule);

// The turns of each layer, to determine which turns read a copy. A buffer leased for [arrives, closes] is read at every
// turn of its layer in this range.
class LayerTurns {
 public:
  explicit LayerTurns(const TurnOrder& order);

  // Returns the first turn of the layer after this one, if any.
  std::optional<TurnId> next(LayerId layer, TurnId after) const;
  // Returns whether any reader of this copy needs the segment; true for copies that arrive after the order's last turn,
  // and for staged copies, which may be the source of others.
  bool needs(const ScheduledCopy& copy, const Segment& segment) const;

 private:
  bool any(const ScheduledCopy& copy, Pass pass) const;

  int num_turns_ = 0;
  std::vector<std::vector<TurnId>> of_layer_;      // [layer], ascending
  std::vector<std::vector<int>> forwards_before_;  // [layer][i]: forward turns among the layer's first i
};

// Returns a message for each violation; empty if the schedule is correct. Shares no code with make_transfer_schedule.
std::vector<std::string> check_leases(const TransferSchedule& schedule, const StepPlan& plan);

}  // namespace foremoe
