#include "pool.hpp"

#include <pthread.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace kvferry {
namespace {

constexpr int kMostHelpers = 63;

class Pool {
 public:
  // One job at a time: a second caller finds the pool busy and works alone.
  std::mutex turn;

  // The caller holds `turn`.
  void run(int helpers, TaskQueue& queue, const std::function<void(TaskQueue&)>& work) {
    helpers = grow(helpers);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      queue_ = &queue;
      wanted_ = helpers;
      running_ = 0;
    }
    wake_.notify_all();
    std::exception_ptr error;
    try {
      work(queue);
    } catch (...) {
      error = std::current_exception();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;  // who has not started by now need not
    done_.wait(lock, [this] { return running_ == 0; });
    lock.unlock();
    if (error) std::rethrow_exception(error);
  }

 private:
  int grow(int helpers) {
    helpers = helpers > kMostHelpers ? kMostHelpers : helpers;
    while (started_ < helpers) {
      try {
        std::thread(&Pool::serve, this).detach();
      } catch (const std::system_error&) {
        break;  // no more threads to be had: fewer helpers, same result
      }
      ++started_;
    }
    return helpers < started_ ? helpers : started_;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_;
      ++running_;
      const auto& work = *work_;
      TaskQueue& queue = *queue_;
      lock.unlock();
      try {
        work(queue);
      } catch (const std::bad_alloc&) {
        // No scratch memory for this helper. The queue is shared, so the caller does what is left.
      }
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(TaskQueue&)>* work_ = nullptr;
  TaskQueue* queue_ = nullptr;
  int wanted_ = 0, running_ = 0, started_ = 0;
};

// Never destroyed: detached helpers may still sleep in it while the process exits, and after a fork the child's copy
// is unusable (its threads did not come along, its locks may be held), so the child makes a new one.
std::atomic<Pool*> the_pool{nullptr};

void forget_pool() { the_pool.store(nullptr); }

Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  (void)registered;
  Pool* current = the_pool.load();
  if (current == nullptr) {
    Pool* fresh = new Pool;
    if (the_pool.compare_exchange_strong(current, fresh))
      current = fresh;
    else
      delete fresh;
  }
  return *current;
}

}  // namespace

void parallel(int64_t tasks, int threads, const std::function<void(TaskQueue&)>& work) {
  TaskQueue queue;
  if (threads > tasks) threads = int(tasks);
  if (threads > 1) {
    Pool& shared = pool();
    std::unique_lock<std::mutex> turn(shared.turn, std::try_to_lock);
    if (turn.owns_lock()) return shared.run(threads - 1, queue, work);
  }
  work(queue);
}

}  // namespace kvferry
