#include "foremoe/transfer/rank_turns.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "foremoe/core/error.h"

namespace foremoe {
namespace {

TurnId start_of(const ScheduledCopy& copy, int depth) {
  return std::max(copy.opens, TurnId{std::max(0, copy.arrives.value - depth)});
}

void expect_index(const char* field, int index, int size) {
  if (index >= 0 && index < size) return;
  throw InputError({.field = field}, fmt::format("{} is not in 0 … {}", index, size - 1));
}

bool is_lent(const StepPlan& plan, const RankTurnsOptions& options) {
  return plan.residency == Residency::kShared && options.schedule.path == PathChoice::kPeer;
}

std::shared_ptr<TransferSchedule> schedule_of(const StepPlan& plan, const RankTurnsOptions& options) {
  if (options.expert <= Bytes{0}) throw InputError({.field = "expert_bytes"}, "must be above 0");
  if (is_lent(plan, options)) return std::make_shared<TransferSchedule>(begin_lending(plan, options.schedule));
  constexpr std::int64_t kElement = 4;
  const ExpertLayout layout(
      {{.name = "expert", .elements = std::max<std::int64_t>(1, options.expert.value / kElement)}});
  return std::make_shared<TransferSchedule>(make_transfer_schedule(plan, layout, options.schedule));
}

Array<ExpertId, 3> home_experts_of(const StepPlan& plan, const LoadTable& load) {
  expect_valid(plan, load);
  Array<ExpertId, 3> experts({static_cast<std::size_t>(plan.num_layers()), static_cast<std::size_t>(plan.num_ranks()),
                              static_cast<std::size_t>(plan.num_slots() - plan.guest_slots)},
                             kNoExpert);
  for (int l = 0; l < plan.num_layers(); ++l) {
    const std::span<const RankId> home = plan.home.row(l);
    const std::vector<SlotId> slots = home_slots(home);
    for (std::size_t e = 0; e < home.size(); ++e) experts(l, home[e], slots[e]) = ExpertId{e};
  }
  return experts;
}

}  // namespace

RankTurns::RankTurns(const StepPlan& plan, const LoadTable& load, const RankTurnsOptions& options)
    : RankTurns(plan, load, options, schedule_of(plan, options)) {}

RankTurns::RankTurns(const StepPlan& plan, const LoadTable& load, const RankTurnsOptions& options,
                     const std::shared_ptr<TransferSchedule>& made)
    : RankTurns(plan, load, options.rank, made, options.rows) {
  if (!is_lent(plan, options)) return;
  lending_ = made;
  lend(options.planned.value_or(plan.num_micro_steps()));
}

RankTurns::RankTurns(const StepPlan& plan, const LoadTable& load, RankId rank,
                     std::shared_ptr<const TransferSchedule> schedule, Rows rows)
    : plan_(plan),
      load_(load),
      rank_(rank),
      rows_(rows),
      schedule_(std::move(schedule)),
      home_expert_(home_experts_of(plan, load)) {
  expect_index("rank", rank.value, plan.num_ranks());
  for (int t = 0; t < order().size(); ++t) {
    const MicroStepId m = order()[TurnId{t}].micro_step;
    needed_.push_back(needed_.empty() ? m : std::max(needed_.back(), m));
  }
  index_starting();
}

void RankTurns::index_starting() {
  starting_.clear();
  first_starting_.clear();
  for (const ScheduledCopy& copy : schedule_->copies) {
    if (copy.rank == rank_ || (copy.path == Path::kPeer && copy.source == rank_)) starting_.push_back(copy);
  }
  const int depth = schedule_->depth;
  std::ranges::stable_sort(starting_, {}, [&](const ScheduledCopy& copy) { return start_of(copy, depth); });
  auto next = starting_.begin();
  for (int t = 0; t <= schedule_->num_turns(); ++t) {
    while (next != starting_.end() && start_of(*next, depth) < TurnId{t}) ++next;
    first_starting_.push_back(static_cast<std::size_t>(next - starting_.begin()));
  }
}

void RankTurns::lend(int planned) {
  if (lending_ == nullptr) throw InputError({.field = "planned"}, "the plan lends no experts from peers");
  int end = lending_->lent_turns;
  while (end < order().size() && order()[TurnId{end}].micro_step.value < planned) ++end;
  if (end == lending_->lent_turns) return;
  lend_turns(plan_, TurnId{end}, *lending_);
  index_starting();
}

const Turn& RankTurns::turn_at(TurnId t) const {
  expect_index("turn", t.value, order().size());
  return order()[t];
}

MicroStepId RankTurns::needed_at(TurnId t) const {
  return needed_by(TurnId{std::min(order().size(), t.value + schedule_->depth) - 1});
}

TurnId RankTurns::turn(Pass pass, MicroStepId micro_step, LayerId layer) const {
  const Array<TurnId, 2>& turns = pass == Pass::kForward ? order().forward : order().backward;
  if (turns.empty() && order().size() > 0) {
    throw InputError({.field = "pass"}, fmt::format("the phase {} has no backward", to_string(schedule_->phase)));
  }
  expect_index("micro_step", micro_step.value, plan_.num_micro_steps());
  expect_index("layer", layer.value, plan_.num_layers());
  return turns(micro_step, layer);
}

std::span<const ScheduledCopy> RankTurns::arriving(TurnId t) const {
  expect_index("turn", t.value, schedule_->num_turns());
  const std::span<const ScheduledCopy> of_all = schedule_->arriving(t);  // by rank
  const auto first = std::ranges::lower_bound(of_all, rank_, {}, &ScheduledCopy::rank);
  const auto last = std::ranges::upper_bound(of_all, rank_, {}, &ScheduledCopy::rank);
  return {first, last};
}

std::span<const ScheduledCopy> RankTurns::starting(TurnId t) const {
  expect_index("turn", t.value, schedule_->num_turns());
  const std::size_t first = first_starting_[t.index()];
  return std::span(starting_).subspan(first, first_starting_[t.index() + 1] - first);
}

void RankTurns::rows(TurnId t, RankDispatchWorkspace& workspace, RankDispatch& rows) const {
  const Turn& turn = turn_at(t);
  rank_dispatch(
      {load_.load[turn.micro_step][turn.layer], layer_quotas(plan_, turn.event, turn.layer), load_.topology(), rows_},
      rank_, workspace, rows);
}

void RankTurns::rows_at_homes(TurnId t, RankDispatchWorkspace& workspace, RankDispatch& rows) const {
  const Turn& turn = turn_at(t);
  const ArrayView<const ExpertId, 2> experts = home_expert_[turn.layer];
  const ArrayView<const Tokens, 2> load = load_.load[turn.micro_step][turn.layer];
  Array<Tokens, 2>& tokens = workspace.home_tokens;  // [rank][home slot], each expert's whole load
  if (tokens.shape() != experts.shape()) tokens = Array<Tokens, 2>(experts.shape());
  std::ranges::fill(tokens.flat(), Tokens{0});
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const ExpertId e = experts.flat()[i];
    for (int source = 0; e != kNoExpert && source < load_.num_ranks(); ++source) tokens.flat()[i] += load(source, e);
  }
  rank_dispatch({load, {experts, tokens}, load_.topology()}, rank_, workspace, rows);
  rows.num_slots = plan_.num_slots();  // guest slots have no rows
  rows.slot_offsets.resize(plan_.slot_expert.extent(3) + 1, rows.slot_offsets.back());
  rows.received.resize(plan_.slot_expert.extent(3) * experts.extent(0), 0);
}

