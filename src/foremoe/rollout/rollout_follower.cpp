#include "foremoe/rollout/rollout_follower.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <filesystem>
#include <set>
#include <span>
#include <system_error>
#include <utility>

#include "foremoe/core/error.h"
#include "foremoe/rollout/count_routes.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe {

namespace {

constexpr std::string_view kEnd = "done";
constexpr std::string_view kEnding = ".safetensors";

struct Listing {
  std::set<std::string> traces;
  bool ended = false;
};

Listing list(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  Listing found{.traces = {}, .ended = fs::exists(fs::path(folder) / kEnd)};  // checked first: writers create it last
  for (fs::directory_iterator it(folder, error); !error && it != fs::directory_iterator(); it.increment(error)) {
    std::string name = it->path().filename().string();
    if (name.ends_with(kEnding) && !name.starts_with('.')) found.traces.insert(std::move(name));
  }
  if (error) throw InputError({.file = folder}, fmt::format("cannot be read as a folder: {}", error.message()));
  return found;
}

// Returns nullopt for a folder or a pipe, which must not be opened. If the file cannot be found (a link to nothing, or
// no permission), returns the state of no file, and reading it will say why.
std::optional<RolloutFollower::State> state_of(const std::string& path) {
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0) return RolloutFollower::State{};
  if (!S_ISREG(found.st_mode)) return std::nullopt;
  constexpr std::int64_t kNanoseconds = 1'000'000'000;
  return RolloutFollower::State{.bytes = found.st_size,
                                .modified = found.st_mtim.tv_sec * kNanoseconds + found.st_mtim.tv_nsec};
}

// An older time is no change: `cp -p` sets it after the last byte.
bool is_changed(const RolloutFollower::State& counted, const std::string& path) {
  const std::optional<RolloutFollower::State> now = state_of(path);
  if (!now || now->bytes < 0) return false;  // deleted
  return now->bytes != counted.bytes || now->modified > counted.modified;
}

[[noreturn]] void refuse_changed(const std::string& path) {
  throw InputError({.file = path},
                   "was changed or replaced after it was counted; rename complete files into the folder, each under a "
                   "name of its own");
}

RoutingTrace without_routes(RoutingTrace trace) {
  trace.routes = nullptr;
  trace.storage = nullptr;
  return trace;
}

}  // namespace

RolloutFollower::RolloutFollower(std::string folder, std::int64_t num_sequences, std::chrono::duration<double> patience)
    : folder_(std::move(folder)), num_sequences_(num_sequences), patience_(patience) {
  list(folder_);
}

double RolloutFollower::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
}

bool RolloutFollower::poll(ThreadPool& pool) {
  const Listing found = list(folder_);
  for (const std::string& name : found.traces) {
    const std::string path = (std::filesystem::path(folder_) / name).string();
    if (const auto counted = files_.find(name); counted != files_.end()) {
      if (is_changed(counted->second.state, path)) refuse_changed(path);
      continue;
    }
    const std::optional<State> state = state_of(path);
    if (!state) continue;
    const double seen = seconds();
    const std::optional<RoutingTrace> trace = read(path, *state, found.ended);
    if (!trace) continue;
    count(name, *trace, {.header = without_routes(*trace), .seen = seen, .state = *state}, pool);
    if (is_changed(*state, path)) refuse_changed(path);
  }
  if (num_sequences_ == 0) return found.ended;
  if (num_counted() == num_sequences_) return true;
  if (num_counted() > num_sequences_ || found.ended) {
    throw InputError({.file = folder_}, fmt::format("{} {} sequences, expected {}", found.ended ? "ended with" : "has",
                                                    num_counted(), num_sequences_));
  }
  return false;
}

std::int64_t RolloutFollower::num_counted() const {
  return collector_ ? static_cast<std::int64_t>(collector_->num_sequences()) : 0;
}

std::optional<RoutingTrace> RolloutFollower::read(const std::string& path, const State& state, bool ended) {
  try {
    RoutingTrace trace = read_trace(path);
    if (ended || !is_changed(state, path)) return trace;
  } catch (const InsufficientMemory&) {
    throw;
  } catch (const InputError&) {
    const auto [before, is_new] = unread_.try_emplace(path, Unread{state, seconds()});
    const bool changed = is_new || before->second.state != state;
    if (changed) before->second = {state, seconds()};
    if (ended || (!changed && seconds() - before->second.since >= patience_.count())) throw;
  }
  return std::nullopt;
}

