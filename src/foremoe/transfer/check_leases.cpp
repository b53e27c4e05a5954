// Independent check of a schedule, written from transfer_schedule.h and docs/users/formats.md. Shares no code with
// make_transfer_schedule, the turn order or CopyFinder. Prefers simplicity to speed. Each check assumes that all
// earlier checks passed.

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "foremoe/transfer/transfer_schedule.h"

namespace foremoe {

namespace {

using Violations = std::vector<std::string>;

class LeaseCheck {
 public:
  LeaseCheck(const TransferSchedule& schedule, const StepPlan& plan)
      : schedule_(schedule), plan_(plan), turns_(schedule.order.size()), homes_(plan.num_slots() - plan.guest_slots) {}

  Violations run() {
    turns();
    if (found_.empty()) ranges();
    if (!found_.empty()) return found_;
    arrivals();
    buffers();
    overlaps();
    staging();
    readers();
    needed();
    check_homes_restored();
    paths();
    return found_;
  }

 private:
  template <class... Args>
  void add(fmt::format_string<Args...> what, Args&&... args) {
    found_.push_back(fmt::format(what, std::forward<Args>(args)...));
  }

  static std::string name(const ScheduledCopy& c) {
    return fmt::format("copy of expert {}, layer {}, into slot {} of rank {} for turn {}", c.expert.value,
                       c.layer.value, c.slot.value, c.rank.value, c.arrives.value);
  }

  bool free() const { return plan_.residency == Residency::kFree; }
  bool shared() const { return plan_.residency == Residency::kShared; }
  bool is_returning_home(const ScheduledCopy& c) const { return c.arrives.value >= turns_; }  // restores a home
  // Arrives in a staging buffer, and moves to its slot when all copies of that turn have arrived.
  bool staged(const ScheduledCopy& c) const { return free() && c.path == Path::kPeer; }
  // First turn at which readers may no longer find the previous contents of the slot.
  int replaces_from(const ScheduledCopy& c) const { return staged(c) ? c.arrives.value : c.opens.value; }
  ExpertId held(EventId event, const ScheduledCopy& c) const {
    return plan_.slot_expert(event, c.layer, c.rank, c.slot);
  }

  // The turns match the plan's events, and the tables index them correctly.
  void turns() {
    const bool update = schedule_.phase == Phase::kPolicyUpdate;
    std::vector<Turn> expected;
    for (int t = 0; t < plan_.num_events(); ++t) {
      std::vector<Pass> passes = {plan_.event_pass[t]};
      if (plan_.in_flight == 1 && update) passes.push_back(Pass::kBackward);
      for (const Pass pass : passes) {
        for (int i = 0; i < plan_.num_layers(); ++i) {
          const int l = pass == Pass::kForward ? i : plan_.num_layers() - 1 - i;
          expected.push_back({EventId{t}, pass, plan_.event_micro_step[t], LayerId{l}});
        }
      }
    }
    const TurnOrder& order = schedule_.order;
    if (update && free()) add("residency free has no policy_update");
    if (!update && plan_.in_flight > 1) add("recompute under the plan of a policy_update");
    if (order.turns != expected)
      add("the turns are not those of the plan's events under {}", to_string(schedule_.phase));
    const auto layers = plan_.slot_expert.extent(1);
    Array<TurnId, 2> of_pass[2];  // [pass] → [micro_step][layer]
    for (auto& table : of_pass) table = Array<TurnId, 2>({static_cast<std::size_t>(plan_.num_micro_steps()), layers});
    Array<TurnId, 2> first({plan_.slot_expert.extent(0), layers});
    Array<TurnId, 2> last = first;
    for (int t = static_cast<int>(expected.size()) - 1; t >= 0; --t)
      first(expected[t].event, expected[t].layer) = TurnId{t};
    for (int t = 0; t < static_cast<int>(expected.size()); ++t) {
      const Turn& turn = expected[t];
      last(turn.event, turn.layer) = TurnId{t};
      of_pass[static_cast<int>(turn.pass)](turn.micro_step, turn.layer) = TurnId{t};
    }
    if (order.forward != of_pass[0]) add("the table of forward turns is wrong");
    if (order.backward != (update ? of_pass[1] : Array<TurnId, 2>())) add("the table of backward turns is wrong");
    if (order.first != first || order.last != last) add("the first and last turns of events are wrong");
  }

