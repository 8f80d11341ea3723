// AVX2 with F16C: 32 elements a step.
#include "codec.hpp"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

namespace {
using namespace kvferry;
#include "scalar.hpp"

// bf16 elements are widened as even and odd lanes apart, as in isa_avx512.cpp.
struct V {
  static constexpr int U = 32;
  static constexpr int kTableBits = 4;
  static constexpr bool kStreams = true, kRangeInKeys = false;
  struct Floats {
    __m256 v[4];
  };
  struct Table {
    __m256i low, high;  // the bytes of sixteen words, in both halves
  };
  using Codes = __m256i;
  using One = __m256;

  // Only levels of 64 lanes keep codes in registers: declared for the branches that are discarded.
  template <int BITS>
  static void pack_one(Codes codes, uint8_t* out);
  template <int BITS>
  static Codes unpack_block(const uint8_t* in, int64_t n, int64_t c);

  static bool in_blocks(int64_t) { return false; }

  static One one(float value) { return _mm256_set1_ps(value); }

  static Floats floats(const float* p) {
    return {{_mm256_load_ps(p), _mm256_load_ps(p + 8), _mm256_load_ps(p + 16), _mm256_load_ps(p + 24)}};
  }

  static __m256i loadu(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static __m128i loadu128(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

  template <Dtype D>
  static Floats load(const uint8_t* p) {
    Floats f;
    if constexpr (D == Dtype::bf16) {
      const __m256i odd = _mm256_set1_epi32(int(0xFFFF0000));
      for (int k = 0; k < 2; ++k) {
        const __m256i words = loadu(p + 32 * k);
        f.v[2 * k] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
        f.v[2 * k + 1] = _mm256_castsi256_ps(_mm256_and_si256(words, odd));
      }
    } else {
      for (int k = 0; k < 4; ++k)
        if constexpr (D == Dtype::fp16)
          f.v[k] = _mm256_cvtph_ps(loadu128(p + 16 * k));
        else
          f.v[k] = _mm256_castsi256_ps(loadu(p + 32 * k));
    }
    return f;
  }

  template <Dtype D>
  static Floats load_part(const uint8_t* p, int n) {
    alignas(32) uint8_t block[U * 4] = {};
    __builtin_memcpy(block, p, size_t(n * kItem<D>));
    return load<D>(block);
  }

  static Floats times(Floats f, One factor) {
    for (auto& v : f.v) v = _mm256_mul_ps(v, factor);
    return f;
  }

  static Floats minus_times(Floats f, One low, One factor) {
    for (auto& v : f.v) v = _mm256_mul_ps(_mm256_sub_ps(v, low), factor);
    return f;
  }

  static Floats minus_times(Floats f, const Floats& low, const Floats& factor) {
    for (int k = 0; k < 4; ++k) f.v[k] = _mm256_mul_ps(_mm256_sub_ps(f.v[k], low.v[k]), factor.v[k]);
    return f;
  }

  template <bool SAFE>
  static Floats centred(Floats f, int half, One scale) {
    return minus_times(f, one(float(half)), scale);
  }

  static Floats times_plus(Floats f, One factor, One low) {
    for (auto& v : f.v) v = _mm256_add_ps(low, _mm256_mul_ps(v, factor));
    return f;
  }

  static Floats times_plus(Floats f, const Floats& factor, const Floats& low) {
    for (int k = 0; k < 4; ++k) f.v[k] = _mm256_add_ps(low.v[k], _mm256_mul_ps(f.v[k], factor.v[k]));
    return f;
  }

  static Floats cap(Floats f, One levels) {
    for (auto& v : f.v) v = _mm256_min_ps(levels, v);  // a NaN in the second operand stays
    return f;
  }

  // See isa_avx512.cpp: NaN, only met in a marked channel, becomes code 0 either way.
  template <Dtype D, bool SYM>
  static Codes round(const Floats& f, int half) {
    if constexpr (D == Dtype::bf16) {
      const __m256 magic = _mm256_set1_ps(12582912.0f + float(half));
      __m256i words[2];
      for (int k = 0; k < 2; ++k) {
        const __m256i even = _mm256_castps_si256(_mm256_add_ps(f.v[2 * k], magic));
        const __m256i odd = _mm256_castps_si256(_mm256_add_ps(f.v[2 * k + 1], magic));
        words[k] = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
      }
      return _mm256_permute4x64_epi64(_mm256_packus_epi16(words[0], words[1]), 0xD8);
    }
    const __m256i a = _mm256_packs_epi32(_mm256_cvtps_epi32(f.v[0]), _mm256_cvtps_epi32(f.v[1]));
    const __m256i b = _mm256_packs_epi32(_mm256_cvtps_epi32(f.v[2]), _mm256_cvtps_epi32(f.v[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    if constexpr (SYM)
      return _mm256_add_epi8(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order),
                             _mm256_set1_epi8(char(half)));
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order);
  }

  static void store(uint8_t* p, Codes codes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes); }

  static uint32_t top16(__m256i v) {
    const __m128i b = _mm_max_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return 0xFFFFu ^ unsigned(_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(b, _mm_set1_epi16(-1)))) & 0xFFFF);
  }

