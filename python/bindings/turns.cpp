// Binds RankTurns, the execution schedule of one rank.

#include <fmt/format.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include "bindings.h"
#include "foremoe/core/error.h"
#include "foremoe/transfer/rank_turns.h"

namespace foremoe::python {
namespace {

// RankTurns with their plan and load.
struct Turns {
  Plan plan;
  std::shared_ptr<const Workload> input;
  RankTurns turns;

  // Under `shared` with path peer, waits until the leases of micro-steps up to this one exist. The GIL guards lend().
  void wait_for_leases(MicroStepId m) {
    if (!turns.is_growing()) return;
    plan.running->wait_for(m.value);
    turns.lend(num_planned(plan));
  }

  // Rows depend on the quotas of this and all earlier micro-steps. Throws InputError if they are not planned.
  void expect_planned(MicroStepId m) const {
    if (m.value < num_planned(plan)) return;
    throw InputError({.field = "micro_step"},
                     fmt::format("{} is not planned yet: call wait_for({}) first", m.value, m.value));
  }
};

std::string_view name_of(Pass pass) { return pass == Pass::kForward ? "forward" : "backward"; }

Pass pass_named(const std::string& name) {
  if (name == "forward") return Pass::kForward;
  if (name == "backward") return Pass::kBackward;
  throw InputError({.field = "pass"}, fmt::format("'{}', expected forward or backward", name));
}

PathChoice path_named(const std::string& name) {
  if (name == "auto") return PathChoice::kAuto;
  if (name == "host") return PathChoice::kHost;
  if (name == "peer") return PathChoice::kPeer;
  throw InputError({.field = "path"}, fmt::format("'{}', expected auto, host or peer", name));
}

Rows rows_named(const std::string& name) {
  if (name == "order") return Rows::kOrder;
  if (name == "token") return Rows::kToken;
  throw InputError({.field = "rows"}, fmt::format("'{}', expected order or token", name));
}

// One turn of one rank. Its rows are computed on construction.
struct RankTurn {
  std::shared_ptr<Turns> of;
  TurnId id;
  RankDispatch rows;

