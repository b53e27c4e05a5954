#pragma once

// What the sources of foremoe._core share: the types that Python holds, arrays in and out, options from keywords.
//
// Python objects own what they show: a view keeps its object alive, and an object that refers to others (turns to plan
// and load) shares them. Nothing that Python can hold is changed after it was made, so that calls run without the GIL;
// but for plans in the making, which grow under locks of their own, and RankTurns that follow one, under the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/core/option.h"
#include "foremoe/evaluate/evaluate.h"

namespace foremoe::python {

namespace nb = nanobind;
using namespace nb::literals;

using Trace = RoutingTrace;

// A load, and where it was collected the trace and batching behind it.
struct Load {
  std::shared_ptr<const Workload> input;
  const LoadTable& table() const { return input->load; }
};

// Layers [first, last) of a load of `whole` layers.
struct LayerRange {
  int first = 0;
  int last = 0;
  int whole = 0;
  bool is_all() const { return first == 0 && last == whole; }
};

// A plan in the making. Its homes are final from the beginning, and its slots but under `shared`.
class UnfinishedPlan {
 public:
  virtual ~UnfinishedPlan() = default;
  virtual const StepPlan& step() const = 0;
  virtual int num_micro_steps() const = 0;
  virtual int num_planned() const = 0;        // micro-steps that may be read
  virtual void wait_for(int micro_step) = 0;  // without the GIL; Ctrl-C ends it
};

struct Plan {
  std::shared_ptr<const StepPlan> step;
  LayerRange layers;  // that `step` has; its digest is that of the whole load
  PlanTimes times;
  std::shared_ptr<UnfinishedPlan> running = {};  // null: all of `step` is final
};

Load load_of(LoadTable table);

// Waits until all of the plan is final.
const StepPlan& finished(const Plan& plan);
// Micro-steps whose quotas are final.
int num_planned(const Plan& plan);

using AnyArray = nb::ndarray<nb::ro>;

// "float32 [3, 4], not C-contiguous"
std::string describe(const AnyArray& array);
[[noreturn]] void refuse_dtype(const AnyArray& array, const char* argument, const char* dtype, const char* axes);

// What the array must be. Throws InputError that names the argument, and says what the array is, for another number of
// axes, layout or device; data_of() for another dtype too.
void expect_layout(const AnyArray& array, const char* argument, const char* axes, std::size_t num_axes);
template <class T>
const T* data_of(const AnyArray& array, const char* argument, const char* axes, std::size_t num_axes) {
  if (array.dtype() != nb::dtype<T>()) refuse_dtype(array, argument, sizeof(T) == 8 ? "int64" : "int32", axes);
  expect_layout(array, argument, axes, num_axes);
  return static_cast<const T*>(array.data());
}

std::vector<std::int32_t> to_vector(const std::optional<AnyArray>& array, const char* argument, const char* axes);

template <class T>
using View = nb::ndarray<nb::numpy, const T>;

// A view of memory that `owner` keeps alive.
template <class T>
View<T> view_of(const T* data, const std::vector<std::size_t>& shape, nb::handle owner) {
  return View<T>(data, shape.size(), shape.data(), owner);
}

// Ids and quantities are structs of one integer: their arrays are arrays of that integer.
template <class Raw, class T, std::size_t N>
View<Raw> view_of(const Array<T, N>& array, nb::handle owner) {
  static_assert(sizeof(T) == sizeof(Raw) && std::is_standard_layout_v<T>);
  return view_of(reinterpret_cast<const Raw*>(array.flat().data()), {array.shape().begin(), array.shape().end()},
                 owner);
}
template <class Raw, class T>
View<Raw> view_of(const std::vector<T>& values, nb::handle owner) {
  static_assert(sizeof(T) == sizeof(Raw) && std::is_standard_layout_v<T>);
  return view_of(reinterpret_cast<const Raw*>(values.data()), {values.size()}, owner);
}

// An array of its own, that moves in.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> array_of(std::vector<T> values) {
  auto* const owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner);
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<2>> array_of(std::vector<T> values, std::array<std::size_t, 2> shape) {
  auto* const owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<2>>(owned->data(), shape.size(), shape.data(), owner);
}

// Data of routes, [tokens, layers, top_k], that nobody copies: the trace keeps the array.
void lend_routes(const AnyArray& routes, Trace& trace);

using Int32s = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;
std::pair<Int32s, Int32s> arrays_of(const Batching& batching);  // (micro_step, rank), [sequences] each

void expect_range(const char* argument, std::int64_t value, std::int64_t least, std::int64_t most);

// JSON values as Python objects. NaN and infinity become None.
nb::any to_python(const nlohmann::ordered_json& json);

// Sets options from keywords: None leaves the default, True sets a flag.
void set_options(std::vector<Option> options, const nb::dict& keywords);

// Runs `work` on a thread of its own, without the GIL, while this one looks for Ctrl-C; then, or when `work` throws,
// the pool is cancelled and what was thrown goes on.
void run_interruptibly(ThreadPool& pool, const std::function<void()>& work);

std::size_t threads_of(int threads);  // throws InputError, field `threads`

// [layer][expert] ranks, from None (those of the load's input), an array or a plan.
Array<RankId, 2> homes_of(const nb::object& homes, const Load& load);

// What a call plans from beside the load; null: as the load's input has it.
struct Former {
  const nb::object& homes;
  const Plan* previous;
  const Load* previous_load;
};
LoadTable take_layers(const LoadTable& load, const LayerRange& range);
StepPlan take_layers(const StepPlan& whole, const LayerRange& range);
const StepPlan* whole_plan_of(const Plan* plan);  // null: none; throws InputError for a part of a plan
// The policies with the options that they alone have; each takes those that it has. Throws InputError for one that none
// has.
std::vector<std::shared_ptr<const Policy>> with_own_options(const std::vector<const Policy*>& policies,
                                                            const nb::dict& own);

// The load's own input where nothing else was given, else a copy with what was.
std::shared_ptr<const Workload> input_of(const Load& load, const Former& former);

Phase phase_named(const std::string& name);  // throws InputError, field `phase`

// Throws PolicySkipped.
[[noreturn]] void raise_skipped(const Policy& policy, const std::string& reason);

void bind_evaluation(nb::module_& m);
void bind_evaluated_plan(nb::module_& m);
void bind_rollout(nb::module_& m);
void bind_collector(nb::module_& m);
void bind_inputs(nb::module_& m);
void bind_options(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_planning(nb::module_& m);
void bind_turns(nb::module_& m);
void bind_arena(nb::module_& m);

}  // namespace foremoe::python