  static int32_t top32(__m256i v) {
    __m128i a = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(a, _mm_shuffle_epi32(a, 0xB1)));
  }

  template <Dtype D>
  static uint32_t amax(const uint8_t* p, int64_t n) {
    constexpr int step = 32 / int(kItem<D>);
    const __m256i magnitude = D == Dtype::fp32 ? _mm256_set1_epi32(0x7FFFFFFF) : _mm256_set1_epi16(0x7FFF);
    __m256i top = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + step <= n; i += step) {
      const __m256i v = _mm256_and_si256(magnitude, loadu(p + i * kItem<D>));
      top = D == Dtype::fp32 ? _mm256_max_epi32(top, v) : _mm256_max_epu16(top, v);
    }
    uint32_t most_bits = D == Dtype::fp32 ? uint32_t(top32(top)) : top16(top);
    for (; i < n; ++i)
      most_bits = most<uint32_t>(most_bits, read<typename Traits<D>::Bits>(p + i * kItem<D>) &
                                                (D == Dtype::fp32 ? 0x7FFFFFFFu : 0x7FFFu));
    return most_bits;
  }

  template <Dtype D>
  static __m256i keys(__m256i v) {
    if constexpr (D == Dtype::fp32) return _mm256_xor_si256(v, _mm256_srli_epi32(_mm256_srai_epi32(v, 31), 1));
    return _mm256_xor_si256(v, _mm256_or_si256(_mm256_srai_epi16(v, 15), _mm256_set1_epi16(short(0x8000))));
  }

  template <Dtype D>
  static void minmax(const uint8_t* p, int64_t n, int32_t* low, int32_t* high) {
    constexpr int step = 32 / int(kItem<D>);
    int32_t lo = order_key<D>(read<typename Traits<D>::Bits>(p)), hi = lo;
    int64_t i = 0;
    if (n >= step) {
      __m256i least_key = keys<D>(loadu(p)), most_key = least_key;
      for (i = step; i + step <= n; i += step) {
        const __m256i key = keys<D>(loadu(p + i * kItem<D>));
        least_key = D == Dtype::fp32 ? _mm256_min_epi32(least_key, key) : _mm256_min_epu16(least_key, key);
        most_key = D == Dtype::fp32 ? _mm256_max_epi32(most_key, key) : _mm256_max_epu16(most_key, key);
      }
      const __m256i flipped = _mm256_xor_si256(least_key, _mm256_set1_epi32(-1));
      if constexpr (D == Dtype::fp32) {
        lo = ~top32(flipped);
        hi = top32(most_key);
      } else {
        lo = int32_t(0xFFFFu ^ top16(flipped)) - 0x8000;
        hi = int32_t(top16(most_key)) - 0x8000;
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
    for (int i = 0; i < 16; ++i) out[i] = int32_t(amax<D>(units[i], size));
  }

  template <Dtype D>
  static void minmax_batch(uint8_t* const* units, int64_t size, int32_t* low, int32_t* high) {
    for (int i = 0; i < 16; ++i) minmax<D>(units[i], size, low + i, high + i);
  }

  // Extremes by channel over n rows: signed maximum, unsigned maximum, unsigned minimum of the patterns.
  template <Dtype D>
  static void range(uint8_t* const* rows, int n, int64_t c, int width, typename Traits<D>::Bits* highest,
                    typename Traits<D>::Bits* largest, typename Traits<D>::Bits* smallest, bool start) {
    using Bits = typename Traits<D>::Bits;
    constexpr int step = 32 / int(kItem<D>);
    constexpr Bits sign = Bits(Bits(1) << (8 * sizeof(Bits) - 1));
    int k = 0;
    for (; k + step <= width; k += step) {
      const auto at = [&](const Bits* p) { return loadu(reinterpret_cast<const uint8_t*>(p + k)); };
      __m256i high = loadu(rows[0] + (c + k) * kItem<D>), large = high, small = high;
      if (!start) high = at(highest), large = at(largest), small = at(smallest);
      for (int i = 0; i < n; ++i) {
        const __m256i bits = loadu(rows[i] + (c + k) * kItem<D>);
        if constexpr (D == Dtype::fp32) {
          high = _mm256_max_epi32(high, bits);
          large = _mm256_max_epu32(large, bits);
          small = _mm256_min_epu32(small, bits);
        } else {
          high = _mm256_max_epi16(high, bits);
          large = _mm256_max_epu16(large, bits);
          small = _mm256_min_epu16(small, bits);
        }
      }
      store(reinterpret_cast<uint8_t*>(highest + k), high);
      store(reinterpret_cast<uint8_t*>(largest + k), large);
      store(reinterpret_cast<uint8_t*>(smallest + k), small);
    }
    for (; k < width; ++k) {
      const Bits bits = read<Bits>(rows[0] + (c + k) * kItem<D>);
      Bits high = start ? bits : highest[k], large = start ? bits : largest[k], small = start ? bits : smallest[k];
      for (int i = 0; i < n; ++i) {
        const Bits next = read<Bits>(rows[i] + (c + k) * kItem<D>);
        high = Bits(next ^ sign) > Bits(high ^ sign) ? next : high;
        large = most(large, next);
        small = least(small, next);
      }
      highest[k] = high;
      largest[k] = large;
      smallest[k] = small;
    }
  }

  template <Dtype D>
  static void lanes_in(const float* in, float* out) {
    for (int k = 0; k < U; k += 16)
      for (int i = 0; i < 8; ++i) {
        out[k + i] = in[k + (D == Dtype::bf16 ? 2 * i : i)];
        out[k + 8 + i] = in[k + (D == Dtype::bf16 ? 2 * i + 1 : 8 + i)];
      }
  }

  template <Dtype D>
  static void lanes_out(const float* in, float* out) {
    lanes_in<D>(in, out);
  }

  static Codes load_codes(const uint8_t* p) { return loadu(p); }

  template <Dtype D>
  static Floats widen(Codes codes) {
    const __m128i halves[2] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
    Floats f;
    if constexpr (D == Dtype::bf16) {
      for (int k = 0; k < 2; ++k) {
        const __m256i words = _mm256_cvtepu8_epi16(halves[k]);
        f.v[2 * k] = _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(0xFFFF)));
        f.v[2 * k + 1] = _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 16));
      }
    } else {
      for (int k = 0; k < 4; ++k) {
        const __m128i half = halves[k / 2];
        f.v[k] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(k % 2 ? _mm_unpackhi_epi64(half, half) : half));
      }
    }
    return f;
  }

  // Round to nearest even in the upper half of each lane; NaN stays NaN, canonical if it was.
  static __m256i round_bf16(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7FFF)));
  }

  static void stream_row(uint8_t* to, const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), loadu(from + i));
  }

  template <Dtype D, bool SAFE>
  static void put(uint8_t* p, Floats f) {
    if constexpr (SAFE) {
      const __m256 limit = one(Traits<D>::limit), least = one(-Traits<D>::limit);
      for (auto& v : f.v) v = _mm256_max_ps(least, _mm256_min_ps(limit, v));  // a NaN in the second operand stays
    }
    if constexpr (D == Dtype::fp32) {
      for (int k = 0; k < 4; ++k) store(p + 32 * k, _mm256_castps_si256(f.v[k]));
    } else {
      for (int k = 0; k < 2; ++k) {
        const __m256 a = f.v[2 * k], b = f.v[2 * k + 1];
        if constexpr (D == Dtype::bf16)
          store(p + 32 * k,
                             _mm256_blend_epi16(_mm256_srli_epi32(round_bf16(a), 16), round_bf16(b), 0xAA));
        else
          store(p + 32 * k, _mm256_set_m128i(_mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT),
                                                          _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)));
      }
    }
  }

  template <Dtype D>
  static void put_part(uint8_t* p, int n, const Floats& f) {
    alignas(32) uint8_t block[U * 4];
    put<D, true>(block, f);
    __builtin_memcpy(p, block, size_t(n * kItem<D>));
  }

  template <Dtype D, int BITS, bool SYM, bool SAFE>
  static Table make_table(float low, float scale) {
    alignas(32) uint8_t words[U * 2];
    Floats f = widen<D>(_mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                         0, 0, 0, 0, 0, 0, 0));
    f = SYM ? minus_times(f, one(float(1 << (BITS - 1))), one(scale)) : times_plus(f, one(scale), one(low));
    put<D, SAFE>(words, f);
    const __m256i apart = _mm256_shuffle_epi8(
        loadu(words), _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14,
                                       1, 3, 5, 7, 9, 11, 13, 15));
    return {_mm256_permute4x64_epi64(apart, 0x88), _mm256_permute4x64_epi64(apart, 0xDD)};
  }

  static void look_up(const Table& table, Codes codes, uint8_t* p) {
    const __m256i c = _mm256_permute4x64_epi64(codes, 0xD8);
    const __m256i low = _mm256_shuffle_epi8(table.low, c), high = _mm256_shuffle_epi8(table.high, c);
    store(p, _mm256_unpacklo_epi8(low, high));
    store(p + 32, _mm256_unpackhi_epi8(low, high));
  }

#include "avx2_codes.hpp"
};

#include "kernels.hpp"

const Kernels kTable = {"avx2", scratch_bytes, encode, decode, means, squares, finite, choose_tiers, count_tiers};
}  // namespace

namespace kvferry {
const Kernels* kernels_avx2() { return &kTable; }
}  // namespace kvferry
#else
namespace kvferry {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace kvferry
#endif
