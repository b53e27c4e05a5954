#include "foremoe/plan/plan_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/core/safetensors.h"
#include "foremoe/plan/homes_file.h"
#include "foremoe/rollout/file_kind.h"

namespace foremoe {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";
constexpr std::size_t kMostOptionBytes = std::size_t{1} << 16;
constexpr int kDeepestOption = 8;

// Index of element i of a row-major tensor, such as "[3, 0, 17]".
std::string index_of(std::size_t i, std::vector<std::size_t> shape) {
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    const std::size_t extent = shape[axis];
    shape[axis] = i % extent;
    i /= extent;
  }
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

struct Range {
  std::int64_t low;
  std::int64_t high;
};

// Copies an integer tensor and checks the copy, since others may change the file meanwhile.
template <class T, std::size_t N>
Array<T, N> copied(const Safetensors& file, std::string_view name, const TensorView& tensor, Range range) {
  std::array<std::size_t, N> shape;
  std::ranges::copy(tensor.shape, shape.begin());
  expect_memory(bytes_of<T>(shape), {.file = file.name(), .field = std::string(name)});
  Array<T, N> values(shape);
  tensor.copy_to(values.flat());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::int64_t value = values.flat()[i].value;
    if (value >= range.low && value <= range.high) continue;
    file.fail(name, index_of(i, tensor.shape), fmt::format("{} is not in [{}, {}]", value, range.low, range.high));
  }
  return values;
}

void expect_digest(const Safetensors& file, std::string_view key, const std::string& digest) {
  if (digest.size() == 64 && digest.find_first_not_of(kHexDigits) == std::string::npos) return;
  file.fail(key, "", fmt::format("'{}' is not a hexadecimal SHA-256", digest));
}

void read_metadata(const Safetensors& file, StepPlan& plan) {
  plan.policy = file.text("policy");
  const auto residency = residency_from_string(file.text("residency"));
  if (!residency) file.fail("residency", "", fmt::format("'{}' is not a residency", file.text("residency")));
  plan.residency = *residency;
  plan.guest_slots = static_cast<int>(file.integer("guest_slots", 0, kMaxExperts));
  plan.ranks_per_node = static_cast<int>(file.integer("ranks_per_node", 1, kMaxRanks));
  plan.in_flight = static_cast<int>(file.integer("in_flight", 1, std::numeric_limits<int>::max()));
  plan.options = file.text("options");
  bool shallow = plan.options.size() <= kMostOptionBytes;  // readers recurse
  const auto bound_depth = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    shallow = shallow && depth <= kDeepestOption;
    return shallow;
  };
  const auto options = nlohmann::json::parse(shallow ? plan.options : "", bound_depth, /*allow_exceptions=*/false);
  if (!shallow || !options.is_object()) {
    file.fail("options", "",
              fmt::format("not a JSON object of at most {} bytes and {} levels", kMostOptionBytes, kDeepestOption));
  }
  plan.load_digest = file.text("load_digest");
  expect_digest(file, "load_digest", plan.load_digest);
  plan.homes_digest = file.text_or("homes_digest", "");
  if (!plan.homes_digest.empty()) expect_digest(file, "homes_digest", plan.homes_digest);
}

// The tensors of the file, with types and shapes that match. Their values are not checked yet.
struct StoredTensors {
  const TensorView& slot_expert;
  const TensorView& home;
  const TensorView& slot_tokens;
  const TensorView& micro_step;
  const TensorView& pass;
  const TensorView* max_load;  // null if absent, as is lower_bound
  const TensorView* lower_bound;
  std::size_t num_micro_steps;
};

