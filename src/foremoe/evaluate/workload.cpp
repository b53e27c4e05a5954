#include "foremoe/evaluate/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "foremoe/core/error.h"
#include "foremoe/plan/homes_file.h"
#include "foremoe/plan/plan_file.h"
#include "foremoe/plan/token_choice.h"
#include "foremoe/planner/planner.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/count_routes.h"
#include "foremoe/rollout/file_kind.h"
#include "foremoe/rollout/load_file.h"
#include "foremoe/rollout/load_statistics.h"
#include "foremoe/rollout/trace_file.h"

namespace foremoe {
namespace {

constexpr double kMissingInLoad = 0.02;  // part of the rows; last tokens, which have no route, are usually fewer
constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;  // per rank and micro-step

[[noreturn]] void reject(const std::string& file, const std::string& what) { throw InputError({.file = file}, what); }

// Checks, before tokens are counted, that all ranks of a group have the same number of home experts.
void expect_even_homes(const InputOptions& options, int experts, int ranks) {
  if (options.ep != 0) ranks = options.ep;
  if (ranks == 0 || experts % ranks == 0) return;
  reject(options.path, fmt::format("{} cannot be divided evenly among {} (`{}`)", counted(experts, "expert"),
                                   counted(ranks, "rank"), options.ep != 0 ? "ep" : "ranks"));
}

Workload folded(LoadTable load, const InputOptions& options) {
  Workload input;
  load.name = options.path;
  const int before = load.num_ranks();
  int ranks = options.ranks;
  if (ranks == 0) {
    const bool folds = options.fold && options.wanted_ranks != 0 && before % options.wanted_ranks == 0;
    ranks = folds ? options.wanted_ranks : before;
  }
  expect_even_homes(options, load.num_experts(), ranks);
  if (ranks > before) {
    throw InputError({.field = "ranks"},
                     fmt::format("{}, but {} is a load of {}", ranks, options.path, counted(before, "rank")));
  }
  if (ranks < before && before % ranks == 0 && !options.fold) {
    throw InputError(
        {.field = "ranks"},
        fmt::format("{0}, but {3} has {1} ranks: --ep {0} evaluates the job's {2} expert-parallel groups of "
                    "{0}; --fold adds the loads of {2} neighbours, which is another experiment",
                    ranks, before, before / ranks, options.path));
  }
  if (ranks != before) {
    load = fold_ranks(load, ranks);
    input.remarks.push_back(fmt::format("{}: a load of {}, folded to {} by adding the loads of {} neighbours",
                                        options.path, counted(before, "rank"), ranks, before / ranks));
  }
  if (options.ranks_per_node != 0) load.ranks_per_node = std::min(options.ranks_per_node, load.num_ranks());
  std::int64_t rows = load.missing_rows + num_assignments(load) / load.top_k;
  if (load.tokens.size() > 0) {
    rows = 0;
    for (const Tokens of_rank : load.tokens.flat()) rows += of_rank.value * load.num_layers();
  }
  const double missing = static_cast<double>(load.missing_rows) / static_cast<double>(std::max<std::int64_t>(rows, 1));
  if (missing > kMissingInLoad) {
    input.remarks.push_back(fmt::format("{}: {:.2g} % of the rows ({} of {}) had no route and do not count",
                                        options.path, 100 * missing, load.missing_rows, rows));
  }
  input.load = std::move(load);
  return input;
}

Workload collected(RoutingTrace trace, const InputOptions& options, ThreadPool& pool) {
  const int ranks = options.ranks != 0 ? options.ranks : options.wanted_ranks;
  expect_even_homes(options, trace.num_experts, ranks != 0 ? ranks : trace.ranks);
  Workload workload;
  workload.tokens = BatchedTrace{.trace = std::move(trace)};
  auto& [routes, batching] = *workload.tokens;
  batching = batch(routes, options, workload.remarks);
  workload.load = collect(routes, batching, pool);
  note_missing_rows(routes, workload.load, workload.remarks);
  workload.load.name = options.path;
  return workload;
}

struct Shape {
  int layers = 0;
  int ranks = 0;
  int experts = 0;

