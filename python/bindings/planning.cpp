// Plans with any policy, in one call or in the background.

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>

#include "bindings.h"
#include "foremoe/core/error.h"
#include "foremoe/evaluate/growing_plan.h"
#include "foremoe/evaluate/running_plan.h"
#include "foremoe/policy/own_options.h"

namespace foremoe::python {

std::vector<std::shared_ptr<const Policy>> with_own_options(const std::vector<const Policy*>& policies,
                                                            const nb::dict& own) {
  std::vector<PolicyWithOptions> with = policies_with_options(policies, {});
  for (const auto& [key, value] : own) {
    if (!nb::isinstance<nb::str>(key)) throw InputError({.field = "policy_options"}, "has a key that is not a string");
    nb::dict one;
    one[key] = value;
    for (Option& option : own_options_named(with, nb::cast<std::string>(key))) set_options({option}, one);
  }
  std::vector<std::shared_ptr<const Policy>> made;
  for (const PolicyWithOptions& policy : with) made.push_back(policy.policy);
  return made;
}

namespace {

// Reads options of the planner only: options that require a cluster are not available here.
PlannerOptions planner_options_of(const nb::dict& keywords) {
  PlannerOptions options;
  set_options(options_of(options), keywords);
  return options;
}

LayerRange layers_of(const nb::object& layers, const LoadTable& load, const Policy& policy) {
  const int whole = load.num_layers();
  if (layers.is_none()) return {0, whole, whole};
  const auto fail = [&](const std::string& what) { throw InputError({.field = "layers"}, what); };
  if (!nb::hasattr(layers, "start") || !nb::hasattr(layers, "stop") || !nb::hasattr(layers, "step")) {
    fail("expected None or a range of layers");
  }
  const auto bound = [&](const char* name, int otherwise) {
    const nb::object value = layers.attr(name);
    int number = otherwise;
    if (!value.is_none() && !nb::try_cast(value, number)) fail(fmt::format("its {} is not an integer", name));
    return number;
  };
  const LayerRange range{bound("start", 0), bound("stop", whole), whole};
  if (bound("step", 1) != 1) fail("must be contiguous: step 1");
  if (range.first < 0 || range.first >= range.last || range.last > whole) {
    fail(fmt::format("{} to {} is not within the {} layers of the load", range.first, range.last - 1, whole));
  }
  if (!range.is_all() && !policy.plans_layers_alone()) {
    fail(fmt::format("policy {} plans all layers at once", policy.name()));
  }
  return range;
}

// Arguments of planning other than the load.
struct Request {
  std::string policy;
  const nb::dict& options;
  const nb::dict& own;
  Former former;
  int threads;
};

Plan plan(const Load& load, const Request& with, const nb::object& layers,
          const std::optional<nb::callable>& on_micro_step) {
  const std::shared_ptr<const Policy> owned = with_own_options({&policy_named(with.policy)}, with.own).front();
  const Policy& policy = *owned;
  const LayerRange range = layers_of(layers, load.table(), policy);
  const Array<RankId, 2> homes = homes_of(with.former.homes, load);
  const StepPlan* previous = whole_plan_of(with.former.previous);
  std::optional<LoadTable> part;
  std::optional<StepPlan> previous_part;
  if (!range.is_all()) {
    part = take_layers(load.table(), range);
    if (previous != nullptr) {
      if (previous->num_layers() != range.whole) {
        throw InputError({.field = "previous"},
                         fmt::format("has {} layers, but the load has {}", previous->num_layers(), range.whole));
      }
      previous = &previous_part.emplace(take_layers(*previous, range));
    }
  }
  const auto experts = static_cast<std::size_t>(load.table().num_experts());
  PolicyInput input{.load = part ? *part : load.table(),
                    .home = {homes.flat().data() + static_cast<std::size_t>(range.first) * experts,
                             {static_cast<std::size_t>(range.last - range.first), experts}},
                    .options = planner_options_of(with.options),
                    .previous = previous};
  if (const Load* former = with.former.previous_load) input.previous_load = &former->table();
  int announced = 0;
  if (on_micro_step) {
    input.on_micro_step = [&](const StepPlan&, MicroStepId m) {
      const HeldGil gil;
      announced = m.value + 1;
      call_python(*on_micro_step, nb::make_tuple(m.value));
    };
  }
  ThreadPool pool(threads_of(with.threads));
  std::optional<PolicyResult> result;
  run_interruptibly(pool, [&] { result = plan_with(policy, *load.input, input, pool); });
  if (const auto* skipped = std::get_if<Skipped>(&*result)) raise_skipped(policy, skipped->reason);
  PlannedStep planned = std::get<PlannedStep>(std::move(*result));
  // Policies that plan all micro-steps at once do not call on_micro_step themselves.
  for (; on_micro_step && announced < planned.plan.num_micro_steps(); ++announced) {
    call_python(*on_micro_step, nb::make_tuple(announced));
  }
  if (part) {  // the digests are those of the whole load
    planned.plan.load_digest = load_digest(load.table());
    planned.plan.homes_digest = recorded_digest(homes, load.table());
  }
  return {.step = std::make_shared<const StepPlan>(std::move(planned.plan)), .layers = range, .times = planned.times};
}

void expect_micro_step(int micro_step, int num_micro_steps) {
  if (micro_step >= 0 && micro_step < num_micro_steps) return;
  throw InputError({.field = "micro_step"}, fmt::format("{} is not in 0 … {}", micro_step, num_micro_steps - 1));
}

// A plan computed on a background thread. Owns the policy and inputs that the thread uses.
class BackgroundPlan final : public UnfinishedPlan {
 public:
  BackgroundPlan(const Load& load, const Request& with)
      : policy_(with_own_options({&policy_named(with.policy)}, with.own).front()),
        pool_(threads_of(with.threads)),
        input_(input_of(load, with.former)) {
    running_.emplace(
        RunningPlan::Request{.policy = *policy_, .input = *input_, .options = planner_options_of(with.options)}, pool_);
  }
  ~BackgroundPlan() override {
    pool_.cancel();
    const ReleasedGil release;  // the thread may take a while to notice the cancellation
    running_.reset();
  }
  // Threads do not survive a fork. In a child process, the plan is never finished and its thread cannot be joined.
  bool is_of_this_process() const { return process_ == ::getpid(); }
  BackgroundPlan(const BackgroundPlan&) = delete;
  BackgroundPlan& operator=(const BackgroundPlan&) = delete;

