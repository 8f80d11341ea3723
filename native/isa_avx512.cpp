// AVX-512 (F, BW, VL, DQ): 64 elements a step, the row width of most caches. isa_avx512bf16.cpp compiles this file again
// with hardware rounding to bfloat16.
#include "codec.hpp"

#ifndef KVFERRY_LEVEL
#define KVFERRY_LEVEL avx512
#define KVFERRY_KERNELS kernels_avx512
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    (!defined(KVFERRY_BF16) || defined(__AVX512BF16__))
#include <immintrin.h>

namespace {
using namespace kvferry;
#include "scalar.hpp"

// bf16 elements are widened as even and odd lanes apart (a shift and a mask, no shuffle). Per-channel parameters are
// brought into the same order by lanes_in and lanes_out.
struct V {
  static constexpr int U = 64;
  static constexpr int kTableBits = 5;
  static constexpr bool kStreams = true, kRangeInKeys = false;
#ifdef KVFERRY_BF16
  static constexpr bool kHardwareBf16 = true;
#else
  static constexpr bool kHardwareBf16 = false;
#endif
  struct Floats {
    __m512 v[4];
  };
  using Codes = __m512i;
  using Table = __m512i;
  using One = __m512;

  static One one(float value) { return _mm512_set1_ps(value); }

  static Floats floats(const float* p) {
    return {{_mm512_load_ps(p), _mm512_load_ps(p + 16), _mm512_load_ps(p + 32), _mm512_load_ps(p + 48)}};
  }

  static __mmask64 below(int64_t n) { return n >= 64 ? ~__mmask64(0) : (__mmask64(1) << n) - 1; }

  static Floats split(__m512i a, __m512i b) {
    const __m512i odd = _mm512_set1_epi32(int(0xFFFF0000));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_and_si512(a, odd)),
             _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), _mm512_castsi512_ps(_mm512_and_si512(b, odd))}};
  }

  template <Dtype D>
  static Floats load(const uint8_t* p) {
    if constexpr (D == Dtype::bf16) return split(_mm512_loadu_si512(p), _mm512_loadu_si512(p + 64));
    Floats f;
    for (int k = 0; k < 4; ++k)
      if constexpr (D == Dtype::fp16)
        f.v[k] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * k)));
      else
        f.v[k] = _mm512_loadu_ps(p + 64 * k);
    return f;
  }

  template <Dtype D>
  static Floats load_part(const uint8_t* p, int n) {
    const __mmask64 mask = below(n);
    if constexpr (D == Dtype::bf16)
      return split(_mm512_maskz_loadu_epi16(__mmask32(mask), p), _mm512_maskz_loadu_epi16(__mmask32(mask >> 32), p + 64));
    Floats f;
    for (int k = 0; k < 4; ++k) {
      const __mmask16 lanes = __mmask16(mask >> (16 * k));
      if constexpr (D == Dtype::fp16)
        f.v[k] = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, p + 32 * k));
      else
        f.v[k] = _mm512_maskz_loadu_ps(lanes, p + 64 * k);
    }
    return f;
  }

  static Floats times(Floats f, One factor) {
    for (auto& v : f.v) v = _mm512_mul_ps(v, factor);
    return f;
  }

  static Floats minus_times(Floats f, One low, One factor) {
    for (auto& v : f.v) v = _mm512_mul_ps(_mm512_sub_ps(v, low), factor);
    return f;
  }

  static Floats minus_times(Floats f, const Floats& low, const Floats& factor) {
    for (int k = 0; k < 4; ++k) f.v[k] = _mm512_mul_ps(_mm512_sub_ps(f.v[k], low.v[k]), factor.v[k]);
    return f;
  }

  // Codes of a symmetric section as values. What is subtracted is exact, so the fused product is rounded as the plain one.
  template <bool SAFE>
  static Floats centred(Floats f, int half, One scale) {
    if constexpr (SAFE) return minus_times(f, one(float(half)), scale);
    const One offset = _mm512_mul_ps(one(-float(half)), scale);
    for (auto& v : f.v) v = _mm512_fmadd_ps(v, scale, offset);
    return f;
  }

  static Floats times_plus(Floats f, One factor, One low) {
    for (auto& v : f.v) v = _mm512_add_ps(low, _mm512_mul_ps(v, factor));
    return f;
  }

  static Floats times_plus(Floats f, const Floats& factor, const Floats& low) {
    for (int k = 0; k < 4; ++k) f.v[k] = _mm512_add_ps(low.v[k], _mm512_mul_ps(f.v[k], factor.v[k]));
    return f;
  }

  static Floats cap(Floats f, One levels) {
    for (auto& v : f.v) v = _mm512_min_ps(levels, v);  // a NaN in the second operand stays
    return f;
  }

  // bf16: v + 1.5 * 2^23 + half holds the code in its low bits; a NaN's low half is zero, code 0, as it should be.
  // Else by conversion, whose NaN result saturates to code 0.
  template <Dtype D, bool SYM>
  static Codes round(const Floats& f, int half) {
    if constexpr (D == Dtype::bf16) {
      const __m512 magic = _mm512_set1_ps(12582912.0f + float(half));
      __m512i words[2];
      for (int k = 0; k < 2; ++k) {
        const __m512i even = _mm512_castps_si512(_mm512_add_ps(f.v[2 * k], magic));
        const __m512i odd = _mm512_castps_si512(_mm512_add_ps(f.v[2 * k + 1], magic));
        words[k] = _mm512_mask_mov_epi16(even, 0xAAAAAAAA, _mm512_slli_epi32(odd, 16));
      }
      return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                                      _mm512_packus_epi16(words[0], words[1]));
    }
    const __m512i a = _mm512_packs_epi32(_mm512_cvtps_epi32(f.v[0]), _mm512_cvtps_epi32(f.v[1]));
    const __m512i b = _mm512_packs_epi32(_mm512_cvtps_epi32(f.v[2]), _mm512_cvtps_epi32(f.v[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    if constexpr (SYM)
      return _mm512_add_epi8(_mm512_permutexvar_epi32(order, _mm512_packs_epi16(a, b)), _mm512_set1_epi8(char(half)));
    return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b));
  }

  static void store(uint8_t* p, Codes codes) { _mm512_storeu_si512(p, codes); }

