// Which CPU levels this machine can run. Compiled without any extra instruction set.
#include "codec.hpp"

namespace kvferry {
namespace {

struct Usable {
  const Kernels* list[5];
  int count = 0;

  Usable() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx2");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) add(kernels_avx512bf16());
    if (avx512) add(kernels_avx512());
    // F16C has no name of its own in older compilers; every CPU with AVX2 has it, hypervisors that hide it do not count.
    if (__builtin_cpu_supports("avx2") && has_f16c()) add(kernels_avx2());
#endif
    add(kernels_portable());
  }

  void add(const Kernels* kernels) {
    if (kernels != nullptr) list[count++] = kernels;
  }

#if defined(__x86_64__)
  static bool has_f16c() {
    unsigned a = 1, b, c = 0, d;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (c >> 29 & 1) != 0;
  }
#endif
};

}  // namespace

const Kernels* const* usable_kernels(int* count) {
  static const Usable usable;
  *count = usable.count;
  return usable.list;
}

}  // namespace kvferry