  void ranges() {
    if (schedule_.depth < 1) add("depth is {}", schedule_.depth);
    const int expected = shared() ? schedule_.depth * plan_.guest_slots
                                  : plan_.num_layers() * (free() ? plan_.num_slots() : plan_.guest_slots);
    const bool any_staged = std::ranges::any_of(schedule_.copies, [&](const ScheduledCopy& c) { return staged(c); });
    const int staging = schedule_.buffers_per_rank - expected;
    if (any_staged ? staging <= 0 || staging % (schedule_.depth + 1) != 0 : staging != 0)
      add("{} buffers per rank, not {}{}", schedule_.buffers_per_rank, expected,
          any_staged ? " and staging buffers for this turn and each of the depth" : "");
    const auto in = [](auto id, int n) { return id.value >= 0 && id.value < n; };
    for (const ScheduledCopy& c : schedule_.copies) {
      if (!in(c.rank, plan_.num_ranks()) || !in(c.layer, plan_.num_layers()) || !in(c.expert, plan_.num_experts()) ||
          !in(c.slot, plan_.num_slots()) || !in(c.arrives, turns_ + return_turns(c)) || c.opens.value < 0) {
        add("{}: out of range", name(c));
        continue;
      }
      if (c.opens > c.arrives) add("{}: its buffer is free only from turn {} on", name(c), c.opens.value);
      if (c.closes < c.arrives || !in(c.closes, is_returning_home(c) ? c.arrives.value + 1 : turns_)) {
        add("{}: closes at turn {}", name(c), c.closes.value);
      }
    }
  }

  // Turns after the last turn at which homes return: 0 unless `free`; one per layer with peer copies, else one.
  int return_turns(const ScheduledCopy& c) const { return !free() ? 0 : staged(c) ? plan_.num_layers() : 1; }

  // Copies are sorted by turn, rank, slot, and indexed by turn.
  void arrivals() {
    const auto& copies = schedule_.copies;
    const auto key = [](const ScheduledCopy& c) { return std::tuple(c.arrives, c.rank, c.slot); };
    for (std::size_t i = 1; i < copies.size(); ++i) {
      if (key(copies[i]) < key(copies[i - 1])) add("{}: out of order", name(copies[i]));
    }
    const auto& first = schedule_.first_of_turn;
    int entries = turns_ + 2;
    for (const ScheduledCopy& c : copies) entries = std::max(entries, c.arrives.value + 2);
    if (std::ssize(first) != entries) {
      add("first_of_turn has {} entries, not {}", first.size(), entries);
      return;
    }
    std::vector<std::size_t> expected(static_cast<std::size_t>(entries));  // counted by turn, then summed
    for (const ScheduledCopy& c : copies) ++expected[c.arrives.index() + 1];
    for (int t = 1; t < entries; ++t) expected[t] += expected[t - 1];
    for (int t = 0; t < entries; ++t) {
      if (first[t] != expected[t]) add("first_of_turn[{}] is {}, not {}", t, first[t], expected[t]);
    }
  }

  void buffers() {
    for (const ScheduledCopy& c : schedule_.copies) {
      const int guest = c.slot.value - homes_;
      int expected = c.layer.value * plan_.guest_slots + guest;
      if (shared()) expected = c.arrives.value % schedule_.depth * plan_.guest_slots + guest;
      if (free()) expected = c.layer.value * plan_.num_slots() + c.slot.value;
      if (!free() && guest < 0) add("{}: homes are pinned", name(c));
      if (c.buffer != expected) add("{}: goes into buffer {}, not {}", name(c), c.buffer, expected);
      of_buffer_[{c.rank, c.buffer}].push_back(c);
    }
    for (auto& [buffer, leases] : of_buffer_) std::ranges::stable_sort(leases, {}, &ScheduledCopy::arrives);
  }

  void overlaps() {
    for (const auto& [buffer, leases] : of_buffer_) {
      for (std::size_t i = 1; i < leases.size(); ++i) {
        if (replaces_from(leases[i]) > leases[i - 1].closes.value) continue;
        add("{}: may begin at turn {}, but buffer {} is leased to expert {}, layer {}, until turn {}", name(leases[i]),
            replaces_from(leases[i]), buffer.second, leases[i - 1].expert.value, leases[i - 1].layer.value,
            leases[i - 1].closes.value);
      }
    }
  }

