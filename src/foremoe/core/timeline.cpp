#include "foremoe/core/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>
#include <vector>

namespace foremoe {
namespace {

struct Span {
  RankId rank;
  Lane lane{};
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::string name;

  auto key() const { return std::tie(rank, lane, begin_ns, end_ns, name); }
};

std::string_view to_string(Lane lane) {
  switch (lane) {
    case Lane::kWork:
      return "work between layers";
    case Lane::kExperts:
      return "experts";
    case Lane::kDispatch:
      return "dispatch and combine";
    case Lane::kWait:
      return "waiting for copies";
    case Lane::kHostPath:
      return "copies, host path";
    case Lane::kPeerPath:
      return "copies, peer path";
    case Lane::kPlanner:
      return "planner";
  }
  return "";
}

std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Formats a time in microseconds, the unit of the trace format, with exact decimals.
std::string microseconds(std::int64_t ns) { return fmt::format("{}.{:03}", ns / 1000, ns % 1000); }

}  // namespace

struct Timeline::State {
  explicit State(std::size_t most) : most_spans(most) {}

  const std::size_t most_spans;
  mutable std::mutex mutex;
  std::vector<Span> spans;       // guarded by mutex
  std::int64_t num_dropped = 0;  // guarded by mutex
};

Timeline::Timeline(std::size_t most_spans) : state_(std::make_unique<State>(most_spans)) {}
Timeline::~Timeline() = default;

std::int64_t Timeline::now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Timeline::add(RankId rank, Lane lane, const std::string& name, std::int64_t begin_ns, std::int64_t end_ns) {
  const std::lock_guard lock(state_->mutex);
  if (state_->spans.size() == state_->most_spans) {
    ++state_->num_dropped;
  } else {
    state_->spans.push_back({.rank = rank, .lane = lane, .begin_ns = begin_ns, .end_ns = end_ns, .name = name});
  }
}

std::string Timeline::to_json() const {
  std::vector<Span> spans;
  std::int64_t num_dropped = 0;
  {
    const std::lock_guard lock(state_->mutex);
    spans = state_->spans;
    num_dropped = state_->num_dropped;
  }
  std::ranges::sort(spans, {}, &Span::key);  // by all fields: the order of insertion depends on threads
  const std::int64_t start = spans.empty() ? 0 : std::ranges::min(spans, {}, &Span::begin_ns).begin_ns;

  std::string events;
  const auto out = std::back_inserter(events);
  const auto next = [&] { events += events.empty() ? "\n" : ",\n"; };
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const Span& span = spans[i];
    const int pid = span.rank.value;
    const int tid = static_cast<int>(span.lane);
    const bool new_rank = i == 0 || spans[i - 1].rank != span.rank;
    if (new_rank) {
      next();
      fmt::format_to(out, R"({{"ph":"M","name":"process_name","pid":{},"args":{{"name":"rank {}"}}}})", pid, pid);
    }
    if (new_rank || spans[i - 1].lane != span.lane) {
      next();
      fmt::format_to(out, R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":"{}"}}}})", pid, tid,
                     to_string(span.lane));
    }
    next();
    fmt::format_to(out, R"({{"ph":"X","name":{},"pid":{},"tid":{},"ts":{},"dur":{}}})", json_string(span.name), pid,
                   tid, microseconds(span.begin_ns - start),
                   microseconds(std::max<std::int64_t>(span.end_ns - span.begin_ns, 0)));
  }
  return fmt::format(R"({{"displayTimeUnit":"ms","otherData":{{"dropped_spans":{}}},"traceEvents":[{}]}})", num_dropped,
                     events) +
         "\n";
}

double thread_cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

std::string merged_timelines(std::span<const std::vector<std::byte>> texts) {
  nlohmann::ordered_json merged;
  for (const std::vector<std::byte>& bytes : texts) {
    const auto* const text = reinterpret_cast<const char*>(bytes.data());
    nlohmann::ordered_json one = nlohmann::ordered_json::parse(text, text + bytes.size());
    if (merged.is_null()) {
      merged = std::move(one);
      continue;
    }
    auto& dropped = merged["otherData"]["dropped_spans"];
    dropped = dropped.get<std::int64_t>() + one["otherData"]["dropped_spans"].get<std::int64_t>();
    for (auto& event : one["traceEvents"]) merged["traceEvents"].push_back(std::move(event));
  }
  return merged.dump() + "\n";
}

}  // namespace foremoe
