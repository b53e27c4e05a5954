#pragma once

// Ordered asynchronous work of a device, as little as transfer and runtime must know of it. A CPU's stream has done
// its work when the call returns; a CUDA stream has not.

#include <cstdint>

namespace foremoe {

class Stream;

// A point in a stream: everything enqueued before it. A default event has always happened. Valid while the stream is.
struct Event {
  Stream* stream = nullptr;
  std::uint64_t number = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual Event record() = 0;
  virtual void wait(const Event& event) = 0;        // later work of this stream begins after the event
  virtual bool done(const Event& event) const = 0;  // of this stream
  virtual void synchronize() = 0;                   // the caller waits for everything enqueued
};

// Has it happened? Never waits.
inline bool happened(const Event& event) { return event.stream == nullptr || event.stream->done(event); }

}  // namespace foremoe
