#include "bindings.h"

#include <cxxabi.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <future>
#include <nlohmann/json.hpp>
#include <thread>

#include "foremoe/core/error.h"
#include "foremoe/plan/homes_file.h"
#include "foremoe/planner/planner.h"

namespace foremoe::python {
namespace {

std::string dtype_name(nb::dlpack::dtype type) {
  const char* kind = "?";
  switch (static_cast<nb::dlpack::dtype_code>(type.code)) {
    case nb::dlpack::dtype_code::Int:
      kind = "int";
      break;
    case nb::dlpack::dtype_code::UInt:
      kind = "uint";
      break;
    case nb::dlpack::dtype_code::Float:
      kind = "float";
      break;
    case nb::dlpack::dtype_code::Bool:
      return "bool";
    case nb::dlpack::dtype_code::Complex:
      kind = "complex";
      break;
    default:
      break;
  }
  return fmt::format("{}{}", kind, type.bits);
}

bool is_contiguous(const AnyArray& array) {
  if (array.size() == 0) return true;
  std::int64_t stride = 1;
  for (std::size_t axis = array.ndim(); axis-- > 0;) {
    if (array.shape(axis) > 1 && array.stride(axis) != stride) return false;
    stride *= static_cast<std::int64_t>(array.shape(axis));
  }
  return true;
}

std::string text_of(const std::string& name, nb::handle value) {
  if (nb::isinstance<nb::str>(value)) return nb::cast<std::string>(value);
  if (PyIndex_Check(value.ptr()) != 0) {
    const nb::object integer = nb::steal(PyNumber_Index(value.ptr()));
    if (integer.is_valid()) return nb::cast<std::string>(nb::str(integer));
    PyErr_Clear();  // `value` is an array that is not one integer
  }
  if (nb::isinstance<nb::list>(value) || nb::isinstance<nb::tuple>(value)) {
    std::string list;
    for (const nb::handle item : value) list += (list.empty() ? "" : ",") + text_of(name, item);
    return list;
  }
  if (nb::hasattr(value, "__fspath__")) return nb::cast<std::string>(nb::str(value));
  if (nb::hasattr(value, "__float__")) return nb::cast<std::string>(nb::str(nb::float_(value)));
  throw InputError({.field = name}, fmt::format("is a {}; expected a number or a string",
                                                nb::cast<std::string>(value.type().attr("__name__"))));
}

}  // namespace

std::string describe(const AnyArray& array) {
  std::string shape;
  for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
    shape += fmt::format("{}{}", axis == 0 ? "" : ", ", array.shape(axis));
  }
  return fmt::format("{} [{}]{}{}", dtype_name(array.dtype()), shape, is_contiguous(array) ? "" : ", not C-contiguous",
                     array.device_type() == nb::device::cpu::value ? "" : ", not in host memory");
}

void refuse_dtype(const AnyArray& array, const char* argument, const char* dtype, const char* axes) {
  throw InputError({.field = argument}, fmt::format("is {}; expected {} {}", describe(array), dtype, axes));
}

void expect_layout(const AnyArray& array, const char* argument, const char* axes, std::size_t num_axes) {
  if (array.ndim() == num_axes && is_contiguous(array) && array.device_type() == nb::device::cpu::value) return;
  throw InputError({.field = argument},
                   fmt::format("is {}; expected C-contiguous {} in host memory", describe(array), axes));
}

std::vector<std::int32_t> to_vector(const std::optional<AnyArray>& array, const char* argument, const char* axes) {
  if (!array) return {};
  const std::int32_t* const data = data_of<std::int32_t>(*array, argument, axes, 1);
  return {data, data + array->shape(0)};
}

void expect_range(const char* argument, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  throw InputError({.field = argument}, fmt::format("{}; {}", value, must_be_integer(least, most)));
}

static nb::str str(const std::string& text) { return nb::str(text.data(), text.size()); }

