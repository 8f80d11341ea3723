// The level that runs anywhere, in the compilers' own vector types of sixteen bytes: SSE2 registers on x86-64, NEON
// registers on AArch64 (where the level goes by that name), plain loops elsewhere.
#include "codec.hpp"

namespace {
using namespace kvferry;
#include "scalar.hpp"

// Sixteen elements a step; bf16 elements are widened as even and odd lanes apart, as in isa_avx512.cpp.
struct V {
  static constexpr int U = 16;
  static constexpr int kTableBits = 0;
  static constexpr bool kStreams = false, kRangeInKeys = true;

  using F4 = float __attribute__((vector_size(16)));
  using U4 = uint32_t __attribute__((vector_size(16)));
  using I4 = int32_t __attribute__((vector_size(16)));
  using S8 = int16_t __attribute__((vector_size(16)));
  using H8 = uint16_t __attribute__((vector_size(16)));
  using H4 = uint16_t __attribute__((vector_size(8)));
  using B8 = uint8_t __attribute__((vector_size(8)));
  using B4 = uint8_t __attribute__((vector_size(4)));
  struct Floats {
    F4 v[4];
  };
  struct Codes {
    uint8_t v[U];
  };
  using One = float;

  // Only levels of 64 lanes keep codes in registers, and only some look values up: declared for discarded branches.
  struct Table {};
  template <int BITS>
  static void pack_one(Codes codes, uint8_t* out);
  template <int BITS>
  static Codes unpack_block(const uint8_t* in, int64_t n, int64_t c);
  template <Dtype D, int BITS, bool SYM, bool SAFE>
  static Table make_table(float low, float scale);
  static void look_up(Table table, Codes codes, uint8_t* p);

  static bool in_blocks(int64_t) { return false; }

  template <class T>
  static T take(const void* p) {
    T v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }

  template <class T>
  static void give(void* p, T v) {
    __builtin_memcpy(p, &v, sizeof v);
  }

  // a where the mask is set, else b.
  template <class M, class T>
  static T select(M mask, T a, T b) {
    return (T)(((U4)mask & (U4)a) | (~(U4)mask & (U4)b));
  }

  static One one(float value) { return value; }

  static Floats floats(const float* p) {
    return {{take<F4>(p), take<F4>(p + 4), take<F4>(p + 8), take<F4>(p + 12)}};
  }

  template <Dtype D>
  static Floats load(const uint8_t* p) {
    Floats f;
    for (int k = 0; k < 4; ++k) {
      if constexpr (D == Dtype::fp32) {
        f.v[k] = take<F4>(p + 16 * k);
      } else if constexpr (D == Dtype::bf16) {
        const U4 pairs = take<U4>(p + 16 * (k / 2));
        f.v[k] = (F4)(k % 2 ? pairs & 0xFFFF0000 : pairs << 16);
      } else {
        const U4 wide = __builtin_convertvector(take<H4>(p + 8 * k), U4);
        f.v[k] = (F4)((U4)((F4)((wide & 0x7FFF) << 13) * kTwoTo112) | (wide & 0x8000) << 16);
      }
    }
    return f;
  }

  template <Dtype D>
  static Floats load_part(const uint8_t* p, int n) {
    uint8_t block[U * 4] = {};
    __builtin_memcpy(block, p, size_t(n * kItem<D>));
    return load<D>(block);
  }

  static Floats times(Floats f, One factor) {
    for (auto& v : f.v) v = v * factor;
    return f;
  }

  static Floats minus_times(Floats f, One low, One factor) {
    for (auto& v : f.v) v = (v - low) * factor;
    return f;
  }

  static Floats minus_times(Floats f, const Floats& low, const Floats& factor) {
    for (int k = 0; k < 4; ++k) f.v[k] = (f.v[k] - low.v[k]) * factor.v[k];
    return f;
  }

  template <bool SAFE>
  static Floats centred(Floats f, int half, One scale) {
    return minus_times(f, one(float(half)), scale);
  }

  static Floats times_plus(Floats f, One factor, One low) {
    for (auto& v : f.v) v = low + v * factor;
    return f;
  }

  static Floats times_plus(Floats f, const Floats& factor, const Floats& low) {
    for (int k = 0; k < 4; ++k) f.v[k] = low.v[k] + f.v[k] * factor.v[k];
    return f;
  }

  static Floats cap(Floats f, One levels) {  // a NaN stays
    for (auto& v : f.v) v = select(v > levels, F4{} + levels, v);
    return f;
  }

