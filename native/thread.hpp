// What every thread that runs kernels needs: exact arithmetic, and working memory.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace kvferry {

// Subnormals kept, round to nearest even: whatever mode the calling thread is in (torch.set_flush_denormal).
class ExactArithmetic {
 public:
#if defined(__x86_64__) || defined(__i386__)
  ExactArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~ExactArithmetic() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  ExactArithmetic() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
  }
  ~ExactArithmetic() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// Working memory of one thread, kept from call to call.
inline uint8_t* thread_scratch(size_t bytes) {
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<uint8_t, Free> block;
  thread_local size_t held = 0;
  if (held < bytes) {
    block.reset();
    held = 0;
    const size_t rounded = (bytes + 63) / 64 * 64;
    block.reset(static_cast<uint8_t*>(std::aligned_alloc(64, rounded)));
    if (block == nullptr) throw std::bad_alloc();
    std::memset(block.get(), 0, rounded);
    held = rounded;
  }
  return block.get();
}

}  // namespace kvferry
