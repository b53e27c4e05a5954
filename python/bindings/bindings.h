#pragma once

// Shared by the sources of foremoe._core: types exposed to Python, array conversion, options from keywords.
//
// Python objects own their data: a view keeps its object alive, and objects that refer to others (as turns refer to
// plan and load) share ownership. Objects are immutable, so calls run without the GIL. There are two exceptions:
// unfinished plans grow under their own locks, and RankTurns that follow an unfinished plan change under the GIL.

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

// Releases the GIL while it exists. When the interpreter ends, Python before 3.14 unwinds the stacks of the threads
// that wait for the GIL, which no destructor may let pass. Such a thread waits here for the end of the process instead,
// as it does from 3.14 on.
class ReleasedGil {
 public:
  ReleasedGil() = default;
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;
  ~ReleasedGil();

 private:
  PyThreadState* state_ = PyEval_SaveThread();
};

// Calls a Python function from C++ on any thread that holds the GIL. See ReleasedGil: the function may wait for the
// GIL.
nb::object call_python(nb::handle function, const nb::tuple& arguments);

// Makes known which thread ends the interpreter: it alone may still take the GIL then. Call when the module is loaded.
void note_end_of_interpreter();

// Holds the GIL while it exists, in any thread; see ReleasedGil.
class HeldGil {
 public:
  HeldGil();
  HeldGil(const HeldGil&) = delete;
  HeldGil& operator=(const HeldGil&) = delete;
  ~HeldGil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

using Trace = RoutingTrace;

// A load and, if it was collected from a trace, the trace and its batching.
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

// A plan that is still being computed. Homes are final from the beginning; slots are, too, except under `shared`.
class UnfinishedPlan {
 public:
  virtual ~UnfinishedPlan() = default;
  virtual const StepPlan& step() const = 0;
  virtual int num_micro_steps() const = 0;
  virtual int num_planned() const = 0;        // micro-steps whose plan is final
  virtual void wait_for(int micro_step) = 0;  // releases the GIL; Ctrl-C interrupts it
};

struct Plan {
  std::shared_ptr<const StepPlan> step;
  LayerRange layers;  // layers in `step`; load_digest is that of the whole load
  PlanTimes times;
  std::shared_ptr<UnfinishedPlan> running = {};  // null: all of `step` is final
};

Load load_of(LoadTable table);
Load load_from_counts(const nb::object& counts, int ranks, int top_k, std::optional<int> ranks_per_node,
                      std::string name);

// Adds Homes and choose_homes() to the module.
void bind_homes(nb::module_& m);

// Waits until the whole plan is final.
const StepPlan& finished(const Plan& plan);
// Returns the number of micro-steps whose quotas are final.
int num_planned(const Plan& plan);

using AnyArray = nb::ndarray<nb::ro>;

// Returns a description such as "float32 [3, 4], not C-contiguous".
std::string describe(const AnyArray& array);
[[noreturn]] void refuse_dtype(const AnyArray& array, const char* argument, const char* dtype, const char* axes);

// Throws InputError with the argument's name and the array's actual layout if the number of axes, the memory layout or
// the device is wrong. data_of() also checks the dtype.
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

// Returns a view of memory that `owner` keeps alive.
template <class T>
View<T> view_of(const T* data, const std::vector<std::size_t>& shape, nb::handle owner) {
  return View<T>(data, shape.size(), shape.data(), owner);
}

// Ids and quantities are structs of one integer, so arrays of them are viewed as arrays of that integer.
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

// Returns an array that owns `values`.
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

// Makes the trace refer to the routes [tokens, layers, top_k] without copying them. The trace keeps the array alive.
void lend_routes(const AnyArray& routes, Trace& trace);

using Int32s = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;
std::pair<Int32s, Int32s> arrays_of(const Batching& batching);  // (micro_step, rank), [sequences] each

void expect_range(const char* argument, std::int64_t value, std::int64_t least, std::int64_t most);

// Converts JSON values to Python objects. NaN and infinity become None.
nb::any to_python(const nlohmann::ordered_json& json);

// Sets options from keywords: None keeps the default, True sets a flag.
void set_options(std::vector<Option> options, const nb::dict& keywords);

// Runs `work` on a separate thread without the GIL, while this thread polls for signals. After Ctrl-C, cancels the
// pool, waits for `work` and throws the signal handler's exception. Exceptions of `work` are rethrown.
void run_interruptibly(ThreadPool& pool, const std::function<void()>& work);

std::size_t threads_of(int threads);  // throws InputError, field `threads`

// Returns home ranks [layer][expert] from None (homes of the load's input), an array or a plan.
Array<RankId, 2> homes_of(const nb::object& homes, const Load& load);

// Additional inputs of planning. None or null keeps the value of the load's input.
struct Former {
  const nb::object& homes;
  const Plan* previous;
  const Load* previous_load;
};
LoadTable take_layers(const LoadTable& load, const LayerRange& range);
StepPlan take_layers(const StepPlan& whole, const LayerRange& range);
const StepPlan* whole_plan_of(const Plan* plan);  // null if `plan` is null; throws InputError for a part of a plan
// Returns copies of the policies with policy-specific options set. Each option applies to the policies that have it.
// Throws InputError for an option that no policy has.
std::vector<std::shared_ptr<const Policy>> with_own_options(const std::vector<const Policy*>& policies,
                                                            const nb::dict& own);

// Returns the load's input, or a copy with the values of `former` if any are given.
std::shared_ptr<const Workload> input_of(const Load& load, const Former& former);

// Returns the inputs of the load's groups of `ep` ranks; without `ep`, only input_of().
std::vector<std::shared_ptr<const Workload>> groups_of(const Load& load, const Former& former, std::optional<int> ep);

Phase phase_named(const std::string& name);  // throws InputError, field `phase`

// Throws PolicySkipped.
[[noreturn]] void raise_skipped(const Policy& policy, const std::string& reason);

void bind_eplb(nb::module_& m);
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
