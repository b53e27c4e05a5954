#pragma once

// A rollout that still runs: its trace files are counted as they appear in a folder, so that planning can begin when
// its last sequence ends. Whoever writes them makes each appear whole, by a rename, as write_trace and `foremoe import`
// do. A name counts once; a file may go away after that. What is known at the end does not depend on the order in which
// files appeared, only on their names.

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
  // num_sequences: so many end the rollout; 0: a file named `done` in the folder does. Throws InputError where the
  // folder cannot be read.
  explicit RolloutFollower(std::string folder, std::int64_t num_sequences = 0);

  // Counts every file *.safetensors that appeared since, but not those whose name begins with a dot. Returns whether
  // the rollout has ended. Throws InputError for a file that is no trace, whose layers or experts are not those of the
  // others, or with a malformed row; for more sequences than asked for; and where `done` comes before them. Then the
  // follower is of no more use.
  bool poll(ThreadPool& pool);

  struct File {
    RoutingTrace header;  // without routes
    int first = 0;        // number of its first sequence in the collector
    double seen = 0;      // seconds since the follower was made
    double counted = 0;   // seconds since the follower was made
  };
  const std::map<std::string, File>& files() const { return files_; }  // by name
  double seconds() const;                                              // since it was made

  // All sequences so far in the order of files' names: lengths, and the batching where every file recorded one. It has
  // no routes. Throws InputError where there is none, or where files recorded other ranks.
  RoutingTrace sequences() const;

  // Of a batching of sequences().
  LoadTable to_load_table(const Batching& batching) const;

 private:
  std::int64_t num_counted() const;  // sequences
  void count(const std::string& name, ThreadPool& pool);
  void expect_like_the_first(const RoutingTrace& trace) const;

  std::string folder_;
  std::int64_t num_sequences_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::optional<RolloutCollector> collector_;  // once the first file has told the shape
  std::map<std::string, File> files_;          // by name
};

}  // namespace foremoe
