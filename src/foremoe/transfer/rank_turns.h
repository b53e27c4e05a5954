#pragma once

// Everything that one rank needs to execute a plan. Each turn (pass, micro-step, layer) has destinations of rows, the
// layout of incoming rows, copies to start, to wait for and to serve, and gradients to return afterwards. All executors
// use RankTurns. It needs no messages between ranks.
//
//   const RankTurns turns(plan, load, {.rank = RankId{3}, .schedule = {.phase = Phase::kPolicyUpdate}});
//   const TurnId t = turns.turn(Pass::kForward, MicroStepId{0}, LayerId{5});
//   turns.starting(t)   copies to start, or to serve to a peer, when turn t begins
//   turns.arriving(t)   copies that the turn waits for
//   turns.rows(t)       splits, arrival → slot, slot offsets; row_slots() maps routes to the slot of each row
//   turns.returning(t)  gradients of guests to send home after the turn
//
// Leases and arenas are computed once, from the final placement of all micro-steps. Rows and returns are computed on
// request, since the quotas of later micro-steps may not be known yet. Under `shared` with copies from peers,
// placements may also arrive later: lend() adds the leases of the micro-steps planned so far.

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

// Gradient of a guest that must be sent to its home.
struct GradientReturn {
  ExpertId expert;
  RankId home;
  RankId guest;  // rank with the guest
  SlotId slot;   // on the guest's rank
  friend bool operator==(const GradientReturn&, const GradientReturn&) = default;
};

struct RankTurnsOptions {
  RankId rank = {};
  ScheduleOptions schedule = {};
  Bytes expert{1};           // weights of one expert; determines the choice of paths
  Rows rows = Rows::kOrder;  // equal on all ranks; kToken is for executors that dispatch by token
  // Number of planned micro-steps; nullopt: all. Fewer are allowed only under `shared` with copies from peers.
  std::optional<int> planned = std::nullopt;
};

class RankTurns {
 public:
  // Keeps references to plan and load. The plan must pass check_plan. Throws InputError if the rank is out of range,
  // and the errors of expect_valid(plan, load) and make_transfer_schedule. Members throw it for a turn out of range.
  RankTurns(const StepPlan& plan, const LoadTable& load, const RankTurnsOptions& options);
  // Like the constructor above, with a schedule of this plan that the ranks of one process share.
  RankTurns(const StepPlan& plan, const LoadTable& load, RankId rank, std::shared_ptr<const TransferSchedule> schedule,
            Rows rows = Rows::kOrder);
  // No temporaries, which would end before this object.
  RankTurns(const StepPlan&& plan, const LoadTable& load, const RankTurnsOptions& options) = delete;
  RankTurns(const StepPlan& plan, const LoadTable&& load, const RankTurnsOptions& options) = delete;
  RankTurns(const StepPlan&& plan, const LoadTable&& load, const RankTurnsOptions& options) = delete;
  // Not copyable: lend() would add leases to the schedule of one copy only.
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

  // Adds the leases of the first `planned` micro-steps. Invalidates all spans returned so far.
  void lend(int planned);
  bool is_growing() const { return lending_ != nullptr && lending_->lent_turns < order().size(); }
  // Last micro-step whose placement arriving(t) needs (needed_by) or starting(t) needs (needed_at). Turns run in order,
  // so this is the last micro-step of all turns up to the arrival of the copies.
  MicroStepId needed_by(TurnId t) const { return needed_[t.index()]; }
  MicroStepId needed_at(TurnId t) const;

  // Throws InputError, field `pass`, `micro_step` or `layer`, if the phase has no such turn.
  TurnId turn(Pass pass, MicroStepId micro_step, LayerId layer) const;

  // Copies into the buffers of this rank, by slot.
  std::span<const ScheduledCopy> arriving(TurnId t) const;
  // Copies into this rank and copies that it serves as a peer. A copy starts `depth` turns before it arrives, or later
  // if its buffer is not free until then. Any two ranks start the copies between them in the same order.
  std::span<const ScheduledCopy> starting(TurnId t) const;

  // Rows for the turn's slots, or for homes alone, with the same slot numbers. Throws the errors of rank_dispatch.
  void rows(TurnId t, RankDispatchWorkspace& workspace, RankDispatch& rows) const;
  void rows_at_homes(TurnId t, RankDispatchWorkspace& workspace, RankDispatch& rows) const;

  // Slot that contains, at turn t (forward or backward), the expert that was in `slot` of this rank in the forward pass
  // of the same micro-step and layer. The forward determined the layout of rows. The slots differ if several
  // micro-steps are in flight and a guest returned to another slot. Call only for slots with rows.
  SlotId slot_of_forward(TurnId t, SlotId slot) const;

  // Gradients that this rank sends or receives after the turn, sorted by (expert, guest): those of guests that leave
  // and, under `shared`, those of all guests that served tokens. A guest without planned backward rows has no gradient.
  // If all of a guest's turns ran at homes instead, the guest sends zeros, since fallbacks are not part of the plan.
  // kAll returns the gradients of all ranks, for executors with collective returns.
  enum class Whose : std::uint8_t { kOwn, kAll };
  std::vector<GradientReturn> returning(TurnId t, Whose whose = Whose::kOwn) const;
  // Gradients that no turn returns and that draining the layer sends home.
  std::vector<GradientReturn> draining(LayerId layer, Whose whose = Whose::kOwn) const;

 private:
  RankTurns(const StepPlan& plan, const LoadTable& load, const RankTurnsOptions& options,
            const std::shared_ptr<TransferSchedule>& made);
  void index_starting();
  const Turn& turn_at(TurnId t) const;
  template <class Goes>
  std::vector<GradientReturn> returns(EventId event, LayerId layer, Whose whose, Goes goes) const;
  bool holds_gradient(EventId event, LayerId layer, RankId rank, SlotId slot) const;

  const StepPlan& plan_;
  const LoadTable& load_;
  const RankId rank_;
  const Rows rows_;
  std::shared_ptr<const TransferSchedule> schedule_;
  std::shared_ptr<TransferSchedule> lending_;  // schedule_ if lend() extends it, else null
  std::vector<MicroStepId> needed_;            // [turn], the last micro-step of any turn up to it
  Array<ExpertId, 3> home_expert_;             // [layer][rank][home slot]
  std::vector<ScheduledCopy> starting_;        // by starting turn, then as in the schedule
  std::vector<std::size_t> first_starting_;    // [num_turns() + 1], into starting_
};

}  // namespace foremoe
