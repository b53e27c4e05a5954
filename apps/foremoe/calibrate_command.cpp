// foremoe calibrate: measures this machine and writes a cluster file that documents each measurement.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>

#include "command.h"
#include "console.h"
#include "foremoe/calibration/machine_speed.h"
#include "foremoe/cluster/cluster.h"
#include "foremoe/core/atomic_file.h"
#include "foremoe/core/error.h"
#include "progress.h"

namespace foremoe::cli {
namespace {

constexpr std::string_view kCalibrateExamples =
    R"(  foremoe calibrate                                             print a cluster file with one rank per processor
  foremoe calibrate --ranks 4 --out machine.toml                measure with four ranks
  foremoe calibrate --hidden 64 --intermediate 32 --rows 128    use the default expert size of foremoe run
  foremoe plan step.load.safetensors --cluster machine.toml --model Qwen3-30B-A3B --max-copies-per-rank hidden
)";

constexpr std::string_view kCalibrateMeaning =
    R"(Ranks are threads that compute on this machine's processors, as in foremoe run. All ranks measure at the same time, so
each number is the rate of one rank while the others are busy. Rates are for float32: pass --bytes-per-parameter 4 when
you model with the file. One machine cannot measure its network. The file assumes that the network is as fast as the
exchange between ranks, and marks this value as assumed.
)";

struct CalibrateArguments {
  std::string out;
  std::string name = "calibrated";
  int milliseconds = 300;
  int mebibytes = 64;
  SpeedOptions speed{.num_ranks = 0};  // 0: one per processor
};

void print_summary(const Cluster& c, const std::string& out) {
  FactList facts;
  facts.add("ranks", fmt::format("{}, on one node", c.ranks_per_node));
  facts.add("products", fmt::format("{:.3g} GFLOP/s per rank, {:.0f} % of its best", c.flops_per_second * 1e-9,
                                    100 * c.gemm_efficiency));
  facts.add("memory", fmt::format("{:.3g} GB/s per rank, read and written", c.memory_bytes_per_second * 1e-9));
  const auto add_link = [&](const char* name, const LinkSpeed& link) {
    facts.add(name,
              fmt::format("{:.3g} GB/s per rank, {:.3g} µs", link.bytes_per_second * 1e-9, link.latency_seconds * 1e6));
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
    SpeedOptions options = arguments.speed;
    options.seconds = arguments.milliseconds * 1e-3;
    options.buffer = Bytes{std::int64_t{arguments.mebibytes} << 20};
    calibration = calibrate(arguments.name, options);
  }
  const std::string text = "# Measured by foremoe calibrate on the machine on which it ran.\n\n" +
                           to_toml(calibration.cluster, calibration.notes);
  parse_cluster(text, "calibrated cluster");  // throws if a measured value is out of range
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
      .summary = "Measure this machine and write a cluster file for foremoe simulate",
      .examples = std::string(kCalibrateExamples),
      .meaning = std::string(kCalibrateMeaning),
      .options =
          {out_option(a->out, "FILE", "Write the cluster file here instead of printing it"),
           text_option({.name = "name", .value = "NAME", .help = "Name of the cluster in tables", .main = true},
                       a->name),
           integer_option({.name = "ranks",
                           .value = "N",
                           .help = "Number of ranks. Each is a thread, and all measure at the same time",
                           .initial = "one per processor",
                           .main = true},
                          a->speed.num_ranks, {1, 256}),
           size("hidden", a->speed.shape.hidden, 1 << 15, "Hidden size of the expert whose forward pass is measured"),
           size("intermediate", a->speed.shape.intermediate, 1 << 15, "Intermediate size of that expert"),
           size("rows", a->speed.rows, 1 << 16, "Rows per forward pass of that expert"),
           size("mebibytes", a->mebibytes, 1 << 12,
                "Buffer size for the memory, exchange and copy measurements of each rank; larger than the caches"),
           size("milliseconds", a->milliseconds, 60'000, "Minimum duration of each of the seven measurements")},
      .run = [a](const Given&) { return cli::run(*a); }};
}

}  // namespace foremoe::cli