  // The low bits of v + 1.5 * 2^23 + half are the code. NaN, only met in a marked channel, becomes code 0: bf16 has nothing
  // in the low bits of one, fp16 makes none, fp32 is masked.
  template <Dtype D, bool SYM>
  static Codes round(const Floats& f, int half) {
    const float magic = 12582912.0f + float(half);
    Codes codes;
    if constexpr (D == Dtype::bf16) {
      for (int k = 0; k < 2; ++k) {
        const U4 words = ((U4)(f.v[2 * k] + magic) & 0xFF) | (U4)(f.v[2 * k + 1] + magic) << 16;
        give(codes.v + 8 * k, __builtin_convertvector((H8)words, B8));
      }
    } else {
      for (int k = 0; k < 4; ++k) {
        U4 bits = (U4)(f.v[k] + magic);
        if constexpr (D == Dtype::fp32 && !SYM) bits &= (U4)(f.v[k] == f.v[k]);
        give(codes.v + 4 * k, __builtin_convertvector(bits, B4));
      }
    }
    return codes;
  }

  static void store(uint8_t* p, const Codes& codes) { give(p, codes); }
  static Codes load_codes(const uint8_t* p) { return take<Codes>(p); }

  // Extremes over integers of the patterns' width, signed.
  template <Dtype D>
  struct Lanes;

  template <class T>
  static T larger(T a, T b) {
    return select(a > b, a, b);
  }

  template <class T>
  static T smaller(T a, T b) {
    return select(a < b, a, b);
  }

  template <Dtype D>
  static uint32_t amax(const uint8_t* p, int64_t n) {
    using T = typename Lanes<D>::Vector;
    constexpr int step = Lanes<D>::count;
    constexpr uint32_t magnitude = D == Dtype::fp32 ? 0x7FFFFFFF : 0x7FFF;
    T top = {};
    int64_t i = 0;
    for (; i + step <= n; i += step) top = larger(top, T(take<T>(p + i * kItem<D>) & Lanes<D>::magnitude));
    uint32_t best = 0;
    for (int k = 0; k < step; ++k) best = most(best, uint32_t(top[k]));
    for (; i < n; ++i) best = most<uint32_t>(best, read<typename Traits<D>::Bits>(p + i * kItem<D>) & magnitude);
    return best;
  }

  template <Dtype D>
  static typename Lanes<D>::Vector keys(const uint8_t* p) {
    using T = typename Lanes<D>::Vector;
    const T v = take<T>(p);
    return v ^ (T)((v >> Lanes<D>::last_bit) & Lanes<D>::magnitude);
  }

  template <Dtype D>
  static void minmax(const uint8_t* p, int64_t n, int32_t* low, int32_t* high) {
    constexpr int step = Lanes<D>::count;
    int32_t lo = order_key<D>(read<typename Traits<D>::Bits>(p)), hi = lo;
    int64_t i = 0;
    if (n >= step) {
      auto least_key = keys<D>(p), most_key = least_key;
      for (i = step; i + step <= n; i += step) {
        const auto key = keys<D>(p + i * kItem<D>);
        least_key = smaller(least_key, key);
        most_key = larger(most_key, key);
      }
      for (int k = 0; k < step; ++k) {
        lo = least<int32_t>(lo, least_key[k]);
        hi = most<int32_t>(hi, most_key[k]);
      }
    }
    for (; i < n; ++i) {
      const int32_t key = order_key<D>(read<typename Traits<D>::Bits>(p + i * kItem<D>));
      lo = least(lo, key);
      hi = most(hi, key);
    }
    *low = lo;
    *high = hi;
  }

  template <Dtype D>
  static void amax_batch(uint8_t* const* units, int64_t size, int32_t* out) {
    for (int i = 0; i < kLanes; ++i) out[i] = int32_t(amax<D>(units[i], size));
  }

  template <Dtype D>
  static void minmax_batch(uint8_t* const* units, int64_t size, int32_t* low, int32_t* high) {
    for (int i = 0; i < kLanes; ++i) minmax<D>(units[i], size, low + i, high + i);
  }

  // Extremes by channel over n rows, as order keys.
  template <Dtype D>
  static void range(uint8_t* const* rows, int n, int64_t c, int width, typename Traits<D>::Bits* highest,
                    typename Traits<D>::Bits* lowest, typename Traits<D>::Bits*, bool start) {
    using T = typename Lanes<D>::Vector;
    constexpr int step = Lanes<D>::count;
    uint8_t block[16] = {};
    for (int k = 0; k < width; k += step) {
      const int bytes = int(least(step, width - k) * kItem<D>);
      const auto at = [&](const uint8_t* row) {
        const uint8_t* from = row + (c + k) * kItem<D>;
        if (bytes == 16) return keys<D>(from);
        __builtin_memcpy(block, from, size_t(bytes));
        return keys<D>(block);
      };
      T low = start ? at(rows[0]) : take<T>(lowest + k), high = start ? low : take<T>(highest + k);
      for (int i = 0; i < n; ++i) {
        const T key = at(rows[i]);
        low = smaller(low, key);
        high = larger(high, key);
      }
      give(lowest + k, low);
      give(highest + k, high);
    }
  }

