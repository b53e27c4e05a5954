#pragma once

// Follows a running rollout: counts trace files as they appear in a folder, so that planning can begin when the last
// sequence ends. Writers should create each file atomically, by a rename, as write_trace and `foremoe import` do. A
// file that cannot be read yet, because it still grows or a link has no target, is tried again until the rollout ends.
// (A writer that reserves the whole file first must rename it.) Each file is counted once and may be deleted
// afterwards, but not changed or replaced. The result depends on the names of files, not on their order of appearance.

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "foremoe/core/parallel.h"
#include "foremoe/rollout/batching.h"
#include "foremoe/rollout/collector.h"
#include "foremoe/rollout/load_table.h"
#include "foremoe/rollout/routing_trace.h"

namespace foremoe {

class RolloutFollower {
 public:
  // The rollout ends after `num_sequences` sequences, or if this is 0, with a file named `done`. Throws InputError if
  // the folder cannot be read.
  // patience: how long a file may remain unreadable without changing.
  explicit RolloutFollower(std::string folder, std::int64_t num_sequences = 0,
                           std::chrono::duration<double> patience = std::chrono::seconds(30));

  // Counts every new file *.safetensors whose name does not begin with a dot. Returns whether the rollout has ended.
  // Throws InputError if a file differs from the first in layers or experts, has a malformed row, was changed after it
  // was counted, or is not a trace when the rollout ends or patience does. Also throws for too many sequences, and if
  // `done` appears too early. After a throw, the follower is unusable.
  bool poll(ThreadPool& pool);

  // Shows whether a file changes. Device and inode differ on some network disks although it does not.
  struct State {
    std::int64_t bytes = -1;    // −1: there is no file
    std::int64_t modified = 0;  // ns since 1970

    friend bool operator==(const State&, const State&) = default;
  };

  struct File {
    RoutingTrace header;  // without routes
    int first = 0;        // index of its first sequence in the collector
    double seen = 0;      // seconds since construction
    double counted = 0;   // seconds since construction
    State state = {};
  };
  const std::map<std::string, File>& files() const { return files_; }  // by name
  double seconds() const;                                              // since construction

  // All sequences so far, without routes, in the order of file names: lengths, and the batching if every file recorded
  // one. Throws InputError if there is no file, or if files recorded different ranks.
  RoutingTrace sequences() const;

  // `batching` must be a batching of sequences().
  LoadTable to_load_table(const Batching& batching) const;

 private:
  std::int64_t num_counted() const;  // sequences
  // Reads a file that has not been counted; nullopt if it must be tried again.
  std::optional<RoutingTrace> read(const std::string& path, const State& state, bool ended);
  void count(const std::string& name, const RoutingTrace& trace, File file, ThreadPool& pool);
  void expect_same_shape(const RoutingTrace& trace) const;

  std::string folder_;
  std::int64_t num_sequences_;
  std::chrono::duration<double> patience_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::optional<RolloutCollector> collector_;  // created by the first file, which sets the shape
  std::map<std::string, File> files_;          // by name
  struct Unread {
    State state;
    double since = 0;  // seconds since construction
  };
  std::map<std::string, Unread> unread_;  // by path
};

}  // namespace foremoe
