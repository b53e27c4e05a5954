// Plans: contents, files, parts, checks and figures.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bindings.h"
#include "foremoe/core/error.h"
#include "foremoe/core/safetensors.h"
#include "foremoe/core/sha256.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/plan/plan_json.h"
#include "foremoe/planner/planner.h"
#include "foremoe/rollout/collector.h"

namespace foremoe::python {
namespace {

Plan plan_of(StepPlan step) {
  const int layers = step.num_layers();
  return {.step = std::make_shared<const StepPlan>(std::move(step)), .layers = {0, layers, layers}};
}

// Under `shared`, the slots of an unfinished plan are final only when the whole plan is.
const StepPlan& with_final_slots(const Plan& plan) {
  return plan.step->residency == Residency::kShared ? finished(plan) : *plan.step;
}

// Returns (slot_expert, slot_tokens) of one event, [layers, ranks, slots] each. Waits until its micro-step is planned.
nb::tuple slots_of_event(const nb::object& self, int event) {
  const auto& plan = nb::cast<const Plan&>(self);
  const StepPlan& step = *plan.step;
  if (event < 0 || event >= step.num_events()) {
    throw InputError({.field = "event"}, fmt::format("{} is not in 0 … {}", event, step.num_events() - 1));
  }
  if (plan.running) plan.running->wait_for(step.event_micro_step[static_cast<std::size_t>(event)].value);
  const std::vector<std::size_t> shape(step.slot_expert.shape().begin() + 1, step.slot_expert.shape().end());
  return nb::make_tuple(
      view_of(reinterpret_cast<const std::int32_t*>(step.slot_expert[event].flat().data()), shape, self),
      view_of(reinterpret_cast<const std::int64_t*>(step.slot_tokens[event].flat().data()), shape, self));
}

void expect_whole(const Plan& plan, const char* what) {
  if (plan.layers.is_all()) return;
  throw InputError({.field = "plan"}, fmt::format("has layers {} to {} of {}: join the parts before {}",
                                                  plan.layers.first, plan.layers.last - 1, plan.layers.whole, what));
}

// Copies layers from one array to another, which may differ only in the number of layers.
template <class T, std::size_t N>
void copy_layers(const Array<T, N>& from, std::size_t from_layer, Array<T, N>& to, std::size_t to_layer,
                 std::size_t layer_axis) {
  std::size_t outer = 1;
  std::size_t inner = 1;
  for (std::size_t axis = 0; axis < layer_axis; ++axis) outer *= from.shape()[axis];
  for (std::size_t axis = layer_axis + 1; axis < N; ++axis) inner *= from.shape()[axis];
  const std::size_t of_from = from.shape()[layer_axis];
  const std::size_t of_to = to.shape()[layer_axis];
  const std::size_t copied = std::min(of_from - from_layer, of_to - to_layer) * inner;
  for (std::size_t o = 0; o < outer; ++o) {
    std::ranges::copy(from.flat().subspan((o * of_from + from_layer) * inner, copied),
                      to.flat().begin() + static_cast<std::ptrdiff_t>((o * of_to + to_layer) * inner));
  }
}

template <class T, std::size_t N>
Array<T, N> joined(const std::vector<const Plan*>& parts, Array<T, N> StepPlan::*member, std::size_t layer_axis) {
  auto shape = (parts.front()->step.get()->*member).shape();
  const bool recorded = !(parts.front()->step.get()->*member).empty();
  for (const Plan* part : parts) {
    if (recorded) shape[layer_axis] = static_cast<std::size_t>(part->layers.last - part->layers.first);
    if ((part->step.get()->*member).shape() == shape) continue;
    throw InputError({.field = "parts"}, fmt::format("differ from layer {} on: in the shape of their arrays, or only "
                                                     "some record max_load and lower_bound",
                                                     part->layers.first));
  }
  if (!recorded) return {};
  shape[layer_axis] = static_cast<std::size_t>(parts.front()->layers.whole);
  Array<T, N> whole(shape);
  for (const Plan* part : parts) {
    copy_layers(part->step.get()->*member, 0, whole, static_cast<std::size_t>(part->layers.first), layer_axis);
  }
  return whole;
}

template <class T, std::size_t N>
Array<T, N> taken(const Array<T, N>& whole, const LayerRange& range, std::size_t layer_axis) {
  if (whole.empty()) return {};  // not recorded
  auto shape = whole.shape();
  shape[layer_axis] = static_cast<std::size_t>(range.last - range.first);
  Array<T, N> part(shape);
  copy_layers(whole, static_cast<std::size_t>(range.first), part, 0, layer_axis);
  return part;
}

// Returns the parts sorted by layer. Throws InputError if they do not form one plan.
std::vector<const Plan*> in_order(const std::vector<const Plan*>& given) {
  if (given.empty() || std::ranges::find(given, nullptr) != given.end()) {
    throw InputError({.field = "parts"},
                     given.empty() ? "must contain at least one plan" : "has an item that is not a plan");
  }
  for (const Plan* part : given) finished(*part);
  std::vector<const Plan*> parts = given;
  std::ranges::sort(parts, {}, [](const Plan* p) { return p->layers.first; });
  const StepPlan& first = *parts.front()->step;
  const auto header = [](const StepPlan& p) {
    return std::tuple(p.policy, p.residency, p.guest_slots, p.ranks_per_node, p.in_flight, p.options, p.load_digest,
                      p.homes_digest, p.event_micro_step, p.event_pass);
  };
  int next = 0;
  for (const Plan* part : parts) {
    if (header(*part->step) != header(first) || part->layers.whole != parts.front()->layers.whole) {
      throw InputError({.field = "parts"}, "are of different plans: load, policy or options differ");
    }
    if (part->layers.first != next) {
      throw InputError({.field = "parts"}, fmt::format("layer {} is {}", std::min(next, part->layers.first),
                                                       part->layers.first > next ? "in none" : "in two"));
    }
    next = part->layers.last;
  }
  if (next != parts.front()->layers.whole) {
    throw InputError({.field = "parts"}, fmt::format("layer {} is in none", next));
  }
  return parts;
}

Plan join(const std::vector<const Plan*>& given) {
  const std::vector<const Plan*> parts = in_order(given);
  StepPlan whole = *parts.front()->step;
  whole.slot_expert = joined(parts, &StepPlan::slot_expert, 1);
  whole.slot_tokens = joined(parts, &StepPlan::slot_tokens, 1);
  whole.home = joined(parts, &StepPlan::home, 0);
  whole.max_load = joined(parts, &StepPlan::max_load, 1);
  whole.lower_bound = joined(parts, &StepPlan::lower_bound, 1);
  Plan plan = plan_of(std::move(whole));
  for (const Plan* part : parts) {
    plan.times.wall_seconds = std::max(plan.times.wall_seconds, part->times.wall_seconds);
    plan.times.base_cpu_seconds += part->times.base_cpu_seconds;
    plan.times.planning_cpu_seconds += part->times.planning_cpu_seconds;
  }
  return plan;
}

// Returns the tokens of the load, if the caller passes the trace from which the load was collected. Counts the trace
// again, so that a different or modified trace raises InputError.
std::optional<BatchedTrace> tokens_of(const Load& load, const RoutingTrace* trace) {
  if (trace == nullptr) return std::nullopt;
  const Workload& workload = *load.input;
  if (!workload.tokens) throw InputError({.field = "trace"}, "the load was not collected from a trace");
  const Batching& batching = workload.tokens->batching;
  const bool same = trace->num_sequences() == static_cast<int>(batching.rank.size()) && [&] {
    const ReleasedGil release;
    ThreadPool pool(1);
    return load_digest(collect(*trace, batching, pool)) == load_digest(workload.load);
  }();
  if (!same) throw InputError({.field = "trace"}, "is not the trace from which the load was collected");
  return BatchedTrace{.trace = *trace, .batching = batching};
}

void expect_align(int align) {
  constexpr int kMost = 1 << 20;
  if (align >= 1 && align <= kMost) return;
  throw InputError({.field = "align"}, fmt::format("{}; {}", align, must_be_integer(1, kMost)));
}

// Pickled state: this format, digest of the plan file, plan file, layers, and planning times.
constexpr const char* kStateFormat = "foremoe.Plan/1";
using State =
    std::tuple<std::string, std::string, nb::bytes, std::tuple<int, int, int>, std::tuple<double, double, double>>;

State state_of(const Plan& plan) {
  const std::vector<std::byte> file = to_bytes(finished(plan));
  return {kStateFormat,
          sha256_hex(file),
          nb::bytes(file.data(), file.size()),
          {plan.layers.first, plan.layers.last, plan.layers.whole},
          {plan.times.wall_seconds, plan.times.base_cpu_seconds, plan.times.planning_cpu_seconds}};
}

Plan plan_of_state(const nb::object& given) {
  const auto expect = [](bool good, const char* problem) {
    if (!good) throw InputError({.field = "state"}, problem);
  };
  State state;
  expect(nb::try_cast(given, state, /*convert=*/false), "is not the state of a pickled plan");
  const auto& [format, digest, file, layers, times] = state;
  expect(format == kStateFormat, "was pickled by another version of foremoe");
  const std::span bytes(static_cast<const std::byte*>(file.data()), file.size());
  expect(digest == sha256_hex(bytes), "is damaged: its digest differs");
  StepPlan step = read_plan(Safetensors::parse(bytes, "pickled plan"));
  const auto [first, last, whole] = layers;
  expect(first >= 0 && first <= last && last <= whole && last - first == step.num_layers(),
         "has layers that differ from the plan's");
  const auto [wall, base, planning] = times;
  return {.step = std::make_shared<const StepPlan>(std::move(step)),
          .layers = {first, last, whole},
          .times = {.wall_seconds = wall, .base_cpu_seconds = base, .planning_cpu_seconds = planning}};
}

nb::any check(const Plan& plan, const Load& load, const RoutingTrace* trace, int align, const nb::object& homes) {
  expect_whole(plan, "checking");
  expect_align(align);
  const StepPlan& step = finished(plan);
  const std::optional<BatchedTrace> tokens = tokens_of(load, trace);
  const Array<RankId, 2> initial = homes_of(homes, load);
  ThreadPool pool(1);
  CheckOptions options{.align = align, .tokens = tokens ? &*tokens : nullptr, .pool = &pool};
  if (!homes.is_none()) options.initial_home = initial;
  CheckReport report;
  run_interruptibly(pool, [&] { report = check_plan(step, load.table(), options); });
  return to_python(to_json(report));
}

nb::any figures(const Plan& plan, const Load& load, const RoutingTrace* trace, int align, const nb::object& homes) {
  expect_whole(plan, "measuring");
  expect_align(align);
  const StepPlan& step = finished(plan);
  const std::optional<BatchedTrace> tokens = tokens_of(load, trace);
  const Array<RankId, 2> initial = homes_of(homes, load);
  ThreadPool pool(1);
  const CheckOptions options{
      .initial_home = initial, .align = align, .tokens = tokens ? &*tokens : nullptr, .pool = &pool};
  PlanFigures figures;
  run_interruptibly(pool, [&] {
    const CheckReport report = check_plan(step, load.table(), options);
    if (!report.ok()) {
      throw InputError({.field = "plan"},
                       fmt::format("is not right for this load: {}", report.violations.front().message));
    }
    figures = plan_figures(*plan.step, load.table(),
                           {.initial_home = initial, .align = align, .tokens = options.tokens, .pool = &pool});
  });
  return to_python(to_json(figures));
}

}  // namespace

static std::vector<int> taken(const std::vector<int>& of_layer, const LayerRange& range) {
  if (of_layer.empty()) return {};
  return {of_layer.begin() + range.first, of_layer.begin() + range.last};
}

LoadTable take_layers(const LoadTable& load, const LayerRange& range) {
  return {.load = taken(load.load, range, 1),
          .top_k = load.top_k,
          .ranks_per_node = load.ranks_per_node,
          .name = load.name,
          .experts_of_layer = taken(load.experts_of_layer, range),
          .top_k_of_layer = taken(load.top_k_of_layer, range)};
}

StepPlan take_layers(const StepPlan& whole, const LayerRange& range) {
  StepPlan part = whole;
  part.slot_expert = taken(whole.slot_expert, range, 1);
  part.slot_tokens = taken(whole.slot_tokens, range, 1);
  part.home = taken(whole.home, range, 0);
  part.max_load = taken(whole.max_load, range, 1);
  part.lower_bound = taken(whole.lower_bound, range, 1);
  return part;
}

void bind_plan(nb::module_& m) {
  nb::class_<PlanTimes>(m, "PlanTimes", "Planning time in seconds.")
      .def_ro("wall_seconds", &PlanTimes::wall_seconds)
      .def_ro("base_cpu_seconds", &PlanTimes::base_cpu_seconds,
              "Work done once per step (in our planner: stage B), summed over threads.")
      .def_ro("planning_cpu_seconds", &PlanTimes::planning_cpu_seconds, "All other work, summed over threads.")
      .def("__repr__", [](const PlanTimes& t) { return fmt::format("<foremoe.PlanTimes: {:.4f} s>", t.wall_seconds); });

  nb::class_<Plan>(m, "Plan", "Expert and tokens of every slot, for every event of every layer.")
      .def_prop_ro(
          "slot_expert",
          [](const nb::object& self) {
            return view_of<std::int32_t>(with_final_slots(nb::cast<const Plan&>(self)).slot_expert, self);
          },
          "int32 [events, layers, ranks, slots], expert in each slot, −1 if empty; a view.")
      .def_prop_ro(
          "slot_tokens",
          [](const nb::object& self) {
            return view_of<std::int64_t>(with_final_slots(nb::cast<const Plan&>(self)).slot_tokens, self);
          },
          "int64 [events, layers, ranks, slots], tokens served by each slot; a view.")
      .def("_slots_of_event", &slots_of_event, "event"_a)
      .def_prop_ro(
          "home",
          [](const nb::object& self) { return view_of<std::int32_t>(nb::cast<const Plan&>(self).step->home, self); },
          "int32 [layers, experts], rank that owns each expert; a view.")
      .def_prop_ro(
          "event_micro_step",
          [](const nb::object& self) {
            return view_of<std::int32_t>(nb::cast<const Plan&>(self).step->event_micro_step, self);
          },
          "int32 [events].")
      .def_prop_ro(
          "event_pass",
          [](const nb::object& self) {
            return view_of<std::uint8_t>(nb::cast<const Plan&>(self).step->event_pass, self);
          },
          "uint8 [events], 0 forward, 1 backward.")
      .def_prop_ro(
          "max_load",
          [](const nb::object& self) {
            return view_of<std::int64_t>(nb::cast<const Plan&>(self).step->max_load, self);
          },
          "int64 [micro_steps, layers], tokens of the busiest rank; a view.")
      .def_prop_ro("policy", [](const Plan& p) { return p.step->policy; })
      .def_prop_ro("residency", [](const Plan& p) { return std::string(to_string(p.step->residency)); })
      .def_prop_ro("guest_slots", [](const Plan& p) { return p.step->guest_slots; })
      .def_prop_ro("in_flight", [](const Plan& p) { return p.step->in_flight; })
      .def_prop_ro("ranks_per_node", [](const Plan& p) { return p.step->ranks_per_node; })
      .def_prop_ro("num_events", [](const Plan& p) { return p.step->num_events(); })
      .def_prop_ro("num_micro_steps", [](const Plan& p) { return p.step->num_micro_steps(); })
      .def_prop_ro("num_layers", [](const Plan& p) { return p.step->num_layers(); })
      .def_prop_ro("num_ranks", [](const Plan& p) { return p.step->num_ranks(); })
      .def_prop_ro("num_experts", [](const Plan& p) { return p.step->num_experts(); })
      .def_prop_ro("num_slots", [](const Plan& p) { return p.step->num_slots(); })
      .def_prop_ro(
          "options", [](const Plan& p) { return to_python(nlohmann::ordered_json::parse(p.step->options)); },
          nb::sig("def options(self) -> dict[str, typing.Any]"),
          "Recorded options of the planner, by long option name.")
      .def_prop_ro(
          "load_digest", [](const Plan& p) { return p.step->load_digest; },
          "Hexadecimal SHA-256 of the load for which the plan was made.")
      .def_prop_ro(
          "homes_digest", [](const Plan& p) { return p.step->homes_digest; },
          "Hexadecimal SHA-256 of the homes before planning; empty if they are contiguous or not recorded.")
      .def_prop_ro(
          "layers",
          [](const Plan& p) { return nb::module_::import_("builtins").attr("range")(p.layers.first, p.layers.last); },
          nb::sig("def layers(self) -> range"), "Range of the load's layers in this plan: all, except for a part.")
      .def_ro("times", &Plan::times)
      .def_static(
          "join", &join, "parts"_a,
          R"(Joins plans of layer ranges, in any order, into a plan of all layers, bitwise equal to the whole plan.

Raises:
    InputError: if parts belong to different plans, or a layer is missing or in two parts.)")
      .def(
          "save",
          [](const Plan& p, const std::filesystem::path& path) {
            expect_whole(p, "saving");
            const StepPlan& step = finished(p);
            const ReleasedGil release;
            write_plan(step, path.string());
          },
          "path"_a, "Writes a foremoe.plan/1 file atomically.")
      .def("__getstate__", &state_of)
      .def(
          "__setstate__", [](Plan& self, const nb::object& state) { new (&self) Plan(plan_of_state(state)); },
          "state"_a.none())
      .def("__repr__", [](const Plan& p) {
        return fmt::format("<foremoe.Plan by {}: {} events × {} layers × {} ranks × {} slots, {}>", p.step->policy,
                           p.step->num_events(), p.step->num_layers(), p.step->num_ranks(), p.step->num_slots(),
                           to_string(p.step->residency));
      });

  m.def("_read_plan", [](const std::filesystem::path& path) {
    const ReleasedGil release;
    return plan_of(read_plan(path.string()));
  });
  m.def("_check", &check, "plan"_a, "load"_a, "trace"_a.none(), "align"_a, "homes"_a.none());
  m.def(
      "_split_anew",
      [](const Plan& plan, const Load& load) {
        expect_whole(plan, "splitting anew");
        Plan split = plan_of(recompute_quotas(finished(plan), load.table()));
        split.times = plan.times;
        return split;
      },
      "plan"_a, "load"_a);
  m.def("_figures", &figures, "plan"_a, "load"_a, "trace"_a.none(), "align"_a, "homes"_a.none());
}

}  // namespace foremoe::python