#include "avx512_ranges.hpp"

  static void deinterleave(const float* in, float* out) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int k = 0; k < 64; k += 32) {
      const __m512 a = _mm512_load_ps(in + k), b = _mm512_load_ps(in + k + 16);
      _mm512_store_ps(out + k, _mm512_permutex2var_ps(a, even, b));
      _mm512_store_ps(out + k + 16, _mm512_permutex2var_ps(a, odd, b));
    }
  }

  template <Dtype D>
  static void lanes_in(const float* in, float* out) {
    D == Dtype::bf16 ? deinterleave(in, out) : (void)__builtin_memcpy(out, in, 256);
  }

  template <Dtype D>
  static void lanes_out(const float* in, float* out) {
    D == Dtype::bf16 && !kHardwareBf16 ? deinterleave(in, out) : (void)__builtin_memcpy(out, in, 256);
  }

  static Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }

  template <Dtype D>
  static Floats widen(Codes codes) {
    Floats f;
    if constexpr (D == Dtype::bf16 && !kHardwareBf16) {
      const __m256i halves[2] = {_mm512_castsi512_si256(codes), _mm512_extracti64x4_epi64(codes, 1)};
      for (int k = 0; k < 2; ++k) {
        const __m512i w = _mm512_cvtepu8_epi16(halves[k]);
        f.v[2 * k] = _mm512_cvtepi32_ps(_mm512_and_si512(w, _mm512_set1_epi32(0xFFFF)));
        f.v[2 * k + 1] = _mm512_cvtepi32_ps(_mm512_srli_epi32(w, 16));
      }
      return f;
    }
    f.v[0] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_castsi512_si128(codes)));
    f.v[1] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 1)));
    f.v[2] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 2)));
    f.v[3] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, 3)));
    return f;
  }

  // Round to nearest even in the upper half of each lane; NaN stays NaN, canonical if it was.
  static __m512i round_bf16(__m512 v) {
    const __m512i bits = _mm512_castps_si512(v), up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
    return _mm512_mask_add_epi32(up, _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000)), up, _mm512_set1_epi32(1));
  }

  static void stream_row(uint8_t* to, const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
  }

  template <Dtype D>
  static __m512 clamp(__m512 v) {  // a NaN in the second operand stays
    return _mm512_max_ps(one(-Traits<D>::limit), _mm512_min_ps(one(Traits<D>::limit), v));
  }

  // Sixteen values as 16-bit words, in order. The bfloat16 instruction takes subnormals for zero, so the careful variant
  // does without it.
  template <Dtype D, bool SAFE>
  static __m256i narrow_half(__m512 v) {
    if constexpr (SAFE) v = clamp<D>(v);
    if constexpr (D == Dtype::fp16) return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#ifdef KVFERRY_BF16
    if constexpr (!SAFE) return (__m256i)_mm512_cvtneps_pbh(v);
#endif
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16(v), 16));
  }

  template <Dtype D, bool SAFE>
  static void narrow(const Floats& f, __m512i out[4]) {
    if constexpr (D == Dtype::fp32) {
      for (int k = 0; k < 4; ++k) out[k] = _mm512_castps_si512(SAFE ? clamp<D>(f.v[k]) : f.v[k]);
      return;
    }
    for (int k = 0; k < 2; ++k) {
      const __m512 a = f.v[2 * k], b = f.v[2 * k + 1];
      if constexpr (D == Dtype::bf16 && !kHardwareBf16) {
        out[k] = _mm512_mask_mov_epi16(_mm512_srli_epi32(round_bf16(SAFE ? clamp<D>(a) : a), 16), 0xAAAAAAAA,
                                       round_bf16(SAFE ? clamp<D>(b) : b));
        continue;
      }
#ifdef KVFERRY_BF16
      if constexpr (D == Dtype::bf16 && !SAFE) {
        out[k] = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        continue;
      }
#endif
      out[k] = _mm512_inserti64x4(_mm512_castsi256_si512(narrow_half<D, SAFE>(a)), narrow_half<D, SAFE>(b), 1);
    }
  }

  template <Dtype D, bool SAFE, bool STREAM = false>
  static void put(uint8_t* p, const Floats& f) {
    __m512i out[4];
    narrow<D, SAFE>(f, out);
    for (int k = 0; k < kItem<D>; ++k)
      STREAM ? _mm512_stream_si512(reinterpret_cast<__m512i*>(p + 64 * k), out[k])
             : _mm512_storeu_si512(p + 64 * k, out[k]);
  }

  template <Dtype D>
  static void put_part(uint8_t* p, int n, const Floats& f) {
    __m512i out[4];
    narrow<D, true>(f, out);
    const __mmask64 mask = below(n);
    if constexpr (D == Dtype::fp32) {
      for (int k = 0; k < 4; ++k) _mm512_mask_storeu_epi32(p + 64 * k, __mmask16(mask >> (16 * k)), out[k]);
    } else {
      for (int k = 0; k < 2; ++k) _mm512_mask_storeu_epi16(p + 64 * k, __mmask32(mask >> (32 * k)), out[k]);
    }
  }

#include "avx512_codes.hpp"
};

#include "kernels.hpp"

#define KVFERRY_TEXT(x) #x
#define KVFERRY_NAME(x) KVFERRY_TEXT(x)
const Kernels kTable = {KVFERRY_NAME(KVFERRY_LEVEL), scratch_bytes, encode, decode, means, squares, finite, choose_tiers, count_tiers};
}  // namespace

namespace kvferry {
const Kernels* KVFERRY_KERNELS() { return &kTable; }
}  // namespace kvferry
#else
namespace kvferry {
const Kernels* KVFERRY_KERNELS() { return nullptr; }
}  // namespace kvferry
#endif