StoredTensors stored_tensors(const Safetensors& file, int in_flight) {
  const TensorView& slot_expert = file.tensor("slot_expert", {DType::kI16, DType::kI32}, 4);
  if (slot_expert.num_elements() == 0 || slot_expert.shape[2] > kMaxRanks ||
      slot_expert.shape[0] > std::numeric_limits<int>::max()) {
    file.fail("slot_expert", "", fmt::format("shape [{}] is not that of a plan", fmt::join(slot_expert.shape, ", ")));
  }
  const TensorView& home = file.tensor("home", {DType::kI32}, 2);
  if (home.shape[0] != slot_expert.shape[1]) {
    file.fail("home", "", fmt::format("{} layers, but slot_expert has {}", home.shape[0], slot_expert.shape[1]));
  }
  const std::size_t num_events = slot_expert.shape[0];
  if (in_flight > 1 && num_events % 2 != 0) {
    file.fail("slot_expert", "",
              fmt::format("{} events, but with {} in flight every micro-step has two", num_events, in_flight));
  }
  const std::size_t num_micro_steps = in_flight == 1 ? num_events : num_events / 2;
  const auto bound = [&](std::string_view name) {
    return file.has(name) ? &file.tensor(name, {DType::kI64}, {num_micro_steps, home.shape[0]}) : nullptr;
  };
  return {.slot_expert = slot_expert,
          .home = home,
          .slot_tokens = file.tensor("slot_tokens", {DType::kU32, DType::kI64}, slot_expert.shape),
          .micro_step = file.tensor("event_micro_step", {DType::kI32}, std::vector{num_events}),
          .pass = file.tensor("event_pass", {DType::kU8}, std::vector{num_events}),
          .max_load = bound("max_load"),
          .lower_bound = bound("lower_bound"),
          .num_micro_steps = num_micro_steps};
}

void check_slots(const Safetensors& file, const StoredTensors& stored, int guest_slots) {
  const TensorView& slot_expert = stored.slot_expert;
  const auto num_experts = static_cast<int>(stored.home.shape[1]);
  const int num_homes = num_experts / static_cast<int>(slot_expert.shape[2]);
  if (static_cast<int>(slot_expert.shape[3]) != num_homes + guest_slots) {
    file.fail("slot_expert", "",
              fmt::format("{} slots per rank, but {} homes and {} guest slots", slot_expert.shape[3], num_homes,
                          guest_slots));
  }
}

ExecutionOrder checked_order(const Safetensors& file, const StoredTensors& stored, int in_flight) {
  ExecutionOrder order = make_execution_order(static_cast<int>(stored.num_micro_steps), in_flight);
  for (std::size_t t = 0; t < order.pass.size(); ++t) {
    const auto expect = [&](std::string_view field, std::int64_t value, std::int64_t expected) {
      if (value == expected) return;
      file.fail(field, fmt::format("[{}]", t),
                fmt::format("{}, but with {} in flight this event has {}", value, in_flight, expected));
    };
    expect("event_micro_step", stored.micro_step.integer(t), order.micro_step[t].value);
    expect("event_pass", stored.pass.integer(t), static_cast<std::int64_t>(order.pass[t]));
  }
  return order;
}

// The tensors of a plan in their stored types.
class PlanTensors {
 public:
  template <class Stored, class T, std::size_t N>
  void add(std::string name, std::span<const T> values, const std::array<std::size_t, N>& shape) {
    std::vector<std::byte> bytes(values.size() * sizeof(Stored));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const Stored stored = static_cast<Stored>(to_integer(values[i]));
      std::memcpy(bytes.data() + i * sizeof(Stored), &stored, sizeof(Stored));
    }
    tensors_.push_back({std::move(name), dtype_of<Stored>(), {shape.begin(), shape.end()}, bytes});
    storage_.push_back(std::move(bytes));  // moving a vector does not move its elements
  }

  const std::vector<TensorData>& tensors() const { return tensors_; }

 private:
  static std::int64_t to_integer(Pass pass) { return static_cast<std::int64_t>(pass); }
  static std::int64_t to_integer(auto x) { return x.value; }

  std::vector<TensorData> tensors_;
  std::vector<std::vector<std::byte>> storage_;
};

Metadata metadata_of(const StepPlan& plan) {
  Metadata metadata{{"format", std::string(kPlanFormat)},
                    {"policy", plan.policy},
                    {"residency", std::string(to_string(plan.residency))},
                    {"guest_slots", fmt::to_string(plan.guest_slots)},
                    {"ranks_per_node", fmt::to_string(plan.ranks_per_node)},
                    {"in_flight", fmt::to_string(plan.in_flight)},
                    {"options", plan.options},
                    {"load_digest", plan.load_digest}};
  if (!plan.homes_digest.empty()) metadata["homes_digest"] = plan.homes_digest;
  return metadata;
}