  // A staging buffer contains one copy at a time, from its opening until its arrival.
  void staging() {
    const int slots = plan_.num_layers() * plan_.num_slots();
    std::map<std::pair<RankId, int>, const ScheduledCopy*> last;
    for (const ScheduledCopy& c : schedule_.copies) {
      if (!staged(c)) {
        if (c.staging >= 0) add("{}: waits in buffer {}, though it arrives where it is read", name(c), c.staging);
        continue;
      }
      if (c.staging < slots || c.staging >= schedule_.buffers_per_rank) {
        add("{}: goes into buffer {}, which is not a staging buffer", name(c), c.staging);
        continue;
      }
      const ScheduledCopy*& before = last[{c.rank, c.staging}];
      if (before != nullptr && c.opens <= before->arrives) {
        add("{}: may begin at turn {}, but expert {}, layer {}, stays in its staging buffer until turn {}", name(c),
            c.opens.value, before->expert.value, before->layer.value, before->arrives.value);
      }
      before = &c;
    }
  }

  // Every read of a slot finds the expert that the plan has there.
  void readers() {
    for (int t = 0; t < turns_; ++t) {
      const Turn& turn = schedule_.order.turns[t];
      for (int r = 0; r < plan_.num_ranks(); ++r) {
        for (int s = free() ? 0 : homes_; s < plan_.num_slots(); ++s) {
          const ExpertId e = plan_.slot_expert(turn.event, turn.layer, r, s);
          const bool read = !shared() || plan_.slot_tokens(turn.event, turn.layer, r, s) > Tokens{0};
          if (e != kNoExpert && read) reader(TurnId{t}, turn.layer, RankId{r}, SlotId{s}, e);
        }
      }
    }
  }

  void reader(TurnId t, LayerId layer, RankId rank, SlotId slot, ExpertId e) {
    int buffer = layer.value * plan_.guest_slots + slot.value - homes_;
    if (shared()) buffer = t.value % schedule_.depth * plan_.guest_slots + slot.value - homes_;
    if (free()) buffer = layer.value * plan_.num_slots() + slot.value;
    const auto at = of_buffer_.find({rank, buffer});
    const ScheduledCopy* last = nullptr;  // the current lease
    const ScheduledCopy* next = nullptr;  // the following lease
    if (at != of_buffer_.end()) {
      const std::vector<ScheduledCopy>& leases = at->second;
      const auto after = std::ranges::upper_bound(leases, t, {}, &ScheduledCopy::arrives);
      if (after != leases.begin()) last = &*std::prev(after);
      if (after != leases.end()) next = &*after;
    }
    const auto reads = [&] {
      return fmt::format("turn {} reads expert {}, layer {}, in slot {} of rank {}", t.value, e.value, layer.value,
                         slot.value, rank.value);
    };
    const bool unwritten_home = last == nullptr && free() && home_of_slot(layer, rank, slot) == e;
    if (last == nullptr ? !unwritten_home : last->expert != e || last->layer != layer) {
      add("{}, which no copy has put there", reads());
    } else if (last != nullptr && last->closes < t) {
      add("{}, whose lease closes at turn {}", reads(), last->closes.value);
    }
    if (next != nullptr && replaces_from(*next) <= t.value) {
      add("{}, which a copy may overwrite from turn {} on", reads(), replaces_from(*next));
    }
  }

  // Every copy is needed, and its lease lasts no longer than the plan keeps its expert in the slot.
  void needed() {
    for (const ScheduledCopy& c : schedule_.copies) {
      if (is_returning_home(c)) continue;
      const EventId event = schedule_.order[c.arrives].event;
      for (const TurnId t : {c.arrives, c.closes}) {
        if (schedule_.order[t].layer != c.layer) add("{}: turn {} is another layer's", name(c), t.value);
      }
      for (int t = c.arrives.value; t <= c.closes.value; ++t) {
        const Turn& turn = schedule_.order.turns[t];
        if (turn.layer != c.layer || held(turn.event, c) == c.expert) continue;
        add("{}: leased at turn {}, where the plan has expert {} there", name(c), t, held(turn.event, c).value);
      }
      if (shared()) {
        if (plan_.slot_tokens(event, c.layer, c.rank, c.slot) == Tokens{0}) add("{}: it has no quota", name(c));
        continue;
      }
      bool there_before = event == EventId{0} && plan_.home(c.layer, c.expert) == c.rank;
      for (int s = 0; s < plan_.num_slots() && event > EventId{0}; ++s) {
        there_before |= plan_.slot_expert(event.value - 1, c.layer, c.rank, s) == c.expert;
      }
      if (there_before) add("{}: the rank has it already", name(c));
    }
  }