  // Ctrl-C interrupts these waits and cancels planning.
  void begin() {
    if (planned_ > 0 && planned_ == num_micro_steps()) return;  // holds even in a child that was forked after planning
    if (!is_of_this_process()) {
      throw InputError({.field = "plan"}, fmt::format("is unfinished in process {}, and this is process {}, forked "
                                                      "from it: finish() the plan before the fork",
                                                      process_, ::getpid()));
    }
    std::optional<std::string> skipped;
    run_interruptibly(pool_, [&] { skipped = running_->wait_to_begin(); });
    if (skipped) raise_skipped(*policy_, *skipped);
  }
  const StepPlan& step() const override { return running_->plan(); }
  int num_micro_steps() const override { return input_->load.num_micro_steps(); }
  int num_planned() const override { return planned_; }
  void wait_for(int micro_step) override {
    expect_micro_step(micro_step, num_micro_steps());
    if (micro_step < planned_) return;
    begin();
    run_interruptibly(pool_, [&] { running_->wait_for(MicroStepId{micro_step}); });
    planned_ = std::max(planned_.load(), micro_step + 1);
  }

 private:
  const pid_t process_ = ::getpid();
  std::shared_ptr<const Policy> policy_;
  ThreadPool pool_;
  std::shared_ptr<const Workload> input_;
  std::atomic<int> planned_ = 0;        // micro-steps for which wait_for() has returned
  std::optional<RunningPlan> running_;  // declared last: its thread uses the members above
};

// A plan that the caller appends block by block.
class AppendedPlan final : public UnfinishedPlan {
 public:
  explicit AppendedPlan(const Load& load) : load_(load), growing_(*load_.input) {}

  void append(const Plan& block) {
    if (block.running || !block.layers.is_all()) {
      throw InputError({.field = "block"}, "is unfinished, or a part of a plan: finish it, and join the parts first");
    }
    const std::lock_guard lock(mutex_);
    growing_.append(*block.step);
    times_.wall_seconds += block.times.wall_seconds;
    times_.base_cpu_seconds += block.times.base_cpu_seconds;
    times_.planning_cpu_seconds += block.times.planning_cpu_seconds;
  }
  void fail(const std::string& why) { growing_.fail(why); }
  PlanTimes times() {  // sum over the blocks appended so far
    const std::lock_guard lock(mutex_);
    return times_;
  }

  const StepPlan& step() const override { return growing_.plan(); }
  int num_micro_steps() const override { return growing_.num_micro_steps(); }
  int num_planned() const override { return growing_.num_planned(); }
  void wait_for(int micro_step) override {
    while (!is_planned_after_a_while(micro_step)) {
    }
  }
  // Waits for a tenth of a second at most. Returns whether the micro-step is planned.
  bool is_planned_after_a_while(int micro_step) {
    expect_micro_step(micro_step, num_micro_steps());
    using namespace std::chrono_literals;
    const ReleasedGil release;
    if (growing_.wait_for(MicroStepId{micro_step}, 100ms)) return true;
    const HeldGil gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    return false;
  }