  const Turn& turn() const { return of->turns.order()[id]; }
};

RankDispatchWorkspace& workspace() {
  thread_local RankDispatchWorkspace reused;
  return reused;
}

std::shared_ptr<Turns> make_turns(const Plan& plan, const Load& load, int rank, const std::string& phase,
                                  std::int64_t expert_bytes, const std::string& path, int depth,
                                  const std::string& rows) {
  if (!plan.layers.is_all()) throw InputError({.field = "plan"}, "is a part of a plan: join the parts first");
  if (path == "peer" && plan.step->residency == Residency::kFree) {
    throw InputError({.field = "path"},
                     "peer cannot serve a plan of residency free: turns do not list its "
                     "staging buffers");
  }
  const auto digest = [&] {
    const ReleasedGil release;
    return load_digest(load.table());
  }();
  if (plan.step->load_digest != digest || plan.step->ranks_per_node != load.table().ranks_per_node) {
    throw InputError({.field = "plan"}, "was made for a different load");
  }
  const bool follows = plan.running && plan.step->residency == Residency::kShared && path == "peer";
  if (plan.step->residency == Residency::kShared && !follows)
    finished(plan);  // arenas contain the experts of all turns, so all must be planned
  RankTurnsOptions options{.rank = RankId{rank},
                           .schedule = {.phase = phase_named(phase), .path = path_named(path), .depth = depth},
                           .expert = Bytes{expert_bytes},
                           .rows = rows_named(rows)};
  if (follows) options.planned = num_planned(plan);
  const ReleasedGil release;
  return std::make_shared<Turns>(Turns{plan, load.input, RankTurns(*plan.step, load.table(), options)});
}

RankTurn turn_at(const std::shared_ptr<Turns>& self, TurnId id, bool at_homes) {
  self->expect_planned(self->turns.order()[id].micro_step);
  RankTurn turn{.of = self, .id = id};
  if (at_homes) {
    self->turns.rows_at_homes(id, workspace(), turn.rows);
  } else {
    self->turns.rows(id, workspace(), turn.rows);
  }
  return turn;
}

TurnId index_of(const Turns& self, int index) {
  if (index >= 0 && index < self.turns.order().size()) return TurnId{index};
  throw nb::index_error(fmt::format("turn {}, but there are {}", index, self.turns.order().size()).c_str());
}

TurnId find_turn(const Turns& self, const std::string& pass, int micro_step, int layer) {
  return self.turns.turn(pass_named(pass), MicroStepId{micro_step}, LayerId{layer});
}

std::vector<ScheduledCopy> list_of(std::span<const ScheduledCopy> copies) { return {copies.begin(), copies.end()}; }

// Returns the slot of each entry of `routes`: int32 [tokens · top_k].
std::vector<std::int32_t> slots_of(const RankTurn& turn, const AnyArray& routes) {
  const std::int32_t* const data = data_of<std::int32_t>(routes, "routes", "[tokens, top_k]", 2);
  const int top_k = turn.of->input->load.top_k;
  if (routes.shape(1) != static_cast<std::size_t>(top_k)) {
    throw InputError({.field = "routes"}, fmt::format("is {}; the load's top_k is {}", describe(routes), top_k));
  }
  std::vector<std::int32_t> slots(routes.size());
  const ReleasedGil release;
  const auto* const ids = reinterpret_cast<const ExpertId*>(data);
  row_slots(turn.rows, std::vector(ids, ids + routes.size()), top_k, workspace(), slots);
  return slots;
}

auto row_slots_of(const RankTurn& turn, const AnyArray& routes) {
  return array_of(slots_of(turn, routes), {routes.shape(0), routes.shape(1)});
}

auto row_order_of(const RankTurn& turn, const AnyArray& routes) {
  const std::vector<std::int32_t> slots = slots_of(turn, routes);
  std::vector<std::int32_t> order(static_cast<std::size_t>(turn.rows.sent));
  {
    const ReleasedGil release;
    row_order(turn.rows, slots, workspace(), order);
  }
  return array_of(std::move(order));
}

std::vector<std::tuple<int, int, int, std::int64_t>> blocks_of(const RankTurn& turn) {
  std::vector<std::tuple<int, int, int, std::int64_t>> blocks;
  for (const Shipment& s : turn.rows.blocks) {
    blocks.emplace_back(s.expert.value, s.replica.value, s.slot.value, s.rows.value);
  }
  return blocks;
}

void bind_copy(nb::module_& m) {
  nb::class_<ScheduledCopy>(m, "Copy", R"(Transfer of one expert's weights into one guest buffer of one rank.

The buffer is free when turn `opens` begins. Turn `arrives` is the first that reads the weights, `closes` the last.)")
      .def_prop_ro(
          "rank", [](const ScheduledCopy& c) { return c.rank.value; }, "Receiving rank.")
      .def_prop_ro("layer", [](const ScheduledCopy& c) { return c.layer.value; })
      .def_prop_ro("expert", [](const ScheduledCopy& c) { return c.expert.value; })
      .def_prop_ro(
          "slot", [](const ScheduledCopy& c) { return c.slot.value; }, "Slot in the plan.")
      .def_ro("buffer", &ScheduledCopy::buffer,
              "Guest buffer of the rank: layer·G + guest slot; under shared, one of depth·G buffers that layers share.")
      .def_prop_ro("opens", [](const ScheduledCopy& c) { return c.opens.value; })
      .def_prop_ro("arrives", [](const ScheduledCopy& c) { return c.arrives.value; })
      .def_prop_ro("closes", [](const ScheduledCopy& c) { return c.closes.value; })
      .def_prop_ro(
          "path", [](const ScheduledCopy& c) { return c.path == Path::kHost ? "host" : "peer"; },
          "Source: host (the node's arena) or peer (rank `source`).")
      .def_prop_ro(
          "source", [](const ScheduledCopy& c) { return c.source.value; },
          "Rank that provides the weights; on the host path, the expert's home, which fills the arena.")
      .def("__repr__", [](const ScheduledCopy& c) {
        return fmt::format("<foremoe.Copy: layer {} expert {} to rank {} slot {} for turn {}>", c.layer.value,
                           c.expert.value, c.rank.value, c.slot.value, c.arrives.value);
      });
  nb::class_<GradientReturn>(m, "GradientReturn", "Transfer of a guest's gradient to the expert's home.")
      .def_prop_ro("expert", [](const GradientReturn& g) { return g.expert.value; })
      .def_prop_ro(
          "home", [](const GradientReturn& g) { return g.home.value; }, "Rank that owns the expert.")
      .def_prop_ro(
          "guest", [](const GradientReturn& g) { return g.guest.value; }, "Rank of the guest.")
      .def_prop_ro(
          "slot", [](const GradientReturn& g) { return g.slot.value; }, "Slot of the guest on that rank.")
      .def("__repr__", [](const GradientReturn& g) {
        return fmt::format("<foremoe.GradientReturn: expert {} from rank {} to {}>", g.expert.value, g.guest.value,
                           g.home.value);
      });
}

void bind_turn(nb::module_& m) {
  nb::class_<RankTurn>(m, "RankTurn", R"(Work of one rank in one pass of one layer in one micro-step.

Sent rows are sorted by destination rank, expert and row; received rows by source and expert; computed rows by slot and
source.)")
      .def_prop_ro(
          "index", [](const RankTurn& t) { return t.id.value; }, "Index in execution order.")
      .def_prop_ro("layer_pass", [](const RankTurn& t) { return std::string(name_of(t.turn().pass)); })
      .def_prop_ro("micro_step", [](const RankTurn& t) { return t.turn().micro_step.value; })
      .def_prop_ro("layer", [](const RankTurn& t) { return t.turn().layer.value; })
      .def_prop_ro(
          "event", [](const RankTurn& t) { return t.turn().event.value; }, "Event of the plan.")
      .def_prop_ro(
          "send",
          [](const nb::object& self) { return view_of<std::int64_t>(nb::cast<const RankTurn&>(self).rows.send, self); },
          "int64 [ranks], rows to each rank.")
      .def_prop_ro(
          "recv",
          [](const nb::object& self) { return view_of<std::int64_t>(nb::cast<const RankTurn&>(self).rows.recv, self); },
          "int64 [ranks], rows from each rank.")
      .def_prop_ro(
          "to_slots",
          [](const nb::object& self) {
            return view_of<std::int32_t>(nb::cast<const RankTurn&>(self).rows.to_slots, self);
          },
          "int32 [rows received]: computed row i is received row to_slots[i].")
      .def_prop_ro(
          "slot_offsets",
          [](const nb::object& self) {
            return view_of<std::int64_t>(nb::cast<const RankTurn&>(self).rows.slot_offsets, self);
          },
          "int64 [slots + 1], first computed row of each slot.")
      .def_prop_ro(
          "received",
          [](const nb::object& self) {
            const auto& turn = nb::cast<const RankTurn&>(self);
            return view_of(turn.rows.received.data(), {turn.rows.slot_offsets.size() - 1, turn.rows.recv.size()}, self);
          },
          "int64 [slots, ranks], rows that each slot computes for each rank.")
      .def_prop_ro(
          "blocks", &blocks_of,
          R"(Tuples (expert, rank, slot, rows), sorted by expert. This rank sends `rows` rows of the expert to that slot.

For executors without routes, which may choose any rows of the expert in this number. Executors with routes call
slots().)")
      .def_prop_ro("rows_sent", [](const RankTurn& t) { return t.rows.sent; })
      .def_prop_ro(
          "copies",
          [](const RankTurn& t) {
            t.of->wait_for_leases(t.of->turns.needed_by(t.id));
            return list_of(t.of->turns.arriving(t.id));
          },
          "Copies for which this turn waits. With residency shared and path peer, reading it waits for the planner.")
      .def("slots", &row_slots_of, "routes"_a,
           R"(Returns the replica that serves each row.

Args:
    routes: int32 [tokens, top_k], routes of this rank; a negative entry has no route.

Returns:
    int32 [tokens, top_k], rank * plan.num_slots + slot; −1 for an entry without a route.

Raises:
    InputError: if the routes differ from those that the load counts.)")
      .def("row_order", &row_order_of, "routes"_a,
           R"(Returns int32 [rows sent]: row i is entry order[i] of the flattened routes, i.e. token order[i] // top_k.

Argument and errors are those of slots().)")
      .def("__repr__", [](const RankTurn& t) {
        return fmt::format("<foremoe.RankTurn {}: {} of micro-step {}, layer {}>", t.id.value, name_of(t.turn().pass),
                           t.turn().micro_step.value, t.turn().layer.value);
      });
}

}  // namespace

void bind_turns(nb::module_& m) {
  bind_copy(m);
  bind_turn(m);
  nb::class_<Turns>(m, "RankTurns",
                    R"(Execution schedule of one rank for a plan. Ranks compute it independently, without communication.

A turn is one (pass, micro-step, layer) of a phase, in execution order. Index by turn number or by these three.)")
      .def(nb::new_(&make_turns), "plan"_a, "load"_a, nb::kw_only(), "rank"_a, "phase"_a = "policy_update",
           "expert_bytes"_a = 1, "path"_a = "auto", "depth"_a = kDefaultDepth, "rows"_a = "order",
           R"(Computes the turns of one rank.

Args:
    rank: Rank whose turns to compute.
    phase: recompute (forward passes only) or policy_update.
    expert_bytes: Size of one expert's weights, used to choose between paths.
    path: Source of copies: host (the node's arena in shared memory), peer (the rank that owns the expert) or auto.
    depth: Number of turns by which a copy starts ahead.
    rows: How slots() assigns rows to replicas, equal on all ranks: order, or token, such that few nodes serve each
        token. `token` is for executors that send a token once to each node.

Raises:
    InputError: if the plan was made for a different load or does not support the phase, or an argument is invalid.)")
      .def("__len__", [](const Turns& t) { return t.turns.order().size(); })
      .def("__getitem__",
           [](const std::shared_ptr<Turns>& self, int index) { return turn_at(self, index_of(*self, index), false); })
      .def("__getitem__",
           [](const std::shared_ptr<Turns>& self, const std::tuple<std::string, int, int>& key) {
             return turn_at(self, find_turn(*self, std::get<0>(key), std::get<1>(key), std::get<2>(key)), false);
           })
      .def(
          "at_homes",
          [](const std::shared_ptr<Turns>& self, const std::string& pass, int micro_step, int layer) {
            return turn_at(self, find_turn(*self, pass, micro_step, layer), true);
          },
          "layer_pass"_a, "micro_step"_a, "layer"_a,
          "Returns the turn without guests: every expert is served at its home.")
      .def(
          "starting",
          [](Turns& t, int index) {
            const TurnId id = index_of(t, index);
            t.wait_for_leases(t.turns.needed_at(id));
            return list_of(t.turns.starting(id));
          },
          "turn"_a,
          R"(Returns the copies that this rank starts, or serves to a peer, when the turn begins.

Two ranks start the copies between them at the same turn and in the same order. With residency shared and path peer,
waits until these copies, which may belong to the next micro-step, are planned.)")
      .def(
          "returning",
          [](const Turns& t, int index) {
            const TurnId id = index_of(t, index);
            t.expect_planned(t.turns.order()[id].micro_step);
            return t.turns.returning(id);
          },
          "turn"_a, "Returns the gradients that this rank sends or receives after the turn, sorted by (expert, guest).")
      .def(
          "draining",
          [](const Turns& t, int layer) {
            t.expect_planned(MicroStepId{t.plan.step->num_micro_steps() - 1});
            return t.turns.draining(LayerId{layer});
          },
          "layer"_a, "Returns the gradients that have not been returned by the last turn.")
      .def_prop_ro("rank", [](const Turns& t) { return t.turns.rank().value; })
      .def_prop_ro("phase", [](const Turns& t) { return std::string(to_string(t.turns.schedule().phase)); })
      .def_prop_ro("depth", [](const Turns& t) { return t.turns.schedule().depth; })
      .def_prop_ro(
          "num_buffers", [](const Turns& t) { return t.turns.schedule().buffers_per_rank; },
          "Number of guest buffers of this rank.")
      .def(
          "arena",
          [](const Turns& t, int node) {
            const auto& arenas = t.turns.schedule().arena;
            if (node < 0 || node >= static_cast<int>(arenas.size())) {
              throw InputError({.field = "node"}, fmt::format("{}, but there are {}", node, arenas.size()));
            }
            std::vector<std::pair<int, int>> experts;
            for (const ArenaExpert& e : arenas[static_cast<std::size_t>(node)]) {
              experts.emplace_back(e.layer.value, e.expert.value);
            }
            return experts;
          },
          "node"_a, "Returns the (layer, expert) pairs in the node's shared memory during this phase, ascending.");
}

}  // namespace foremoe::python
