// foremoe calibrate: a cluster file of the machine that this runs on, each number with how it was measured.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>

#include "command.h"
#include "console.h"
#include "foremoe/cluster/cluster.h"
#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"
#include "foremoe/runtime/cpu/cpu_device.h"
#include "foremoe/runtime/machine_speed.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kExamples =
    R"(  foremoe calibrate                                             print a cluster file, a rank for each processor
  foremoe calibrate --ranks 4 --out machine.toml                of four ranks
  foremoe calibrate --hidden 64 --intermediate 32 --rows 128    with the experts that foremoe run has by default
  foremoe plan step.load.safetensors --cluster machine.toml --model Qwen3-30B-A3B --max-copies-per-rank hidden
)";

constexpr std::string_view kMeaning =
    R"(Ranks are threads that compute on processors, as those of foremoe run; all measure at once, so that each number is
what one has while the others work. Numbers are float32's: model them with --bytes-per-parameter 4. What one machine
cannot tell, its network, is taken to be as fast as the exchange between its ranks; the file says so.
)";

struct CalibrateArguments {
  std::string out;
  std::string name = "calibrated";
  int ranks = 0;  // 0: as many as processors
  int milliseconds = 300;
  int mebibytes = 64;
  SpeedOptions speed;
};

struct Calibration {
  Cluster cluster;
  ClusterNotes notes;  // every number has one
};

Bytes memory_of_machine() { return Bytes{std::int64_t{sysconf(_SC_PHYS_PAGES)} * std::int64_t{sysconf(_SC_PAGESIZE)}}; }

// Four digits are more than a measurement repeats.
void round_numbers(Cluster& cluster) {
  for (double* const number :
       {&cluster.flops_per_second, &cluster.gemm_efficiency, &cluster.attention_efficiency,
        &cluster.memory_bytes_per_second, &cluster.kernel_seconds, &cluster.peers.bytes_per_second,
        &cluster.peers.latency_seconds, &cluster.network.bytes_per_second, &cluster.network.latency_seconds,
        &cluster.host.bytes_per_second, &cluster.host.latency_seconds, &cluster.switch_bytes_per_second,
        &cluster.host_memory_bytes_per_second}) {
    *number = std::stod(fmt::format("{:.4g}", *number));
  }
}

Calibration calibrate(const CalibrateArguments& arguments) {
  SpeedOptions options = arguments.speed;
  options.seconds = arguments.milliseconds * 1e-3;
  options.num_ranks = arguments.ranks > 0 ? arguments.ranks : static_cast<int>(std::thread::hardware_concurrency());
  options.num_ranks = std::max(1, options.num_ranks);
  options.buffer = Bytes{std::int64_t{arguments.mebibytes} << 20};
  const MachineSpeed speed = measure_machine(options, make_cpu_device);

  const int n = options.num_ranks;
  const bool alone = n == 1;
  const std::string at_once = alone ? "one rank" : fmt::format("{} ranks at once", n);
  const std::string buffers = fmt::format("{} MiB", arguments.mebibytes);
  Calibration result;
  Cluster& c = result.cluster;
  c.name = arguments.name;
  c.ranks_per_node = n;
  c.flops_per_second = speed.best_flops_per_second;
  c.gemm_efficiency = std::min(1.0, speed.expert_flops_per_second / speed.best_flops_per_second);
  c.attention_efficiency = c.gemm_efficiency;
  c.memory_bytes_per_second = speed.moved_bytes_per_second;
  c.memory = Bytes{memory_of_machine().value / n};
  c.row_tile = 1;
  c.kernel_seconds = speed.operation_seconds;
  c.host = {.bytes_per_second = speed.copied_bytes_per_second, .latency_seconds = speed.copy_seconds};
  c.peers =
      alone ? c.host
            : LinkSpeed{.bytes_per_second = speed.exchange_bytes_per_second, .latency_seconds = speed.exchange_seconds};
  c.network = c.peers;
  c.ranks_per_switch = n;
  c.switch_bytes_per_second = n * c.host.bytes_per_second;
  c.host_memory_bytes_per_second = n * c.memory_bytes_per_second;

  round_numbers(c);

  const std::string network = "assumed: no other node was there to measure; as between peers";
  result.notes = {
      {"ranks_per_node", arguments.ranks > 0 ? "as asked for" : "the processors of this machine"},
      {"device.flops_per_second",
       fmt::format("measured, {}: the fastest forward of an expert of {} by {} with {} rows, float32", at_once,
                   options.shape.hidden, options.shape.intermediate, options.rows)},
      {"device.gemm_efficiency", "measured: all of these forwards by the fastest"},
      {"device.attention_efficiency", "assumed: as products; foremoe run computes no attention"},
      {"device.memory_bytes_per_second",
       fmt::format("measured, {}: memcpy of {}, bytes read and written", at_once, buffers)},
      {"device.memory_bytes", "this machine's memory by ranks"},
      {"device.row_tile", "assumed: a processor multiplies single rows"},
      {"device.kernel_seconds", fmt::format("measured, {}: an addition of one element", at_once)},
      {"peers.bytes_per_second", alone ? "assumed: one rank has no peers; as from the host's memory"
                                       : fmt::format("measured, {}: an all-to-all of {} each", at_once, buffers)},
      {"peers.latency_seconds",
       alone ? "likewise" : fmt::format("measured, {}: an all-to-all of 64 bytes to each", at_once)},
      {"network.bytes_per_second", network},
      {"network.latency_seconds", network},
      {"host.bytes_per_second",
       fmt::format("measured, {}: a transfer link copies {} from shared memory", at_once, buffers)},
      {"host.latency_seconds", fmt::format("measured, {}: a transfer link copies 64 bytes", at_once)},
      {"node.ranks_per_switch", "all: they share one memory"},
      {"node.switch_bytes_per_second", "host.bytes_per_second of all ranks, which were measured at once"},
      {"node.host_memory_bytes_per_second", "device.memory_bytes_per_second of all ranks, likewise"},
  };
  return result;
}