SlotId RankTurns::slot_of_forward(TurnId t, SlotId slot) const {
  const Turn& now = turn_at(t);
  const Turn& before = order()[order().forward(now.micro_step, now.layer)];
  expect_index("slot", slot.value, plan_.num_slots());
  if (before.event == now.event) return slot;
  const ExpertId expert = plan_.slot_expert(before.event, now.layer, rank_, slot);
  const std::span<const ExpertId> slots = plan_.slot_expert.row(now.event, now.layer, rank_);
  const auto found = std::ranges::find(slots, expert);
  if (expert == kNoExpert || found == slots.end()) throw InputError({.field = "slot"}, "has no rows");
  return SlotId{found - slots.begin()};
}

// Returns whether the plan has given the guest rows of a backward pass since its copy.
bool RankTurns::holds_gradient(EventId event, LayerId layer, RankId rank, SlotId slot) const {
  const ExpertId expert = plan_.slot_expert(event, layer, rank, slot);
  for (int t = event.value; t >= 0 && plan_.slot_expert(t, layer, rank, slot) == expert; --t) {
    const bool backward = plan_.in_flight == 1 || plan_.event_pass[static_cast<std::size_t>(t)] == Pass::kBackward;
    if (backward && plan_.slot_tokens(t, layer, rank, slot) > Tokens{0}) return true;
    if (plan_.residency == Residency::kShared) return false;  // no guest stays
  }
  return false;
}

template <class Goes>
std::vector<GradientReturn> RankTurns::returns(EventId event, LayerId layer, Whose whose, Goes goes) const {
  std::vector<GradientReturn> found;
  if (schedule_->phase != Phase::kPolicyUpdate) return found;
  for (int r = 0; r < plan_.num_ranks(); ++r) {
    for (int s = plan_.num_slots() - plan_.guest_slots; s < plan_.num_slots(); ++s) {
      const ExpertId expert = plan_.slot_expert(event, layer, r, s);
      if (expert == kNoExpert) continue;
      const RankId home = plan_.home(layer, expert);
      if (whose == Whose::kOwn && rank_ != home && rank_ != RankId{r}) continue;
      if (!goes(expert, r, s) || !holds_gradient(event, layer, RankId{r}, SlotId{s})) continue;
      found.push_back({.expert = expert, .home = home, .guest = RankId{r}, .slot = SlotId{s}});
    }
  }
  std::ranges::sort(found, {}, [](const GradientReturn& g) { return std::tuple(g.expert, g.guest); });
  return found;
}

std::vector<GradientReturn> RankTurns::returning(TurnId t, Whose whose) const {
  const Turn& turn = turn_at(t);
  if (order().last(turn.event, turn.layer) != t) return {};
  const bool shared = plan_.residency == Residency::kShared;
  const EventId next{turn.event.value + 1};
  if (!shared && next.value == plan_.num_events()) return {};
  return returns(turn.event, turn.layer, whose, [&](ExpertId expert, int r, int s) {
    return shared || plan_.slot_expert(next, turn.layer, r, s) != expert;
  });
}

std::vector<GradientReturn> RankTurns::draining(LayerId layer, Whose whose) const {
  expect_index("layer", layer.value, plan_.num_layers());
  if (plan_.residency == Residency::kShared || plan_.num_events() == 0) return {};
  return returns(EventId{plan_.num_events() - 1}, layer, whose, [](ExpertId, int, int) { return true; });
}

}  // namespace foremoe