void RolloutFollower::count(const std::string& name, const RoutingTrace& trace, File file, ThreadPool& pool) {
  if (collector_) {
    expect_same_shape(trace);
  } else {
    collector_.emplace(RolloutCollector::Shape{.num_layers = trace.num_layers,
                                               .top_k = trace.top_k,
                                               .num_experts = trace.num_experts,
                                               .weightless_experts = trace.weightless_experts,
                                               .experts_of_layer = trace.experts_of_layer,
                                               .top_k_of_layer = trace.top_k_of_layer},
                       folder_);
  }
  expect_memory(1.0 * trace.num_sequences() * trace.num_layers * trace.num_experts, {.file = trace.name});
  file.first = static_cast<int>(num_counted());
  const std::size_t token = shape_of(trace).token_bytes();
  try {
    pool.for_each_index(static_cast<std::size_t>(trace.num_sequences()), [&](std::size_t s, std::size_t) {
      const std::span<const std::byte> routes(
          trace.routes + static_cast<std::size_t>(trace.cu_seqlens[s]) * token,
          static_cast<std::size_t>(trace.sequence_length(static_cast<int>(s))) * token);
      collector_->add(file.first + static_cast<int>(s), trace.type, routes);
    });
  } catch (const InputError&) {
    if (is_changed(file.state, trace.name)) refuse_changed(trace.name);
    check_routes(trace);  // names the file and its first malformed row
    throw;
  }
  file.counted = seconds();
  files_.emplace(name, std::move(file));
}

void RolloutFollower::expect_same_shape(const RoutingTrace& trace) const {
  const std::string& name = files_.begin()->first;
  const RoutingTrace& first = files_.begin()->second.header;
  const auto expect = [&](const char* field, int here, int there) {
    if (here == there) return;
    throw InputError({.file = trace.name, .field = field}, fmt::format("is {} here, and {} in {}", here, there, name));
  };
  expect("layers", trace.num_layers, first.num_layers);
  expect("num_experts", trace.num_experts, first.num_experts);
  expect("top_k", trace.top_k, first.top_k);
  expect("weightless_experts", trace.weightless_experts, first.weightless_experts);
  for (const auto member : {&RoutingTrace::layer_ids, &RoutingTrace::experts_of_layer, &RoutingTrace::top_k_of_layer}) {
    if (trace.*member == first.*member) continue;
    const char* const field = member == &RoutingTrace::layer_ids ? "layer_ids" : "experts_of_layer or top_k_of_layer";
    throw InputError({.file = trace.name, .field = field}, fmt::format("differ from those in {}", name));
  }
}

RoutingTrace RolloutFollower::sequences() const {
  if (files_.empty()) throw InputError({.file = folder_}, fmt::format("has no file *{}", kEnding));
  RoutingTrace all = files_.begin()->second.header;
  all.name = folder_;
  all.num_tokens = 0;
  all.cu_seqlens = {0};
  all.prompt_lengths = all.group_ids = all.micro_step = all.rank = {};
  bool recorded = true;
  for (const auto& [name, counted] : files_) {
    const RoutingTrace& file = counted.header;
    for (int s = 0; s < file.num_sequences(); ++s) {
      all.cu_seqlens.push_back(all.cu_seqlens.back() + file.sequence_length(s));
    }
    all.whole_batches = all.whole_batches || file.whole_batches;
    recorded = recorded && file.has_batching();
    if (recorded && (file.ranks != all.ranks || file.ranks_per_node != all.ranks_per_node)) {
      throw InputError({.file = file.name, .field = "ranks"},
                       fmt::format("is {} in nodes of {} here, and {} in nodes of {} in {}", file.ranks,
                                   file.ranks_per_node, all.ranks, all.ranks_per_node, files_.begin()->first));
    }
    all.micro_step.insert(all.micro_step.end(), file.micro_step.begin(), file.micro_step.end());
    all.rank.insert(all.rank.end(), file.rank.begin(), file.rank.end());
  }
  all.num_tokens = all.cu_seqlens.back();
  if (!recorded) {
    all.micro_step = all.rank = {};
    all.ranks = all.ranks_per_node = 0;
  }
  return all;
}

LoadTable RolloutFollower::to_load_table(const Batching& batching) const {
  Batching as_counted = batching;  // in the order of counting
  std::size_t s = 0;
  for (const auto& [name, file] : files_) {
    const std::size_t end = s + static_cast<std::size_t>(file.header.num_sequences());
    for (auto number = static_cast<std::size_t>(file.first); s < end; ++s, ++number) {
      as_counted.micro_step[number] = batching.micro_step[s];
      as_counted.rank[number] = batching.rank[s];
    }
  }
  return collector_->to_load_table(as_counted);
}

}  // namespace foremoe
