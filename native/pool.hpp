// A few worker threads that sleep between calls. They touch no OpenMP runtime, so they live beside torch's, and a
// process that forks starts over with none.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace kvferry {

// Hands out 0, 1, 2… to whoever asks next.
class TaskQueue {
 public:
  int64_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> next_{0};
};

// Runs `work` on the calling thread and up to threads - 1 helpers, and returns when all are done. Exceptions of the
// caller's share are rethrown after that; helpers must not throw anything but std::bad_alloc, which ends their share.
void parallel(int64_t tasks, int threads, const std::function<void(TaskQueue&)>& work);

}  // namespace kvferry