 private:
  const Load load_;
  GrowingPlan growing_;
  std::mutex mutex_;
  PlanTimes times_;  // guarded by mutex_
};

Plan plan_in(const std::shared_ptr<UnfinishedPlan>& unfinished) {
  const int layers = unfinished->step().num_layers();
  return {.step = std::shared_ptr<const StepPlan>(unfinished, &unfinished->step()),
          .layers = {0, layers, layers},
          .running = unfinished};
}
Plan begun(const std::shared_ptr<BackgroundPlan>& running) {
  running->begin();
  return plan_in(running);
}

}  // namespace

const StepPlan& finished(const Plan& plan) {
  if (plan.running && plan.running->num_micro_steps() > 0) plan.running->wait_for(plan.running->num_micro_steps() - 1);
  return *plan.step;
}

int num_planned(const Plan& plan) { return plan.running ? plan.running->num_planned() : plan.step->num_micro_steps(); }

void bind_planning(nb::module_& m) {
  m.def(
      "_why_cold",
      [](const std::string& policy, const nb::dict& options) {
        return policy_named(policy).why_cold(planner_options_of(options));
      },
      "policy"_a, "options"_a, "Why such plans do not start from an earlier one; empty if they do.");
  m.def(
      "_plans_layers_alone", [](const std::string& policy) { return policy_named(policy).plans_layers_alone(); },
      "policy"_a, "Whether each layer is planned independently of the others.");
  m.def(
      "_plan",
      [](const Load& load, const std::string& policy, const nb::dict& options, const nb::object& homes,
         const Plan* previous, const Load* previous_load, const nb::object& layers, int threads,
         const std::optional<nb::callable>& on_micro_step, const nb::dict& own) {
        return plan(load, {policy, options, own, {homes, previous, previous_load}, threads}, layers, on_micro_step);
      },
      "load"_a, "policy"_a, "options"_a, "homes"_a.none() = nb::none(), "previous"_a.none() = nb::none(),
      "previous_load"_a.none() = nb::none(), "layers"_a.none() = nb::none(), "threads"_a = 0,
      "on_micro_step"_a.none() = nb::none(), "policy_options"_a = nb::dict());

  nb::class_<BackgroundPlan>(m, "RunningPlan",
                             R"(A plan that is computed in the background. Created by foremoe.start_plan().

Micro-steps are planned in order. begin() returns the plan when its homes and, except under residency shared, its slots
are final. When wait_for() returns, the quotas of that micro-step are final, and under residency shared its slots too.
Do not read quotas of later micro-steps.)")
      .def("begin", &begun,
           R"(Waits until homes and slots (under residency shared: homes) are final, and returns the plan.

Raises:
    PolicySkipped: if the policy is not defined for this load. Exceptions of planning are raised too.)")
      .def("wait_for", &BackgroundPlan::wait_for, "micro_step"_a,
           "Waits until this micro-step and all earlier ones are planned.")
      .def(
          "finish",
          [](const std::shared_ptr<BackgroundPlan>& self) {
            if (self->num_micro_steps() > 0) self->wait_for(self->num_micro_steps() - 1);
            return begun(self);
          },
          "Waits until the whole plan is final, and returns it.");
  nb::class_<AppendedPlan>(m, "_GrowingPlan")
      .def(
          "__init__", [](AppendedPlan* self, const Load& load) { new (self) AppendedPlan(load); }, "load"_a)
      .def("append", &AppendedPlan::append, "block"_a)
      .def("fail", &AppendedPlan::fail, "why"_a)
      .def("begin",
           [](const std::shared_ptr<AppendedPlan>& self) {
             if (self->num_micro_steps() > 0) self->wait_for(0);
             Plan plan = plan_in(self);
             plan.times = self->times();
             return plan;
           })
      .def("wait_for", &AppendedPlan::wait_for, "micro_step"_a)
      .def("is_planned_after_a_while", &AppendedPlan::is_planned_after_a_while, "micro_step"_a);
  m.def(
      "_start_plan",
      [](const Load& load, const std::string& policy, const nb::dict& options, const nb::dict& own,
         const nb::object& homes, const Plan* previous, const Load* previous_load, int threads) {
        const Request request{policy, options, own, {homes, previous, previous_load}, threads};
        return std::shared_ptr<BackgroundPlan>(new BackgroundPlan(load, request), [](BackgroundPlan* running) {
          if (running->is_of_this_process()) delete running;
        });
      },
      "load"_a, "policy"_a, "options"_a, "policy_options"_a = nb::dict(), "homes"_a.none() = nb::none(),
      "previous"_a.none() = nb::none(), "previous_load"_a.none() = nb::none(), "threads"_a = 0);
}

}  // namespace foremoe::python