  friend bool operator==(const Shape&, const Shape&) = default;
};

Shape shape_of(const auto& x) { return {x.num_layers(), x.num_ranks(), x.num_experts()}; }
Shape shape_of(const Homes& h) {
  return {static_cast<int>(h.home.extent(0)), h.num_ranks, static_cast<int>(h.home.extent(1))};
}

// Checks homes, or the plan or load of the previous step, read from `path`.
void expect_shape(const std::string& path, const auto& read, const LoadTable& load) {
  const Shape found = shape_of(read);
  const Shape wanted = shape_of(load);
  if (found == wanted) return;
  reject(path, fmt::format("has {} layers, {} ranks and {} experts; {} has {}, {} and {}", found.layers, found.ranks,
                           found.experts, load.name, wanted.layers, wanted.ranks, wanted.experts));
}

// Returns the homes in a plan or homes file, or nullopt if homes are contiguous.
std::optional<Homes> named_homes(const std::string& homes) {
  if (homes == kContiguous) return std::nullopt;
  const Safetensors file = open_input(homes);
  const FileKind kind = file_kind(file);
  if (kind == FileKind::kHomes) return read_homes(file);
  if (kind != FileKind::kPlan) refuse_kind(file, {kHomesFormat, kPlanFormat});
  StepPlan plan = read_plan(file);
  return Homes{.home = std::move(plan.home), .num_ranks = plan.num_ranks(), .ranks_per_node = plan.ranks_per_node};
}

Array<RankId, 2> homes_of(const std::string& path, std::optional<Homes> homes, const LoadTable& load) {
  if (!homes) return contiguous_homes(load);
  expect_shape(path, *homes, load);
  return std::move(homes->home);
}

}  // namespace

std::vector<Option> options_of(InputOptions& o) {
  constexpr IntegerRange kRanks{1, kMaxRanks};
  constexpr IntegerRange kFirst{1, std::numeric_limits<std::int32_t>::max()};
  return {
      integer_option({.name = "ranks",
                      .value = "R",
                      .help = "Ranks of the input. A trace recorded for another number is batched again",
                      .initial = "as recorded",
                      .main = true},
                     o.ranks, kRanks),
      flag_option({.name = "fold",
                   .help = "If a load has more ranks than --ranks, add the loads of neighbours. This is another "
                           "experiment, with more tokens per rank"},
                  o.fold),
      integer_option({.name = "ranks_per_node",
                      .value = "N",
                      .help = "Ranks that share a fast interconnect",
                      .initial = "as recorded; 8 for a trace that is batched again"},
                     o.ranks_per_node, kRanks),
      integer_option({.name = "tokens_per_rank",
                      .value = "N",
                      .help = "Largest number of tokens of a rank in one micro-step if a trace is batched again. Here "
                              "a token counts once, regardless of top-k"},
                     o.tokens_per_rank, {1, kMostTokens}),
      integer_option({.name = "layers", .value = "N", .help = "Use only the first N layers", .initial = "all"},
                     o.layers, kFirst),
      integer_option(
          {.name = "micro_steps", .value = "N", .help = "Use only the first N micro-steps", .initial = "all"},
          o.micro_steps, kFirst),
      text_option({.name = "homes",
                   .value = "contiguous|HOMES|PLAN",
                   .help = "Homes before planning. contiguous: rank r owns the r-th block of E/R experts. Otherwise a "
                           "file of `foremoe homes`, or a plan, whose homes are used",
                   .group = "Planning"},
                  o.homes),
      text_option({.name = "previous",
                   .value = "PLAN",
                   .help = "Plan of the previous step, for a warm start",
                   .group = "Planning"},
                  o.previous),
      text_option({.name = "previous_load",
                   .value = "INPUT",
                   .help = "Trace or load of the previous step, for policies that predict from it",
                   .group = "Planning"},
                  o.previous_load),
  };
}

Option ep_option(InputOptions& o) {
  return integer_option({.name = "ep",
                         .value = "N",
                         .help = "Ranks of an expert-parallel group: the input's ranks form groups of N neighbours, "
                                 "each planned on its own. The slowest group determines the step",
                         .initial = "all ranks",
                         .main = true},
                        o.ep, {1, kMaxRanks});
}

Array<double, 2> Workload::squared_lengths() const {
  return knows_lengths() ? foremoe::squared_lengths(*tokens) : Array<double, 2>{};
}

PolicyInput Workload::for_policy(const PlannerOptions& options) const {
  return {.load = load,
          .home = homes,
          .options = options,
          .previous = previous ? &*previous : nullptr,
          .previous_load = previous_load ? &*previous_load : nullptr};
}

PolicyResult plan_with(const Policy& policy, const Workload& workload, const PolicyInput& given, ThreadPool& pool) {
  PolicyResult result = policy.plan(given, pool);
  if (auto* const planned = std::get_if<PlannedStep>(&result)) {
    record_input_options(workload, planned->plan);
    planned->plan.homes_digest = recorded_digest(given.home, given.load);
  }
  return result;
}

Workload make_workload(LoadTable load) {
  Workload input;
  input.homes = contiguous_homes(load);
  input.load = std::move(load);
  input.fitted = std::make_shared<FittedChoices>();
  return input;
}

Batching batch(const RoutingTrace& trace, const InputOptions& options, std::vector<std::string>& remarks) {
  Batching batching = make_batching(trace, {.num_ranks = options.ranks != 0 ? options.ranks : options.wanted_ranks,
                                            .ranks_per_node = options.ranks_per_node,
                                            .tokens_per_rank = options.tokens_per_rank});
  expect_even_homes(options, trace.num_experts, batching.num_ranks);
  if (!batching.recorded) {
    const std::string recorded =
        trace.has_batching() ? fmt::format("recorded for {} ranks", trace.ranks) : std::string("no batching recorded");
    remarks.push_back(fmt::format("{}: {}, batched again: {} on {}, at most {} tokens each", options.path, recorded,
                                  counted(batching.num_micro_steps, "micro-step"), counted(batching.num_ranks, "rank"),
                                  options.tokens_per_rank));
    constexpr int kFewMicroSteps = 3;
    if (batching.num_micro_steps <= kFewMicroSteps && options.tokens_per_rank == BatchingOptions{}.tokens_per_rank) {
      remarks.back() += ". A smaller --tokens-per-rank gives more micro-steps, which statistics over them need";
    }
  }
  return batching;
}

void note_missing_rows(const RoutingTrace& trace, const LoadTable& load, std::vector<std::string>& remarks) {
  if (trace.routes == nullptr) return;
  const RouteShape shape = shape_of(trace);
  const std::int64_t rows = trace.num_tokens * trace.num_layers;
  const bool is_counted = load.tokens.extent(0) > 0;
  std::int64_t missing = is_counted ? load.missing_rows : rows - num_assignments(load) / trace.top_k;
  const auto is_missing = [&](std::int64_t token) {  // in all layers, as all bytes of a sentinel are 0xFF
    const std::byte* const routes = trace.routes + static_cast<std::size_t>(token) * shape.token_bytes();
    return std::all_of(routes, routes + shape.token_bytes(), [](std::byte b) { return b == std::byte{0xFF}; });
  };
  int without_first = 0;
  for (int s = 0; s < trace.num_sequences() && missing > 0; ++s) {
    if (trace.sequence_length(s) == 0) continue;
    if (is_missing(trace.cu_seqlens[s + 1] - 1)) missing -= trace.num_layers;  // a last token is never processed
    if (trace.sequence_length(s) > 1 && is_missing(trace.cu_seqlens[s])) ++without_first;
  }
  if (missing <= 0) return;
  remarks.push_back(fmt::format(
      "{}: {:.2g} % of the rows ({} of {}) have no route and do not count{}", trace.name.empty() ? "trace" : trace.name,
      100.0 * static_cast<double>(missing) / static_cast<double>(rows), missing, rows,
      without_first == 0 ? ""
                         : fmt::format("; {} sequences lack their first rows, as of cached prompts: "
                                       "foremoe import --fill-prefixes takes them from siblings",
                                       without_first)));
}

int number_to_use(const char* field, int asked, int there, const std::string& file) {
  if (asked > there) throw InputError({.field = field}, fmt::format("{}, but {} has only {}", asked, file, there));
  return asked != 0 ? asked : there;
}

Workload read_load_or_trace(const InputOptions& options, ThreadPool& pool) {
  const Safetensors file = open_input(options.path);
  Workload input;
  switch (file_kind(file)) {
    case FileKind::kTrace:
      input = collected(read_trace(file), options, pool);
      break;
    case FileKind::kLoad:
      input = folded(read_load(file), options);
      break;
    case FileKind::kPlan:
    case FileKind::kHomes:
      refuse_kind(file, {kTraceFormat, kLoadFormat});
  }
  input.fitted = std::make_shared<FittedChoices>();
  const auto to_use = [&](const char* field, int asked, int wanted, int there) {
    return asked == 0 && 0 < wanted && wanted < there ? wanted : number_to_use(field, asked, there, options.path);
  };
  const int layers = to_use("layers", options.layers, options.wanted_layers, input.load.num_layers());
  const int micro_steps =
      to_use("micro_steps", options.micro_steps, options.wanted_micro_steps, input.load.num_micro_steps());
  if (layers < input.load.num_layers() || micro_steps < input.load.num_micro_steps()) {
    input.load = take_first(input.load, micro_steps, layers);
    input.cut = true;
  }
  input.origin = file.text_or("origin", "");
  input.asked = options;
  if (options.ep == 0 || options.group < 0) return input;
  input.asked.group = -1;  // it is the whole job
  return take_group(input, options.ep, options.group);
}

Array<RankId, 2> initial_homes(const std::string& homes, const LoadTable& load) {
  return homes_of(homes, named_homes(homes), load);
}

Workload take_group(const Workload& whole, int ep, int group) {
  const LoadTable& load = whole.load;
  const auto fail = [&](const std::string& what) {
    throw InputError({.field = "ep"},
                     fmt::format("{}, but {} {}", ep, load.name.empty() ? "the load" : load.name, what));
  };
  const int ranks = load.num_ranks();
  if (ep < 1 || ranks % ep != 0) fail(fmt::format("has {}, not a multiple", counted(ranks, "rank")));
  if (load.num_experts() % ep != 0) fail(fmt::format("has {}, not a multiple", counted(load.num_experts(), "expert")));
  if (whole.previous_load && whole.previous_load->num_ranks() != ranks) {
    fail(fmt::format("has a `previous_load` of {} instead of {}", counted(whole.previous_load->num_ranks(), "rank"),
                     ranks));
  }
  if (whole.asked.group >= 0) fail("is itself an expert-parallel group");
  if (group >= ranks / ep) fail(fmt::format("has {}, no group {}", counted(ranks / ep, "group"), group));
  const int first = group * ep;
  const int per_node = load.ranks_per_node;
  if (first % per_node != 0 && first / per_node != (first + ep - 1) / per_node) {
    fail(fmt::format("has nodes of {} (`ranks_per_node`): the group of ranks {} to {} is in parts of two nodes",
                     counted(per_node, "rank"), first, first + ep - 1));
  }
  Workload part = make_workload(take_ranks(load, first, ep));
  if (whole.tokens) part.tokens = take_ranks(*whole.tokens, first, ep);
  if (part.tokens && part.tokens->trace.num_sequences() == 0) part.tokens.reset();  // no sequence in the group
  if (part.tokens && !whole.cut && load.missing_rows > 0) {  // take_ranks() only estimates their number
    ThreadPool pool(1);
    part.load.missing_rows = collect(part.tokens->trace, part.tokens->batching, pool).missing_rows;
  }
  if (whole.previous_load) part.previous_load = take_ranks(*whole.previous_load, first, ep);
  part.cut = whole.cut;
  part.fitted = whole.fitted;
  part.asked = whole.asked;
  part.asked.ranks = ranks;
  part.asked.ranks_per_node = per_node;
  part.asked.ep = ep;
  part.asked.group = group;
  part.remarks = whole.remarks;
  return part;
}

std::vector<Workload> split_groups(const Workload& whole, int ep) {
  std::vector<Workload> groups{take_group(whole, ep, 0)};
  for (int g = 1; g < whole.load.num_ranks() / ep; ++g) groups.push_back(take_group(whole, ep, g));
  return groups;
}

std::string group_path(const std::string& path, std::size_t group) {
  std::filesystem::path of(path);
  return of.replace_filename(fmt::format("{}-group{}{}", of.stem().string(), group, of.extension().string())).string();
}

Workload read_workload(const InputOptions& options, ThreadPool& pool) {
  return std::move(read_groups(options, pool).front());
}

std::vector<Workload> read_groups(const InputOptions& options, ThreadPool& pool) {
  Workload input = read_load_or_trace(options, pool);
  if (!input.tokens && options.tokens_per_rank != InputOptions{}.tokens_per_rank) {
    throw InputError({.field = "tokens_per_rank"},
                     fmt::format("applies only to traces, but {} is a load", options.path));
  }
  if (!options.previous_load.empty()) {
    InputOptions former = options;
    former.path = options.previous_load;
    former.ranks = input.load.num_ranks();
    former.micro_steps = 0;
    Workload read = read_load_or_trace(former, pool);
    std::ranges::move(read.remarks, std::back_inserter(input.remarks));
    expect_shape(former.path, read.load, input.load);
    input.previous_load = std::move(read.load);
  }
  const std::optional<Homes> homes = named_homes(options.homes);
  std::vector<Workload> groups;
  if (options.ep != 0) {
    groups = split_groups(input, options.ep);
  } else {
    groups.push_back(std::move(input));
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    groups[g].homes = homes_of(options.homes, homes, groups[g].load);
    if (options.previous.empty()) continue;
    const std::string path = options.ep != 0 ? group_path(options.previous, g) : options.previous;
    groups[g].previous = read_plan(path);
    expect_shape(path, *groups[g].previous, groups[g].load);
  }
  return groups;
}

std::string recorded_digest(ArrayView<const RankId, 2> home, const LoadTable& load) {
  return std::ranges::equal(home.flat(), contiguous_homes(load).flat()) ? "" : homes_digest(home);
}

void record_input_options(const Workload& workload, StepPlan& plan) {
  const InputOptions& asked = workload.asked;
  auto options = nlohmann::ordered_json::parse(plan.options);
  if (asked.homes != kContiguous) options["homes"] = asked.homes;
  if (asked.tokens_per_rank != InputOptions{}.tokens_per_rank) options["tokens-per-rank"] = asked.tokens_per_rank;
  if (asked.fold) options["fold"] = true;
  if (asked.ep != 0) options.update({{"ranks", asked.ranks}, {"ep", asked.ep}, {"group", asked.group}});
  if (asked.layers != 0) options["layers"] = asked.layers;
  if (asked.micro_steps != 0) options["micro-steps"] = asked.micro_steps;
  plan.options = options.dump();
}

InputOptions input_as_planned(const StepPlan& plan, InputOptions options) {
  const auto recorded = nlohmann::json::parse(plan.options);
  const auto take = [&](const char* key, auto initial, auto& value) {
    const std::uint64_t most = std::is_same_v<decltype(initial), int> ? std::numeric_limits<int>::max() : kMostTokens;
    const auto at = recorded.find(key);
    if (value == initial && at != recorded.end() && at->is_number_unsigned() && *at <= most) at->get_to(value);
  };
  take("ep", 0, options.ep);
  take("group", -1, options.group);
  int ranks_of_job = 0;
  take("ranks", 0, ranks_of_job);
  options.wanted_ranks = options.ep != 0 ? std::min<int>(ranks_of_job, kMaxRanks) : plan.num_ranks();
  options.fold = true;  // the plan's digest tells whether the load was folded; older plans do not record it
  if (options.ranks_per_node == 0) options.ranks_per_node = plan.ranks_per_node;
  take("tokens-per-rank", BatchingOptions{}.tokens_per_rank, options.tokens_per_rank);
  take("layers", 0, options.wanted_layers);
  take("micro-steps", 0, options.wanted_micro_steps);
  return options;
}

std::string describe(const LoadTable& load) {
  return fmt::format("{} × {}, {} on {} ({})", counted(load.num_micro_steps(), "micro-step"),
                     counted(load.num_layers(), "layer"), counted(load.num_experts(), "expert"),
                     counted(load.num_ranks(), "rank"), counted(load.topology().num_nodes(), "node"));
}

std::string describe(const std::vector<Workload>& groups) {
  const std::string one = describe(groups.front().load);
  const int ep = groups.front().asked.ep;
  return ep == 0 ? one : fmt::format("{}, each {}", counted(groups.size(), "expert-parallel group"), one);
}

std::string counted(std::int64_t n, std::string_view noun) {
  return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s");
}

}  // namespace foremoe