  template <Dtype D>
  static void lanes_in(const float* in, float* out) {
    for (int i = 0; i < U; ++i) out[i] = in[D == Dtype::bf16 ? i / 8 * 8 + i % 4 * 2 + i / 4 % 2 : i];
  }

  template <Dtype D>
  static void lanes_out(const float* in, float* out) {
    lanes_in<D>(in, out);
  }

  template <Dtype D>
  static Floats widen(const Codes& codes) {
    Floats f;
    if constexpr (D == Dtype::bf16) {
      for (int k = 0; k < 2; ++k) {
        const U4 pairs = (U4)__builtin_convertvector(take<B8>(codes.v + 8 * k), H8);
        f.v[2 * k] = __builtin_convertvector((I4)(pairs & 0xFFFF), F4);
        f.v[2 * k + 1] = __builtin_convertvector((I4)(pairs >> 16), F4);
      }
    } else {
      for (int k = 0; k < 4; ++k)
        f.v[k] = __builtin_convertvector(__builtin_convertvector(take<B4>(codes.v + 4 * k), I4), F4);
    }
    return f;
  }

  static U4 round_bf16(F4 v) {
    const U4 bits = (U4)v;
    return bits + 0x7FFF + (bits >> 16 & 1);
  }

  static U4 round_fp16(F4 v) {  // see pattern_of
    const U4 bits = (U4)v, magnitude = bits & 0x7FFFFFFF;
    const U4 small = (U4)((F4)magnitude + 0.5f) - 0x3F000000;
    const U4 normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    const U4 half = select((I4)magnitude < (112 + 1) << 23, small, normal);
    return (bits >> 16 & 0x8000) | select((I4)magnitude > 0x7F800000, U4{} + Traits<Dtype::fp16>::nan, half);
  }

  template <Dtype D, bool SAFE>
  static void put(uint8_t* p, Floats f) {
    if constexpr (SAFE) {
      const F4 limit = F4{} + Traits<D>::limit;
      for (auto& v : f.v) v = select(v > limit, limit, select(v < -limit, -limit, v));
    }
    if constexpr (D == Dtype::fp32)
      for (int k = 0; k < 4; ++k) give(p + 16 * k, f.v[k]);
    if constexpr (D == Dtype::bf16)
      for (int k = 0; k < 2; ++k)
        give(p + 16 * k, (round_bf16(f.v[2 * k]) >> 16) | (round_bf16(f.v[2 * k + 1]) & 0xFFFF0000));
    if constexpr (D == Dtype::fp16)
      for (int k = 0; k < 4; ++k) give(p + 8 * k, __builtin_convertvector(round_fp16(f.v[k]), H4));
  }

  template <Dtype D>
  static void put_part(uint8_t* p, int n, const Floats& f) {
    uint8_t block[U * 4];
    put<D, true>(block, f);
    __builtin_memcpy(p, block, size_t(n * kItem<D>));
  }

  static void stream_row(uint8_t* to, const uint8_t* from, int64_t bytes) {
    __builtin_memcpy(to, from, size_t(bytes));
  }

  template <int BITS>
  static void pack(const uint8_t* codes, uint8_t* out, int64_t n) {
    pack_scalar<BITS>(codes, out, n);
  }

  template <int BITS>
  static void unpack(const uint8_t* in, uint8_t* codes, int64_t n) {
    unpack_scalar<BITS>(in, codes, n);
  }
};

template <>
struct V::Lanes<Dtype::fp32> {
  using Vector = V::I4;
  static constexpr int count = 4, last_bit = 31, magnitude = 0x7FFFFFFF;
};
template <>
struct V::Lanes<Dtype::bf16> {
  using Vector = V::S8;
  static constexpr int count = 8, last_bit = 15;
  static constexpr int16_t magnitude = 0x7FFF;
};
template <>
struct V::Lanes<Dtype::fp16> : V::Lanes<Dtype::bf16> {};

#include "kernels.hpp"

#if defined(__aarch64__)
const Kernels kTable = {"neon", scratch_bytes, encode, decode, means, squares, finite, choose_tiers, count_tiers};
#else
const Kernels kTable = {"portable", scratch_bytes, encode, decode, means, squares, finite, choose_tiers, count_tiers};
#endif
}  // namespace

namespace kvferry {
const Kernels* kernels_portable() { return &kTable; }
}  // namespace kvferry