  // After the last turn, every home slot contains its own expert again.
  void check_homes_restored() {
    if (!free()) return;
    for (const auto& [buffer, leases] : of_buffer_) {
      const LayerId layer{buffer.second / plan_.num_slots()};
      const SlotId slot{buffer.second % plan_.num_slots()};
      const ExpertId home = home_of_slot(layer, buffer.first, slot);
      if (home != kNoExpert && leases.back().expert != home) {
        add("expert {}, layer {}, does not come back to its home on rank {}", home.value, layer.value,
            buffer.first.value);
      }
      for (std::size_t i = 0; i < leases.size(); ++i) {
        if (!is_returning_home(leases[i])) continue;
        if (staged(leases[i]) && leases[i].arrives.value != turns_ + layer.value) {
          add("{}: its layer's homes come back at turn {}", name(leases[i]), turns_ + layer.value);
        }
        const ExpertId before = i == 0 ? home : leases[i - 1].expert;
        if (leases[i].expert != home || before == home) add("{}: no home that was overwritten", name(leases[i]));
      }
    }
  }

  // Expert whose home is this slot (a rank's home experts are in ascending order), or kNoExpert for guest slots.
  ExpertId home_of_slot(LayerId layer, RankId rank, SlotId slot) const {
    int s = 0;
    for (int e = 0; e < plan_.num_experts(); ++e) {
      if (plan_.home(layer, e) == rank && s++ == slot.value) return ExpertId{e};
    }
    return kNoExpert;
  }

  // Returns whether the source contains the expert before the copy opens and until the turn's copies have arrived.
  bool source_holds(const ScheduledCopy& c) const {
    if (c.source.value < 0 || c.source.value >= plan_.num_ranks()) return false;
    if (c.source_buffer < 0 || c.source_buffer / plan_.num_slots() != c.layer.value) return false;
    ExpertId there = home_of_slot(c.layer, c.source, SlotId{c.source_buffer % plan_.num_slots()});
    const auto at = of_buffer_.find({c.source, c.source_buffer});
    if (at == of_buffer_.end()) return there == c.expert;
    for (const ScheduledCopy& lease : at->second) {
      if (lease.arrives < c.opens) {
        there = lease.expert;
      } else if (staged(lease) ? lease.arrives < c.arrives : lease.opens <= c.arrives) {
        return false;
      }
    }
    return there == c.expert;
  }

  // Sources are homes, or under `free` ranks with the expert. Arenas contain exactly what the host path fetches.
  void paths() {
    const Topology topology{.num_ranks = plan_.num_ranks(), .ranks_per_node = plan_.ranks_per_node};
    std::vector<std::set<ArenaExpert>> fetched(topology.num_nodes());
    for (const ScheduledCopy& c : schedule_.copies) {
      if (c.path == Path::kHost) fetched[topology.node_of(c.rank).index()].insert({c.layer, c.expert});
      if (staged(c)) {
        if (!source_holds(c)) {
          add("{}: buffer {} of rank {} does not hold it from turn {} on until then", name(c), c.source_buffer,
              c.source.value, c.opens.value);
        }
        continue;
      }
      if (c.source != plan_.home(c.layer, c.expert)) add("{}: rank {} is not its home", name(c), c.source.value);
      if (c.path == Path::kPeer && c.source == c.rank) add("{}: the peer is the rank itself", name(c));
    }
    if (schedule_.arena.size() != fetched.size()) {
      add("{} arenas on {} nodes", schedule_.arena.size(), fetched.size());
      return;
    }
    for (std::size_t n = 0; n < fetched.size(); ++n) {
      const std::vector<ArenaExpert> expected(fetched[n].begin(), fetched[n].end());
      if (schedule_.arena[n] != expected) add("the arena of node {} does not hold what the host path fetches there", n);
    }
  }

  const TransferSchedule& schedule_;
  const StepPlan& plan_;
  int turns_;
  int homes_;  // home slots per rank
  Violations found_;
  std::map<std::pair<RankId, int>, std::vector<ScheduledCopy>> of_buffer_;  // by arrives
};

}  // namespace

Violations check_leases(const TransferSchedule& schedule, const StepPlan& plan) {
  return LeaseCheck(schedule, plan).run();
}

}  // namespace foremoe
