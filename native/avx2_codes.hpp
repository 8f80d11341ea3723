// Inside struct V of isa_avx2.cpp: packing and unpacking of codes through buffers; short ends go one byte at a time.

  static __m256i masked(__m256i v, char mask) { return _mm256_and_si256(v, _mm256_set1_epi8(mask)); }

  template <int BITS>
  static void pack(const uint8_t* codes, uint8_t* out, int64_t n) {
    if constexpr (BITS == 8) __builtin_memcpy(out, codes, size_t(n));
    if constexpr (BITS == 4 || BITS == 5 || BITS == 6) {
      const int64_t half = n / 2;
      int64_t j = 0;
      for (; j + 32 <= half; j += 32)
        store(out + j, _mm256_or_si256(masked(loadu(codes + j), 15),
                                       _mm256_slli_epi16(masked(loadu(codes + half + j), 15), 4)));
      pack_plane(codes, out, half, j, 0, 4);
    }
    if constexpr (BITS == 2 || BITS == 3 || BITS == 6) {
      constexpr int shift = BITS == 6 ? 4 : 0;
      const int64_t quarter = n / 4;
      uint8_t* plane = out + (BITS == 6 ? n / 2 : 0);
      const __m128i pair = _mm_set1_epi8(3);
      int64_t j = 0;
      for (; j + 16 <= quarter; j += 16) {
        __m128i byte = _mm_setzero_si128();
        for (int k = 3; k >= 0; --k)
          byte = _mm_or_si128(_mm_slli_epi16(byte, 2),
                              _mm_and_si128(_mm_srli_epi16(loadu128(codes + k * quarter + j), shift), pair));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(plane + j), byte);
      }
      pack_plane(codes, plane, quarter, j, shift, 2);
    }
    if constexpr (BITS == 3 || BITS == 5) {
      constexpr int shift = BITS == 3 ? 2 : 4;
      uint8_t* plane = out + (BITS == 3 ? n / 4 : n / 2);
      int64_t j = 0;
      for (; j + 32 <= n; j += 32)
        write(plane + j / 8, _mm256_movemask_epi8(_mm256_slli_epi16(loadu(codes + j), 7 - shift)));
      pack_ones(codes, plane, n / 8, j / 8, shift);
    }
  }

  template <int BITS>
  static void unpack(const uint8_t* in, uint8_t* codes, int64_t n) {
    if constexpr (BITS == 8) __builtin_memcpy(codes, in, size_t(n));
    if constexpr (BITS == 4 || BITS == 5 || BITS == 6) {
      const int64_t half = n / 2;
      int64_t j = 0;
      for (; j + 32 <= half; j += 32) {
        const __m256i byte = loadu(in + j);
        store(codes + j, masked(byte, 15));
        store(codes + half + j, masked(_mm256_srli_epi16(byte, 4), 15));
      }
      unpack_plane(in, codes, half, j, 0, 4);
    }
    if constexpr (BITS == 2 || BITS == 3 || BITS == 6) {
      constexpr int shift = BITS == 6 ? 4 : 0;
      const int64_t quarter = n / 4;
      const uint8_t* plane = in + (BITS == 6 ? n / 2 : 0);
      const __m128i pair = _mm_set1_epi8(3);
      int64_t j = 0;
      for (; j + 16 <= quarter; j += 16) {
        __m128i byte = loadu128(plane + j);
        for (int k = 0; k < 4; ++k, byte = _mm_srli_epi16(byte, 2)) {
          uint8_t* to = codes + k * quarter + j;
          __m128i part = _mm_slli_epi16(_mm_and_si128(byte, pair), shift);
          if constexpr (BITS == 6) part = _mm_or_si128(part, loadu128(to));
          _mm_storeu_si128(reinterpret_cast<__m128i*>(to), part);
        }
      }
      unpack_plane(plane, codes, quarter, j, shift, 2);
    }
    if constexpr (BITS == 3 || BITS == 5) {
      constexpr int shift = BITS == 3 ? 2 : 4;
      const uint8_t* plane = in + (BITS == 3 ? n / 4 : n / 2);
      const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3,
                                              3, 3, 3, 3, 3, 3, 3);
      const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
      int64_t j = 0;
      for (; j + 32 <= n; j += 32) {
        const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(read<int32_t>(plane + j / 8)), spread);
        const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
        store(codes + j, _mm256_or_si256(loadu(codes + j), masked(set, 1 << shift)));
      }
      unpack_ones(plane, codes, n / 8, j / 8, shift);
    }
  }