nb::any to_python(const nlohmann::ordered_json& json) {
  using Type = nlohmann::ordered_json::value_t;
  const auto any = [](const nb::object& object) { return nb::cast<nb::any>(object); };
  switch (json.type()) {
    case Type::boolean:
      return any(nb::bool_(json.get<bool>()));
    case Type::number_integer:
      return any(nb::int_(json.get<std::int64_t>()));
    case Type::number_unsigned:
      return any(nb::int_(json.get<std::uint64_t>()));
    case Type::number_float:
      if (!std::isfinite(json.get<double>())) return any(nb::none());  // JSON prints null
      return any(nb::float_(json.get<double>()));
    case Type::string:
      return any(str(json.get_ref<const std::string&>()));
    case Type::array: {
      nb::list list;
      for (const auto& value : json) list.append(to_python(value));
      return any(list);
    }
    case Type::object: {
      nb::dict dict;
      for (const auto& [key, value] : json.items()) dict[str(key)] = to_python(value);
      return any(dict);
    }
    default:
      return any(nb::none());
  }
}

void set_options(std::vector<Option> options, const nb::dict& keywords) {
  for (const auto& [key, value] : keywords) {
    const std::string name = nb::cast<std::string>(key);
    Option& option = option_named(options, name);
    if (value.is_none()) continue;
    if (option.type == "flag") {
      if (!nb::isinstance<nb::bool_>(value)) throw InputError({.field = name}, "must be True or False");
      if (nb::cast<bool>(value)) option.set("");
      continue;
    }
    if (nb::isinstance<nb::bool_>(value)) throw InputError({.field = name}, "cannot be True or False");
    option.set(text_of(name, value));
  }
}

static std::atomic<std::thread::id> ending_thread;  // set when the interpreter begins to end

[[noreturn]] static void wait_for_end_of_process() {
  while (true) ::pause();
}

