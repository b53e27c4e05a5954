#pragma once

// What one rank needs to execute a plan: for each turn (pass, micro-step, layer) where its rows go and how those that
// come lie, which copies it starts, waits for and serves, and which gradients go home afterwards. Every executor reads
// this and derives none of it again, and the ranks need no word between them.
//
//   const RankTurns turns(plan, load, {.rank = RankId{3}, .schedule = {.phase = Phase::kPolicyUpdate}});
//   const TurnId t = turns.turn(Pass::kForward, MicroStepId{0}, LayerId{5});
//   turns.starting(t)   copies to be started, or served to a peer, when turn t begins
//   turns.arriving(t)   copies that the turn waits for
//   turns.rows(t)       splits, arrival → slot, slot offsets; from routes row_slots() makes the slot of each row
//   turns.returning(t)  gradients of guests that go home when the turn is over
//
// Leases and arenas are made here, once, when the placement of all micro-steps is final. Rows and returns are computed
// when they are asked for: quotas of later micro-steps may still be on their way. Under `shared`, where nothing stays,
// placement may be on its way too: lend() makes the leases of the micro-steps that have come, if copies are from peers.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "foremoe/plan/rank_dispatch.h"
#include "foremoe/plan/step_plan.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

// The gradient of a guest, on its way to its home.
struct GradientReturn {
  ExpertId expert;
  RankId home;
  RankId guest;  // the rank that hosts it
  SlotId slot;   // there
  friend bool operator==(const GradientReturn&, const GradientReturn&) = default;
};

struct RankTurnsOptions {
  RankId rank;
  ScheduleOptions schedule;
  Bytes expert{1};  // weights of one expert: decides between paths
  // How many micro-steps are planned; none: all. Fewer only under `shared` with copies from peers.
  std::optional<int> planned = std::nullopt;
};

class RankTurns {
 public:
  // Keeps references to plan and load. The plan must be one that check_plan accepts. Throws InputError for a rank out
  // of range, for a load of another shape, and as make_transfer_schedule.
  RankTurns(const StepPlan& plan, const LoadTable& load, const RankTurnsOptions& options);
  // The same with a schedule of that plan, which the ranks of one process share.
  RankTurns(const StepPlan& plan, const LoadTable& load, RankId rank, std::shared_ptr<const TransferSchedule> schedule);
  // Not copied: leases that lend() adds would be of one of them.
  RankTurns(const RankTurns&) = delete;
  RankTurns(RankTurns&&) = default;
  RankTurns& operator=(const RankTurns&) = delete;
  RankTurns& operator=(RankTurns&&) = delete;
  ~RankTurns() = default;

  const StepPlan& plan() const { return plan_; }
  const LoadTable& load() const { return load_; }
  const TransferSchedule& schedule() const { return *schedule_; }
  const TurnOrder& order() const { return schedule_->order; }
  RankId rank() const { return rank_; }

  // So many micro-steps are planned now. Spans that were given out before are no longer valid.
  void lend(int planned);
  bool is_growing() const { return lending_ != nullptr && lending_->lent_turns < order().size(); }
  // The last micro-step whose placement arriving(t) needs, and starting(t). Turns follow in order, so that is the last
  // one of any turn until then.
  MicroStepId needed_by(TurnId t) const { return needed_[t.index()]; }
  MicroStepId needed_at(TurnId t) const;

  // Throws InputError, field `pass`, `micro_step` or `layer`, for one that the phase does not have.
  TurnId turn(Pass pass, MicroStepId micro_step, LayerId layer) const;

  // Into the buffers of this rank; by slot.
  std::span<const ScheduledCopy> arriving(TurnId t) const;
  // Copies into this rank, and those that it serves as a peer: they start `depth` turns before they arrive, or as soon
  // after as their buffer is free. All ranks start the copies between them in the same order.
  std::span<const ScheduledCopy> starting(TurnId t) const;

  // Of the rows in the turn's slots, or at homes alone. Slots are numbered alike. Throws InputError as rank_dispatch.
  void rows(TurnId t, RankDispatchWorkspace& workspace, RankDispatch& rows) const;
  void rows_at_homes(TurnId t, RankDispatchWorkspace& workspace, RankDispatch& rows) const;

  // Where turn t, a forward or backward, finds the expert that `slot` of this rank held in the forward of the same
  // micro-step and layer, which decided how rows lie: with several micro-steps in flight a guest may have come back
  // into another slot. Of slots with rows.
  SlotId slot_of_forward(TurnId t, SlotId slot) const;

  // Gradients that this rank sends or receives when the turn is over, by (expert, guest): of guests that leave, and
  // under `shared` of all that served. A guest to which the plan assigned no rows of a backward has none; one whose
  // turns all ran at homes sends zeros, for a plan does not know what fell back. kAll: those of all ranks, for
  // executors that return them in a collective call.
  enum class Whose : std::uint8_t { kOwn, kAll };
  std::vector<GradientReturn> returning(TurnId t, Whose whose = Whose::kOwn) const;
  // Those that are still away after the last turn: what a drain of the layer brings home.
  std::vector<GradientReturn> draining(LayerId layer, Whose whose = Whose::kOwn) const;

 private:
  RankTurns(const StepPlan& plan, const LoadTable& load, const RankTurnsOptions& options,
            const std::shared_ptr<TransferSchedule>& made);
  void index_starting();
  template <class Goes>
  std::vector<GradientReturn> returns(EventId event, LayerId layer, Whose whose, Goes goes) const;
  bool holds_gradient(EventId event, LayerId layer, RankId rank, SlotId slot) const;

  const StepPlan& plan_;
  const LoadTable& load_;
  const RankId rank_;
  std::shared_ptr<const TransferSchedule> schedule_;
  std::shared_ptr<TransferSchedule> lending_;  // the same, where lend() goes on with it; else null
  std::vector<MicroStepId> needed_;            // [turn], the last micro-step of any turn until then
  Array<ExpertId, 3> home_expert_;             // [layer][rank][home slot]
  std::vector<ScheduledCopy> starting_;        // by turn in which they start, then as in the schedule
  std::vector<std::size_t> first_starting_;    // [num_turns() + 1], into starting_
};

}  // namespace foremoe
