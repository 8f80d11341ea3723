// Inside struct V of isa_avx512.cpp: extremes of rows, of batches of rows, and by channel.

  static uint32_t top16(__m512i v) {
    const __m256i a = _mm256_max_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    const __m128i b = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    return 0xFFFFu ^ unsigned(_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(b, _mm_set1_epi16(-1)))) & 0xFFFF);
  }

  template <Dtype D>
  static uint32_t amax(const uint8_t* p, int64_t n) {
    if constexpr (D == Dtype::fp32) {
      __m512i top = _mm512_setzero_si512();
      const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
      int64_t i = 0;
      for (; i + 16 <= n; i += 16)
        top = _mm512_max_epu32(top, _mm512_and_si512(magnitude, _mm512_loadu_si512(p + 4 * i)));
      if (i < n)
        top = _mm512_max_epu32(top,
                               _mm512_and_si512(magnitude, _mm512_maskz_loadu_epi32(__mmask16(below(n - i)), p + 4 * i)));
      return _mm512_reduce_max_epu32(top);
    }
    __m512i top = _mm512_setzero_si512();
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
      top = _mm512_max_epu16(top, _mm512_and_si512(magnitude, _mm512_loadu_si512(p + 2 * i)));
    if (i < n)
      top = _mm512_max_epu16(top,
                             _mm512_and_si512(magnitude, _mm512_maskz_loadu_epi16(__mmask32(below(n - i)), p + 2 * i)));
    return top16(top);
  }

  // Order keys of 16-bit patterns, as unsigned numbers.
  static __m512i keys16(__m512i v) {
    return _mm512_ternarylogic_epi64(v, _mm512_srai_epi16(v, 15), _mm512_set1_epi16(short(0x8000)), 0x1E);  // a ^ (b | c)
  }

  static __m512i keys32(__m512i v) {
    return _mm512_xor_si512(v, _mm512_srli_epi32(_mm512_srai_epi32(v, 31), 1));
  }

  template <Dtype D>
  static void minmax(const uint8_t* p, int64_t n, int32_t* low, int32_t* high) {
    int64_t i = 0;
    if constexpr (D == Dtype::fp32) {
      const __m512i first = keys32(_mm512_set1_epi32(read<int32_t>(p)));
      __m512i lo = first, hi = first;
      for (; i < n; i += 16) {
        const __mmask16 lanes = __mmask16(below(n - i));
        const __m512i key = _mm512_mask_mov_epi32(first, lanes, keys32(_mm512_maskz_loadu_epi32(lanes, p + 4 * i)));
        lo = _mm512_min_epi32(lo, key);
        hi = _mm512_max_epi32(hi, key);
      }
      *low = _mm512_reduce_min_epi32(lo);
      *high = _mm512_reduce_max_epi32(hi);
      return;
    }
    __m512i lo, hi;
    if (n >= 32) {
      lo = hi = keys16(_mm512_loadu_si512(p));
      for (i = 32; i + 32 <= n; i += 32) {
        const __m512i key = keys16(_mm512_loadu_si512(p + 2 * i));
        lo = _mm512_min_epu16(lo, key);
        hi = _mm512_max_epu16(hi, key);
      }
      if (i < n) {  // the last 32 again
        const __m512i key = keys16(_mm512_loadu_si512(p + 2 * (n - 32)));
        lo = _mm512_min_epu16(lo, key);
        hi = _mm512_max_epu16(hi, key);
      }
    } else {
      const __m512i first = _mm512_set1_epi16(read<int16_t>(p));
      lo = hi = keys16(_mm512_mask_loadu_epi16(first, __mmask32(below(n)), p));
    }
    *high = int32_t(top16(hi)) - 0x8000;
    *low = int32_t(0xFFFFu ^ top16(_mm512_xor_si512(lo, _mm512_set1_epi16(-1)))) - 0x8000;
  }

  // Four vectors folded into one: quarter i holds what is left of vector i. Two shuffles serve two vectors at once, so a
  // row's range costs three instructions in place of a horizontal reduction.
  template <class Fold>
  static __m512i fold4(__m512i a, __m512i b, __m512i c, __m512i d, Fold fold) {
    const __m512i ab = fold(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xEE));
    const __m512i cd = fold(_mm512_shuffle_i64x2(c, d, 0x44), _mm512_shuffle_i64x2(c, d, 0xEE));
    return fold(_mm512_shuffle_i64x2(ab, cd, 0x88), _mm512_shuffle_i64x2(ab, cd, 0xDD));
  }

  // And four of those into sixteen lanes, in order.
  template <Dtype D, class Fold>
  static __m512i fold16(const __m512i four[4], Fold fold) {
    const __m512i low = fold(_mm512_unpacklo_epi64(four[0], four[1]), _mm512_unpackhi_epi64(four[0], four[1]));
    const __m512i high = fold(_mm512_unpacklo_epi64(four[2], four[3]), _mm512_unpackhi_epi64(four[2], four[3]));
    const __m512 a = _mm512_castsi512_ps(low), b = _mm512_castsi512_ps(high);
    __m512i all = fold(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                       _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xDD)));
    if constexpr (D != Dtype::fp32)
      all = _mm512_and_si512(fold(all, _mm512_srli_epi32(all, 16)), _mm512_set1_epi32(0xFFFF));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all);
  }

  // The largest lane of each of sixteen vectors.
  static void fold_tops(const __m512i* tops, int32_t* out) {
    const auto larger = [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); };
    __m512i four[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) four[i] = fold4(tops[4 * i], tops[4 * i + 1], tops[4 * i + 2], tops[4 * i + 3], larger);
    _mm512_store_si512(out, fold16<Dtype::fp32>(four, larger));
  }

  // The ranges of sixteen units of whole vectors, of two vectors most often.
  template <Dtype D>
  static void amax_batch(uint8_t* const* units, int64_t size, int32_t* out) {
    size * kItem<D> == 128 ? amax_units<D, true>(units, 128, out) : amax_units<D, false>(units, size * kItem<D>, out);
  }

  template <Dtype D>
  static void minmax_batch(uint8_t* const* units, int64_t size, int32_t* low, int32_t* high) {
    size * kItem<D> == 128 ? minmax_units<D, true>(units, 128, low, high)
                           : minmax_units<D, false>(units, size * kItem<D>, low, high);
  }

  template <Dtype D>
  static __m512i larger(__m512i a, __m512i b) {
    return D == Dtype::fp32 ? _mm512_max_epi32(a, b) : _mm512_max_epu16(a, b);
  }

  template <Dtype D, bool TWO>
  KVFERRY_APART static void amax_units(uint8_t* const* units, int64_t bytes, int32_t* out) {
    const __m512i magnitude = D == Dtype::fp32 ? _mm512_set1_epi32(0x7FFFFFFF) : _mm512_set1_epi16(0x7FFF);
    const auto at = [&](const uint8_t* p) { return _mm512_and_si512(magnitude, _mm512_loadu_si512(p)); };
    const auto top = [&](const uint8_t* unit) {
      __m512i most = larger<D>(at(unit), at(unit + 64));
      if constexpr (!TWO)
        for (int64_t c = 128; c < bytes; c += 64) most = larger<D>(most, at(unit + c));
      return most;
    };
    __m512i four[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      four[i] = fold4(top(units[4 * i]), top(units[4 * i + 1]), top(units[4 * i + 2]), top(units[4 * i + 3]), larger<D>);
    _mm512_store_si512(out, fold16<D>(four, larger<D>));
  }

  // Of sign-magnitude patterns with both signs among them, the unsigned maximum is the lowest value and the signed maximum
  // the highest. Units of one sign only are done again, by their order keys.
  template <Dtype D, bool TWO>
  KVFERRY_APART static void minmax_units(uint8_t* const* units, int64_t bytes, int32_t* low, int32_t* high) {
    const auto at = [](const uint8_t* p) { return _mm512_loadu_si512(p); };
    const auto highest = [](__m512i a, __m512i b) {
      return D == Dtype::fp32 ? _mm512_max_epi32(a, b) : _mm512_max_epi16(a, b);
    };
    const auto largest = [](__m512i a, __m512i b) {
      return D == Dtype::fp32 ? _mm512_max_epu32(a, b) : _mm512_max_epu16(a, b);
    };
    __m512i tops[4], bottoms[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512i top[4], bottom[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const uint8_t* unit = units[4 * i + k];
        const __m512i first = at(unit), second = at(unit + 64);
        top[k] = highest(first, second);
        bottom[k] = largest(first, second);
        if constexpr (!TWO)
          for (int64_t c = 128; c < bytes; c += 64) {
            const __m512i next = at(unit + c);
            top[k] = highest(top[k], next);
            bottom[k] = largest(bottom[k], next);
          }
      }
      tops[i] = fold4(top[0], top[1], top[2], top[3], highest);
      bottoms[i] = fold4(bottom[0], bottom[1], bottom[2], bottom[3], largest);
    }
    __m512i top = fold16<D>(tops, highest), bottom = fold16<D>(bottoms, largest);
    if constexpr (D != Dtype::fp32) {  // sign-extended
      top = _mm512_srai_epi32(_mm512_slli_epi32(top, 16), 16);
      bottom = _mm512_srai_epi32(_mm512_slli_epi32(bottom, 16), 16);
    }
    _mm512_store_si512(high, top);  // the keys of positive patterns are themselves
    _mm512_store_si512(low, _mm512_xor_si512(bottom, _mm512_set1_epi32(D == Dtype::fp32 ? 0x7FFFFFFF : 0x7FFF)));
    unsigned one_sign = _mm512_movepi32_mask(top) | (0xFFFFu & ~unsigned(_mm512_movepi32_mask(bottom)));
    for (; one_sign != 0; one_sign &= one_sign - 1) {
      const int i = __builtin_ctz(one_sign);
      minmax<D>(units[i], bytes / kItem<D>, low + i, high + i);
    }
  }

  // Extremes by channel over n rows: signed maximum, unsigned maximum, unsigned minimum of the patterns.
  template <Dtype D>
  static void range(uint8_t* const* rows, int n, int64_t c, int width, typename Traits<D>::Bits* highest,
                    typename Traits<D>::Bits* largest, typename Traits<D>::Bits* smallest, bool start) {
    if (width == U)
      range_of<D, true>(rows, n, c, width, highest, largest, smallest, start);
    else
      range_of<D, false>(rows, n, c, width, highest, largest, smallest, start);
  }

  template <Dtype D, bool WHOLE>
  KVFERRY_APART static void range_of(uint8_t* const* rows, int n, int64_t c, int width,
                                     typename Traits<D>::Bits* highest, typename Traits<D>::Bits* largest,
                                     typename Traits<D>::Bits* smallest, bool start) {
    constexpr int step = 64 / int(kItem<D>), parts = 64 / step;
    const __mmask64 mask = below(width);
    __mmask64 lanes[parts];
    __m512i high[parts], large[parts], small[parts];
    const auto at = [&](const uint8_t* row, int k) {
      const uint8_t* from = row + (c + k * step) * kItem<D>;
      if constexpr (WHOLE) return _mm512_loadu_si512(from);
      if constexpr (D == Dtype::fp32) return _mm512_maskz_loadu_epi32(__mmask16(lanes[k]), from);
      return _mm512_maskz_loadu_epi16(__mmask32(lanes[k]), from);
    };
    for (int k = 0; k < parts; ++k) {
      lanes[k] = mask >> (k * step);
      high[k] = start ? at(rows[0], k) : _mm512_load_si512(highest + k * step);
      large[k] = start ? high[k] : _mm512_load_si512(largest + k * step);
      small[k] = start ? high[k] : _mm512_load_si512(smallest + k * step);
    }
    for (int i = 0; i < n; ++i)
      for (int k = 0; k < parts; ++k) {
        const __m512i bits = at(rows[i], k);
        if constexpr (D == Dtype::fp32) {
          high[k] = _mm512_max_epi32(high[k], bits);
          large[k] = _mm512_max_epu32(large[k], bits);
          small[k] = _mm512_min_epu32(small[k], bits);
        } else {
          high[k] = _mm512_max_epi16(high[k], bits);
          large[k] = _mm512_max_epu16(large[k], bits);
          small[k] = _mm512_min_epu16(small[k], bits);
        }
      }
    for (int k = 0; k < parts; ++k) {
      _mm512_store_si512(highest + k * step, high[k]);
      _mm512_store_si512(largest + k * step, large[k]);
      _mm512_store_si512(smallest + k * step, small[k]);
    }
  }