nb::object call_python(nb::handle function, const nb::tuple& arguments) {
  PyObject* result = nullptr;
  try {  // no destructor may run between here and the call
    result = PyObject_CallObject(function.ptr(), arguments.ptr());
  } catch (const abi::__forced_unwind&) {
    wait_for_end_of_process();
  }
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

void note_end_of_interpreter() {
  const nb::module_ atexit = nb::module_::import_("atexit");
  atexit.attr("register")(nb::cpp_function([] { ending_thread = std::this_thread::get_id(); }));
}

// Calls `take`, which waits for the GIL. The states of other threads than the ending one are freed at any time after it
// has begun to end.
template <class Take>
static void take_gil(Take take) {
  if (Py_IsInitialized() == 0 && ending_thread.load() != std::this_thread::get_id()) wait_for_end_of_process();
  try {
    take();
  } catch (const abi::__forced_unwind&) {
    wait_for_end_of_process();
  }
}

ReleasedGil::~ReleasedGil() {
  take_gil([&] { PyEval_RestoreThread(state_); });
}

HeldGil::HeldGil() {
  take_gil([&] { state_ = PyGILState_Ensure(); });
}

// Only the main thread handles signals. Asks the system, since Python code (threading.main_thread()) that runs when the
// interpreter ends unwinds the stack of its thread, and with it the C++ that called it.
static bool on_main_thread() { return ::gettid() == ::getpid(); }

void run_interruptibly(ThreadPool& pool, const std::function<void()>& work) {
  if (!on_main_thread()) {
    const ReleasedGil release;
    return work();
  }
  std::packaged_task<void()> task(work);
  std::future<void> done = task.get_future();
  bool interrupted = false;
  {
    const ReleasedGil release;
    const std::jthread worker(std::move(task));
    while (done.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) {
      const HeldGil acquire;
      if (interrupted || PyErr_CheckSignals() == 0) continue;
      interrupted = true;
      pool.cancel();
    }
  }
  if (!interrupted) return done.get();
  try {
    done.get();
  } catch (...) {  // discard the cancellation error: the user must see the exception of the signal handler
  }
  throw nb::python_error();
}

std::size_t threads_of(int threads) {
  constexpr int kMostThreads = 4096;
  if (threads >= 0 && threads <= kMostThreads) return static_cast<std::size_t>(threads);
  throw InputError({.field = "threads"}, fmt::format("{}; {}", threads, must_be_integer(0, kMostThreads)));
}

Array<RankId, 2> homes_of(const nb::object& homes, const Load& of) {
  if (homes.is_none()) return of.input->homes;
  const LoadTable& load = of.table();
  const auto layers = static_cast<std::size_t>(load.num_layers());
  const auto experts = static_cast<std::size_t>(load.num_experts());
  if (nb::isinstance<Plan>(homes)) {
    const Plan& plan = nb::cast<const Plan&>(homes);
    if (plan.step->home.shape() == std::array{layers, experts} && plan.step->num_ranks() == load.num_ranks()) {
      return plan.step->home;
    }
    throw InputError(
        {.field = "homes"},
        fmt::format("are of {} layers, {} ranks and {} experts, the load has {}, {} and {}", plan.step->num_layers(),
                    plan.step->num_ranks(), plan.step->num_experts(), layers, load.num_ranks(), experts));
  }
  if (nb::isinstance<Homes>(homes)) {
    const Homes& chosen = nb::cast<const Homes&>(homes);
    if (chosen.home.shape() == std::array{layers, experts} && chosen.num_ranks == load.num_ranks()) return chosen.home;
    throw InputError(
        {.field = "homes"},
        fmt::format("are of {} layers, {} ranks and {} experts, the load has {}, {} and {}", chosen.home.extent(0),
                    chosen.num_ranks, chosen.home.extent(1), layers, load.num_ranks(), experts));
  }
  AnyArray array;
  if (!nb::try_cast(homes, array)) throw InputError({.field = "homes"}, "expected None, Homes, a Plan or an array");
  const std::int32_t* const data = data_of<std::int32_t>(array, "homes", "[layers, experts]", 2);
  if (array.shape(0) != layers || array.shape(1) != experts) {
    throw InputError({.field = "homes"},
                     fmt::format("is {}, the load has {} layers and {} experts", describe(array), layers, experts));
  }
  Array<RankId, 2> result({layers, experts});
  std::copy_n(reinterpret_cast<const RankId*>(data), result.size(), result.flat().begin());
  expect_homes(result, load);
  return result;
}

const StepPlan* whole_plan_of(const Plan* plan) {
  if (plan == nullptr) return nullptr;
  if (!plan->layers.is_all()) throw InputError({.field = "previous"}, "is a part of a plan: join the parts first");
  return &finished(*plan);
}

std::shared_ptr<const Workload> input_of(const Load& load, const Former& former) {
  if (former.homes.is_none() && former.previous == nullptr && former.previous_load == nullptr) return load.input;
  auto input = std::make_shared<Workload>(*load.input);
  input->homes = homes_of(former.homes, load);
  if (const StepPlan* previous = whole_plan_of(former.previous)) input->previous = *previous;
  if (former.previous_load != nullptr) input->previous_load = former.previous_load->table();
  return input;
}

std::vector<std::shared_ptr<const Workload>> groups_of(const Load& load, const Former& former, std::optional<int> ep) {
  if (!ep) return {input_of(load, former)};
  if (former.previous != nullptr) {
    throw InputError({.field = "previous"}, "is a plan of one group; with ep, plan each load of Load.groups()");
  }
  const std::shared_ptr<const Workload> whole = input_of(load, {nb::none(), nullptr, former.previous_load});
  std::vector<std::shared_ptr<const Workload>> groups;
  for (Workload& group : split_groups(*whole, *ep)) {
    const Load one{std::make_shared<const Workload>(std::move(group))};
    groups.push_back(input_of(one, {former.homes, nullptr, nullptr}));
  }
  return groups;
}

Phase phase_named(const std::string& name) {
  if (name == to_string(Phase::kRecompute)) return Phase::kRecompute;
  if (name == to_string(Phase::kPolicyUpdate)) return Phase::kPolicyUpdate;
  throw InputError({.field = "phase"}, fmt::format("'{}', expected recompute or policy_update", name));
}

void raise_skipped(const Policy& policy, const std::string& reason) {
  const nb::object type = nb::module_::import_("foremoe._errors").attr("PolicySkipped");
  const nb::object error = type(std::string(policy.name()), reason);
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

}  // namespace foremoe::python