void print_summary(const Cluster& c, const std::string& out) {
  FactList facts;
  facts.add("ranks", fmt::format("{}, of one node", c.ranks_per_node));
  facts.add("products", fmt::format("{:.3g} GFLOP/s a rank, {:.0f} % of its best", c.flops_per_second * 1e-9,
                                    100 * c.gemm_efficiency));
  facts.add("memory", fmt::format("{:.3g} GB/s a rank, read and written", c.memory_bytes_per_second * 1e-9));
  const auto add_link = [&](const char* name, const LinkSpeed& link) {
    facts.add(name,
              fmt::format("{:.3g} GB/s a rank, {:.3g} µs", link.bytes_per_second * 1e-9, link.latency_seconds * 1e6));
  };
  add_link("exchange", c.peers);
  add_link("copies", c.host);
  facts.add("written", out);
  fmt::print("{}", facts.to_string());
}

int run(const CalibrateArguments& arguments) {
  const auto shows_nothing = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (arguments.name.empty() || std::ranges::any_of(arguments.name, shows_nothing)) {
    throw InputError({.field = "name"}, "must be a name without control characters");
  }
  expect_output(arguments.out);
  Calibration calibration;
  {
    const Activity activity("measuring");
    calibration = calibrate(arguments);
  }
  const std::string text = "# Measured by foremoe calibrate on the machine that it ran on.\n\n" +
                           to_toml(calibration.cluster, calibration.notes);
  parse_cluster(text, "calibrated cluster");  // what was measured is within what is accepted
  if (arguments.out.empty()) {
    fmt::print("{}", text);
  } else {
    write_file(arguments.out, text);
    print_summary(calibration.cluster, arguments.out);
  }
  return kOk;
}

}  // namespace

Command calibrate_command() {
  auto a = std::make_shared<CalibrateArguments>();
  const auto size = [&](const char* name, int& value, std::int64_t most, const char* help) {
    return integer_option({.name = name, .value = "N", .help = help}, value, {1, most});
  };
  return {
      .name = "calibrate",
      .summary = "Measure this machine and write it down as a cluster to model time on",
      .examples = std::string(kExamples),
      .meaning = std::string(kMeaning),
      .options = {out_option(a->out, "FILE", "Write the cluster file here in place of printing it"),
                  text_option({.name = "name", .value = "NAME", .help = "Name of the cluster in tables", .main = true},
                              a->name),
                  integer_option({.name = "ranks",
                                  .value = "N",
                                  .help = "Ranks, each a thread; all measure at once",
                                  .initial = "one per processor",
                                  .main = true},
                                 a->ranks, {1, 256}),
                  size("hidden", a->speed.shape.hidden, 1 << 15,
                       "Width of a token of the expert that products are measured with"),
                  size("intermediate", a->speed.shape.intermediate, 1 << 15, "Width inside that expert"),
                  size("rows", a->speed.rows, 1 << 16, "Rows that it multiplies at once"),
                  size("mebibytes", a->mebibytes, 1 << 12,
                       "How much each rank moves, exchanges and copies at once; more than the caches hold"),
                  size("milliseconds", a->milliseconds, 60'000, "How long each of seven measurements takes, at least")},
      .run = [a](const Given&) { return cli::run(*a); }};
}

}  // namespace foremoe::cli
