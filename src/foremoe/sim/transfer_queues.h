#pragma once

// What is still to cross each link, by deadline.
//
// Model. A link works without pause at what is most urgent of what was given to it; what is equally urgent is done
//   together. Links work independently of each other: a transfer that crosses several is through when all of them are
//   done with it, as if it went in small pieces.
// Consequence. When the work up to a deadline is done depends on work up to that deadline alone and is a maximum of
//   sums, so that more bandwidth, or giving something earlier, never delays anything.
// Complexity. O(links with work) per part of a turn.

#include <vector>

#include "foremoe/transfer/cluster_links.h"

namespace foremoe {

class TransferQueues {
 public:
  explicit TransferQueues(int num_links) : queues_(static_cast<std::size_t>(num_links)) {}

  void add(LinkId link, int deadline, double seconds);

  // Seconds until the link, undisturbed, is done with all that has this deadline or an earlier one.
  double pending(LinkId link, int deadline) const;
  double most_pending(int deadline) const;  // over links

  // `duration` seconds from `now` on, in which rate(link) ∈ [0, 1] of each link's time is free.
  template <class Rate>
  void pass(double now, double duration, const Rate& rate);

  // When the link was last done with that deadline; `now` of the beginning where it never had any of it. Kept until
  // forget(deadline).
  double done_at(LinkId link, int deadline) const;
  void forget(int before_deadline);

  void keep_times() { keeps_times_ = true; }

 private:
  struct Work {
    int deadline = 0;
    double seconds = 0;
  };
  struct Done {
    int deadline = 0;
    double at = 0;
  };
  struct Queue {
    std::vector<Work> work;  // by deadline, each once
    std::vector<Done> done;
    bool listed = false;  // in busy_
  };
  void drain(Queue& queue, double now, double duration, double rate) const;

  std::vector<Queue> queues_;  // [link]
  std::vector<LinkId> busy_;   // those that may have work
  bool keeps_times_ = false;
};

template <class Rate>
void TransferQueues::pass(double now, double duration, const Rate& rate) {
  for (const LinkId link : busy_) drain(queues_[link.index()], now, duration, rate(link));
  std::erase_if(busy_, [this](LinkId link) {
    Queue& queue = queues_[link.index()];
    queue.listed = !queue.work.empty();
    return !queue.listed;
  });
}

}  // namespace foremoe
