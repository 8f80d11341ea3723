// Inside struct V of isa_avx512.cpp: packing of codes, unpacking, and look-up tables. `_one` handles a whole row of 64
// codes in one register; the others go through buffers, by masked vectors of any length.

  static __m512i plane_shifts(int bits) {
    return bits == 4 ? _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4) : _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6);
  }

  // 32 bytes of a 4-bit plane, 16 of a 2-bit plane, from 64 codes below 16 or 4.
  static __m256i pack4_one(__m512i codes) {
    return _mm256_or_si256(_mm512_castsi512_si256(codes), _mm256_slli_epi16(_mm512_extracti64x4_epi64(codes, 1), 4));
  }

  static __m128i pack2_one(__m512i codes) {
    const __m512i shifted = _mm512_sllv_epi64(codes, plane_shifts(2));
    const __m256i half = _mm256_or_si256(_mm512_castsi512_si256(shifted), _mm512_extracti64x4_epi64(shifted, 1));
    return _mm_or_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  }

  template <int BITS>
  static void pack_one(Codes codes, uint8_t* out) {
    const __m512i nibble = _mm512_set1_epi8(15), pair = _mm512_set1_epi8(3);
    if constexpr (BITS == 8) _mm512_storeu_si512(out, codes);
    if constexpr (BITS == 4 || BITS == 5 || BITS == 6)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                          pack4_one(BITS == 4 ? codes : _mm512_and_si512(codes, nibble)));
    if constexpr (BITS == 2 || BITS == 3)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), pack2_one(BITS == 2 ? codes : _mm512_and_si512(codes, pair)));
    if constexpr (BITS == 6)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 32),
                       pack2_one(_mm512_and_si512(_mm512_srli_epi16(codes, 4), pair)));
    if constexpr (BITS == 5) write(out + 32, uint64_t(_mm512_test_epi8_mask(codes, _mm512_set1_epi8(16))));
    if constexpr (BITS == 3) write(out + 16, uint64_t(_mm512_test_epi8_mask(codes, _mm512_set1_epi8(4))));
  }

  static __m512i unfold4(const uint8_t* in) {
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
    return _mm512_and_si512(_mm512_srlv_epi64(twice, plane_shifts(4)), _mm512_set1_epi8(15));
  }

  static __m512i unfold2(const uint8_t* in) {
    const __m512i often = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
    return _mm512_and_si512(_mm512_srlv_epi64(often, plane_shifts(2)), _mm512_set1_epi8(3));
  }

  static __m512i add_ones(__m512i codes, const uint8_t* in, char value) {
    return _mm512_mask_add_epi8(codes, __mmask64(read<uint64_t>(in)), codes, _mm512_set1_epi8(value));
  }

  template <int BITS>
  static Codes unpack_one(const uint8_t* in) {
    if constexpr (BITS == 4) return unfold4(in);
    if constexpr (BITS == 2) return unfold2(in);
    if constexpr (BITS == 5) return add_ones(unfold4(in), in + 32, 16);
    if constexpr (BITS == 3) return add_ones(unfold2(in), in + 16, 4);
    if constexpr (BITS == 6) return _mm512_or_si512(unfold4(in), _mm512_slli_epi16(unfold2(in + 32), 4));
    return _mm512_loadu_si512(in);
  }

  // Whether unpack_block can take 64 codes at a time from a row of n.
  static bool in_blocks(int64_t n) { return n == 64 || n == 128 || n % 256 == 0; }

  // The 64 codes from c on, of a packed row of n.
  template <int BITS>
  static Codes unpack_block(const uint8_t* in, int64_t n, int64_t c) {
    if (n == 64) return unpack_one<BITS>(in);
    __m512i codes = _mm512_setzero_si512();
    if constexpr (BITS == 8) return _mm512_loadu_si512(in + c);
    if constexpr (BITS == 4 || BITS == 5 || BITS == 6) {
      const bool upper = c >= n / 2;
      const __m512i byte = _mm512_loadu_si512(in + (upper ? c - n / 2 : c));
      codes = _mm512_and_si512(_mm512_srl_epi16(byte, _mm_cvtsi32_si128(upper ? 4 : 0)), _mm512_set1_epi8(15));
    }
    if constexpr (BITS == 2 || BITS == 3 || BITS == 6) {
      const uint8_t* plane = in + (BITS == 6 ? n / 2 : 0);
      __m512i byte;
      if (n == 128) {  // both halves of the vector come from the same 32 bytes
        byte = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane)));
        byte = _mm512_srlv_epi64(byte, _mm512_add_epi64(_mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2),
                                                        _mm512_set1_epi64(c == 0 ? 0 : 4)));
      } else {
        const int64_t quarter = n / 4;
        byte = _mm512_srl_epi16(_mm512_loadu_si512(plane + c % quarter), _mm_cvtsi32_si128(int(c / quarter) * 2));
      }
      const __m512i pair = _mm512_and_si512(byte, _mm512_set1_epi8(3));
      codes = BITS == 6 ? _mm512_or_si512(codes, _mm512_slli_epi16(pair, 4)) : pair;
    }
    if constexpr (BITS == 5) return add_ones(codes, in + n / 2 + c / 8, 16);
    if constexpr (BITS == 3) return add_ones(codes, in + n / 4 + c / 8, 4);
    return codes;
  }

  template <int BITS>
  static void pack(const uint8_t* codes, uint8_t* out, int64_t n) {
    if (n == 64) return pack_one<BITS>(_mm512_loadu_si512(codes), out);
    if constexpr (BITS == 8) {
      for (int64_t j = 0; j < n; j += 64)
        _mm512_mask_storeu_epi8(out + j, below(n - j), _mm512_loadu_si512(codes + j));
      return;
    }
    if constexpr (BITS == 4 || BITS == 5 || BITS == 6) {
      const int64_t half = n / 2;
      const __m512i nibble = _mm512_set1_epi8(15);
      const auto byte = [&](int64_t j) {
        const __m512i low = _mm512_loadu_si512(codes + j), high = _mm512_loadu_si512(codes + half + j);
        if constexpr (BITS == 4) return _mm512_or_si512(low, _mm512_slli_epi16(high, 4));
        return _mm512_or_si512(_mm512_and_si512(low, nibble), _mm512_slli_epi16(_mm512_and_si512(high, nibble), 4));
      };
      int64_t j = 0;
      for (; j + 64 <= half; j += 64) _mm512_storeu_si512(out + j, byte(j));
      if (j < half) _mm512_mask_storeu_epi8(out + j, below(half - j), byte(j));
    }
    if constexpr (BITS == 2 || BITS == 3 || BITS == 6) {
      constexpr int shift = BITS == 6 ? 4 : 0;
      const int64_t quarter = n / 4;
      uint8_t* plane = out + (BITS == 6 ? n / 2 : 0);
      const __m512i pair = _mm512_set1_epi8(3);
      const auto byte = [&](int64_t j) {
        __m512i all = _mm512_setzero_si512();
        for (int k = 3; k >= 0; --k) {
          const __m512i part = _mm512_srli_epi16(_mm512_loadu_si512(codes + k * quarter + j), shift);
          all = _mm512_or_si512(_mm512_slli_epi16(all, 2), _mm512_and_si512(part, pair));
        }
        return all;
      };
      int64_t j = 0;
      for (; j + 64 <= quarter; j += 64) _mm512_storeu_si512(plane + j, byte(j));
      if (j < quarter) _mm512_mask_storeu_epi8(plane + j, below(quarter - j), byte(j));
    }
    if constexpr (BITS == 3 || BITS == 5) {
      const __m512i bit = _mm512_set1_epi8(BITS == 3 ? 4 : 16);
      uint8_t* plane = out + (BITS == 3 ? n / 4 : n / 2);
      int64_t j = 0;
      for (; j + 64 <= n; j += 64)
        write(plane + j / 8, uint64_t(_mm512_test_epi8_mask(_mm512_loadu_si512(codes + j), bit)));
      if (j < n) pack_ones(codes, plane, n / 8, j / 8, BITS == 3 ? 2 : 4);
    }
  }

  template <int BITS>
  static void unpack(const uint8_t* in, uint8_t* codes, int64_t n) {
    if (n == 64) return _mm512_storeu_si512(codes, unpack_one<BITS>(in));
    if constexpr (BITS == 8) __builtin_memcpy(codes, in, size_t(n));
    if constexpr (BITS == 4 || BITS == 5 || BITS == 6) {
      const int64_t half = n / 2;
      const __m512i nibble = _mm512_set1_epi8(15);
      for (int64_t j = 0; j < half; j += 64) {
        const __mmask64 lanes = below(half - j);
        const __m512i byte = _mm512_maskz_loadu_epi8(lanes, in + j);
        _mm512_mask_storeu_epi8(codes + j, lanes, _mm512_and_si512(byte, nibble));
        _mm512_mask_storeu_epi8(codes + half + j, lanes, _mm512_and_si512(_mm512_srli_epi16(byte, 4), nibble));
      }
    }
    if constexpr (BITS == 2 || BITS == 3 || BITS == 6) {
      const int64_t quarter = n / 4;
      const uint8_t* plane = in + (BITS == 6 ? n / 2 : 0);
      const __m512i pair = _mm512_set1_epi8(3);
      for (int64_t j = 0; j < quarter; j += 64) {
        const __mmask64 lanes = below(quarter - j);
        __m512i byte = _mm512_maskz_loadu_epi8(lanes, plane + j);
        for (int k = 0; k < 4; ++k, byte = _mm512_srli_epi16(byte, 2)) {
          __m512i part = _mm512_and_si512(byte, pair);
          if constexpr (BITS == 6)
            part = _mm512_or_si512(_mm512_slli_epi16(part, 4), _mm512_loadu_si512(codes + k * quarter + j));
          _mm512_mask_storeu_epi8(codes + k * quarter + j, lanes, part);
        }
      }
    }
    if constexpr (BITS == 3 || BITS == 5) {
      const uint8_t* plane = in + (BITS == 3 ? n / 4 : n / 2);
      int64_t j = 0;
      for (; j + 64 <= n; j += 64)
        _mm512_storeu_si512(codes + j, add_ones(_mm512_loadu_si512(codes + j), plane + j / 8, BITS == 3 ? 4 : 16));
      if (j < n) unpack_ones(plane, codes, n / 8, j / 8, BITS == 3 ? 2 : 4);
    }
  }

  // The group's values by code: 16 or 32 words in a register, natural order.
  template <Dtype D, int BITS, bool SYM, bool SAFE>
  static Table make_table(float low, float scale) {
    const __m512 counting = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 step = one(scale);
    __m256i words[2];
    for (int k = 0; k < (BITS == 5 ? 2 : 1); ++k) {
      __m512 v = _mm512_add_ps(counting, one(float(16 * k) - (SYM ? float(1 << (BITS - 1)) : 0.0f)));
      v = _mm512_mul_ps(v, step);
      if constexpr (!SYM) v = _mm512_add_ps(one(low), v);
      words[k] = narrow_half<D, SAFE>(v);
    }
    const __m512i table = _mm512_castsi256_si512(words[0]);
    return BITS == 5 ? _mm512_inserti64x4(table, words[1], 1) : table;
  }

  static void look_up(const Table& table, Codes codes, uint8_t* p) {
    const __m512i a = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes));
    const __m512i b = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(codes, 1));
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(a, table));
    _mm512_storeu_si512(p + 64, _mm512_permutexvar_epi16(b, table));
  }
