#pragma once

// Copies within CPU memory: of the host path, of peers in this process, and of peers whose memory is mapped here. The
// copy is made by submit() itself, on the caller's thread, unless the buffer's last reader is still at work: then by
// the first call that finds it done. A chunk whose checksum is asked for is copied and summed in one pass.

#include <vector>

#include "foremoe/transfer/copy_link.h"

namespace foremoe {

class MemcpyLink final : public CopyLink {
 public:
  void submit(const CopyRequest& request) override;
  CopyState poll(CopyId id) override;
  void cancel(CopyId id) override;
  void progress() override;

 private:
  struct Copy {
    CopyRequest request;
    bool done = false;
  };
  std::vector<Copy> copies_;  // submitted, neither cancelled nor told of
};

}  // namespace foremoe