PlanTensors tensors_of(const StepPlan& plan) {
  PlanTensors tensors;
  const auto slot_expert = plan.slot_expert.flat();
  if (plan.num_experts() - 1 <= std::numeric_limits<std::int16_t>::max()) {
    tensors.add<std::int16_t>("slot_expert", slot_expert, plan.slot_expert.shape());
  } else {
    tensors.add<std::int32_t>("slot_expert", slot_expert, plan.slot_expert.shape());
  }
  const auto slot_tokens = plan.slot_tokens.flat();
  if (slot_tokens.empty() || std::ranges::max(slot_tokens).value <= std::numeric_limits<std::uint32_t>::max()) {
    tensors.add<std::uint32_t>("slot_tokens", slot_tokens, plan.slot_tokens.shape());
  } else {
    tensors.add<std::int64_t>("slot_tokens", slot_tokens, plan.slot_tokens.shape());
  }
  const std::array events{plan.event_micro_step.size()};
  tensors.add<std::int32_t>("event_micro_step", std::span(plan.event_micro_step), events);
  tensors.add<std::uint8_t>("event_pass", std::span(plan.event_pass), events);
  tensors.add<std::int32_t>("home", plan.home.flat(), plan.home.shape());
  if (!plan.max_load.empty()) tensors.add<std::int64_t>("max_load", plan.max_load.flat(), plan.max_load.shape());
  if (!plan.lower_bound.empty()) {
    tensors.add<std::int64_t>("lower_bound", plan.lower_bound.flat(), plan.lower_bound.shape());
  }
  return tensors;
}

}  // namespace

StepPlan read_plan(const Safetensors& file) {
  expect_format(file, kPlanFormat);
  StepPlan plan;
  read_metadata(file, plan);
  const StoredTensors stored = stored_tensors(file, plan.in_flight);
  const int num_ranks = static_cast<int>(stored.slot_expert.shape[2]);
  plan.ranks_per_node = std::min(plan.ranks_per_node, num_ranks);
  plan.home = read_home_tensor(file, num_ranks);
  check_slots(file, stored, plan.guest_slots);
  constexpr Range kTokens{0, kMaxTokensPerLayer};
  plan.slot_expert =
      copied<ExpertId, 4>(file, "slot_expert", stored.slot_expert, {kNoExpert.value, plan.num_experts() - 1});
  plan.slot_tokens = copied<Tokens, 4>(file, "slot_tokens", stored.slot_tokens, kTokens);
  const auto bound = [&](std::string_view name, const TensorView* tensor) {
    return tensor != nullptr ? copied<Tokens, 2>(file, name, *tensor, kTokens) : Array<Tokens, 2>{};
  };
  plan.max_load = bound("max_load", stored.max_load);
  plan.lower_bound = bound("lower_bound", stored.lower_bound);
  ExecutionOrder order = checked_order(file, stored, plan.in_flight);

  plan.event_micro_step = std::move(order.micro_step);
  plan.event_pass = std::move(order.pass);
  return plan;
}

StepPlan read_plan(const std::string& path) { return read_plan(open_input(path)); }

void expect_plan_for(const LoadTable& load, const StepPlan& plan, const std::string& path) {
  if (plan.load_digest == load_digest(load)) return;
  throw InputError({.file = path, .field = "load_digest"},
                   fmt::format("the plan was made for a different load than {}", load.name));
}

StepPlan read_plan_for(const LoadTable& load, const std::string& path) {
  StepPlan plan = read_plan(path);
  expect_plan_for(load, plan, path);
  return plan;
}

void write_plan(const StepPlan& plan, const std::string& path) {
  write_safetensors(path, tensors_of(plan).tensors(), metadata_of(plan));
}

std::vector<std::byte> to_bytes(const StepPlan& plan) {
  return to_safetensors(tensors_of(plan).tensors(), metadata_of(plan));
}

}  // namespace foremoe
