// Rotated and centred rows for AVX-512, included by kernels_rotated.hpp: rows of whole groups of 64, 128 or 256 channels,
// elements side by side. A batch goes through in steps, all of it in the first cache level: rotated values and their
// largest magnitudes, then the scales of all groups at once, then codes. What plain arithmetic may get wrong (values that
// are not finite, or near the end of a format) is left to the careful functions, row by row.
//
// A group is held in vectors of V::Floats. Where those have even and odd channels apart, distance 1 lies between two
// vectors and the lanes' distances count double: the sums are the same, in the same order.

template <Dtype D>
constexpr bool kEvenOdd = D == Dtype::bf16;  // as V::load has them
template <Dtype D>
constexpr bool kEvenOddOut = D == Dtype::bf16 && !V::kHardwareBf16;  // as V::widen and V::put have them

// Butterflies at distance D among a vector's lanes. A product with one or minus one is exact, so that the fused sum is
// rounded once, as the plain one.
template <int D>
inline __m512 lane_butterfly(__m512 v) {
  __m512 partner;
  if constexpr (D == 1) partner = _mm512_permute_ps(v, 0xB1);
  if constexpr (D == 2) partner = _mm512_permute_ps(v, 0x4E);
  if constexpr (D == 4) partner = _mm512_shuffle_f32x4(v, v, 0xB1);
  if constexpr (D == 8) partner = _mm512_shuffle_f32x4(v, v, 0x4E);
#define KVFERRY_SIGN(i) ((i) & D ? -1.0f : 1.0f)
  const WideFloats signs = {KVFERRY_EACH_LANE(KVFERRY_SIGN)};
#undef KVFERRY_SIGN
  return _mm512_fmadd_ps(v, (__m512)signs, partner);
}

template <int COUNT, int DISTANCE>
inline void vector_butterflies(__m512* v) {
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; ++i)
    if ((i & DISTANCE) == 0) {
      const __m512 a = v[i], b = v[i + DISTANCE];
      v[i] = _mm512_add_ps(a, b);
      v[i + DISTANCE] = _mm512_sub_ps(a, b);
    }
}

template <int COUNT, bool EVEN_ODD>
inline void rotate_vectors(__m512* v) {
  if constexpr (EVEN_ODD) vector_butterflies<COUNT, 1>(v);
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; ++i)
    v[i] = lane_butterfly<8>(lane_butterfly<4>(lane_butterfly<2>(lane_butterfly<1>(v[i]))));
  if constexpr (!EVEN_ODD) vector_butterflies<COUNT, 1>(v);
  vector_butterflies<COUNT, 2>(v);
  if constexpr (COUNT > 4) vector_butterflies<COUNT, 4>(v);
  if constexpr (COUNT > 8) vector_butterflies<COUNT, 8>(v);
}

// Rotated values of n rows, in the vectors' own order, and each group's largest magnitude as a pattern, which is that of
// an infinity or a NaN where some value is not finite: every sum of a group takes in all of its values.
// Elements of 16 bits are not divided by the group's width before the rotation, but their scales and inverses after it:
// all of their sums are the same but for that power of two, down to the least number that fp32 has. `finish_rotated` tells
// where they come near the other end.
template <Dtype D>
constexpr bool kDivided = D == Dtype::fp32;

template <Dtype D, int N, bool MEAN>
KVFERRY_APART void rotate_rows(uint8_t* const* rows, uint8_t* const* ahead, int64_t n, int64_t groups,
                               const float* mean, float* values, int32_t* top) {
  constexpr int kCount = N / 16;
  const __m512 share = _mm512_set1_ps(1.0f / float(N));
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i tops[kLanes];
  int held = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t *row = rows[i], *next = ahead[i];
    for (int64_t g = 0; g < groups; ++g, row += N * kItem<D>, next += N * kItem<D>, values += N) {
      fetch(next, N * kItem<D>);
      __m512 v[kCount];
#pragma GCC unroll 4
      for (int k = 0; k < kCount; k += 4) {
        const auto block = V::template load<D>(row + k * 16 * kItem<D>);
        for (int j = 0; j < 4; ++j) {
          v[k + j] = block.v[j];
          if constexpr (MEAN) v[k + j] = _mm512_sub_ps(v[k + j], _mm512_load_ps(mean + g * N + (k + j) * 16));
          if constexpr (kDivided<D>) v[k + j] = _mm512_mul_ps(v[k + j], share);
        }
      }
      rotate_vectors<kCount, kEvenOdd<D>>(v);
      __m512i most = _mm512_setzero_si512();
#pragma GCC unroll 16
      for (int k = 0; k < kCount; ++k) {
        _mm512_store_ps(values + k * 16, v[k]);
        most = _mm512_max_epi32(most, _mm512_and_si512(magnitude, _mm512_castps_si512(v[k])));
      }
      tops[held++] = most;
      if (held == kLanes) {
        V::fold_tops(tops, top);
        top += kLanes;
        held = 0;
      }
    }
  }
  if (held == 0) return;
  for (; held < kLanes; ++held) tops[held] = _mm512_setzero_si512();
  V::fold_tops(tops, top);
}

// Scales and inverses of n groups; returns whether some group is not finite, or too large for what is left undivided.
KVFERRY_APART bool finish_rotated(const int32_t* __restrict top, float* __restrict inverse, uint32_t* __restrict code,
                                  int64_t n, float share, float undivided, int32_t largest) {
  uint32_t found = 0;
  for (int64_t i = 0; i < up(n, kLanes); ++i) {
    const uint32_t c = scale_code(float_of(uint32_t(top[i])) * share);
    const float scale = float_of(c << 15), inv = (1.0f / scale) * undivided;
    inverse[i] = float_of(bits_of(inv) & ~ones_if(scale == 0.0f));
    code[i] = c;
    found |= ones_if(top[i] >= largest);
  }
  return found != 0;
}

// floor(value / scale) of 64 values, within -half … half - 1, plus half.
template <bool EVEN_ODD>
inline __m512i floors(const float* values, __m512 inverse, __m512i half, __m512i most) {
  __m512i q[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k)
    q[k] = _mm512_cvt_roundps_epi32(_mm512_mul_ps(_mm512_load_ps(values + 16 * k), inverse),
                                    _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512i bytes;
  if constexpr (EVEN_ODD) {
    for (int k = 0; k < 2; ++k)
      q[k] = _mm512_mask_mov_epi16(q[2 * k], 0xAAAAAAAA, _mm512_slli_epi32(q[2 * k + 1], 16));
    bytes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packs_epi16(q[0], q[1]));
  } else {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    bytes = _mm512_permutexvar_epi32(
        order, _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3])));
  }
  bytes = _mm512_max_epi8(_mm512_min_epi8(bytes, most), _mm512_sub_epi8(_mm512_setzero_si512(), half));
  return _mm512_add_epi8(bytes, half);
}

template <int BITS, bool EVEN_ODD>
KVFERRY_APART void floor_rows(const float* values, const float* inverse, int64_t n, int64_t groups, int64_t size,
                              uint8_t* out, int64_t row_bytes, uint8_t* buffer) {
  const __m512i half = _mm512_set1_epi8(char(1 << (BITS - 1))), most = _mm512_set1_epi8(char((1 << (BITS - 1)) - 1));
  const auto codes = [&](const float* from, __m512 inv) {
    // 8 bits: the packing saturates where it should, and minus 128 is 128 itself.
    return floors<EVEN_ODD>(from, inv, half, most);
  };
  if (size == 64 && groups == 1) {
    for (int64_t i = 0; i < n; ++i)
      V::template pack_one<BITS>(codes(values + 64 * i, _mm512_set1_ps(inverse[i])), out + i * row_bytes);
    return;
  }
  for (int64_t i = 0; i < n; ++i, out += row_bytes) {
    uint8_t* to = BITS == 8 ? out : buffer;
    for (int64_t g = 0; g < groups; ++g, ++inverse)
      for (int64_t c = 0; c < size; c += 64, values += 64, to += 64)
        V::store(to, codes(values, _mm512_set1_ps(*inverse)));
    if (BITS != 8) V::template pack<BITS>(buffer, out, groups * size);
  }
}

template <bool EVEN_ODD>
inline void floor_any_rows(int bits, const Rotated& s, int64_t n, int64_t groups, int64_t size, uint8_t* out,
                           int64_t row_bytes) {
  switch (bits) {
    case 2: return floor_rows<2, EVEN_ODD>(s.block, s.factor, n, groups, size, out, row_bytes, s.codes);
    case 3: return floor_rows<3, EVEN_ODD>(s.block, s.factor, n, groups, size, out, row_bytes, s.codes);
    case 4: return floor_rows<4, EVEN_ODD>(s.block, s.factor, n, groups, size, out, row_bytes, s.codes);
    case 5: return floor_rows<5, EVEN_ODD>(s.block, s.factor, n, groups, size, out, row_bytes, s.codes);
    case 6: return floor_rows<6, EVEN_ODD>(s.block, s.factor, n, groups, size, out, row_bytes, s.codes);
    default: return floor_rows<8, EVEN_ODD>(s.block, s.factor, n, groups, size, out, row_bytes, s.codes);
  }
}

// Where n rows are from `rank` on, and the n after them, which are to be fetched (the same again at the end).
inline void find_batch(const Rows& x, const Section& t, int64_t head, int64_t rank, int64_t n, int64_t last,
                       const Rotated& s) {
  for (int64_t i = 0; i < n; ++i) {
    s.rows[i] = const_cast<uint8_t*>(row_of(x, t, head, rank + i));
    s.ahead[i] = const_cast<uint8_t*>(row_of(x, t, head, least(rank + i + s.batch, last - 1)));
  }
}

template <Dtype D, int N>
KVFERRY_APART void encode_batches(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                                  Rotated& s) {
  const float* mean = mean_of<D>(x, t, head, s);
  if (mean != nullptr)
    for (int64_t c = 0; c < x.dim; c += 64) V::template lanes_in<D>(mean + c, s.mean_lanes + c);
  const float undivided = kDivided<D> ? 1.0f : 1.0f / float(N);
  const int32_t largest = kDivided<D> ? int32_t(Traits<Dtype::fp32>::infinity) : int32_t(bits_of(1.0f / kSafeFloor));
  for (int64_t rank = first; rank < last; rank += s.batch) {
    const int64_t n = least(s.batch, last - rank), units = n * t.groups, place = head * t.count + rank;
    find_batch(x, t, head, rank, n, last, s);
    if (mean == nullptr)
      rotate_rows<D, N, false>(s.rows, s.ahead, n, t.groups, nullptr, s.block, s.top);
    else
      rotate_rows<D, N, true>(s.rows, s.ahead, n, t.groups, s.mean_lanes, s.block, s.top);
    const float share = 1.0f / float(1 << (t.bits - 1)) * undivided;
    if (finish_rotated(s.top, s.factor, s.scale_codes, units, share, undivided, largest)) {
      encode_groups<D, N>(x, t, head, rank, rank + n, s);
      continue;
    }
    write_words<uint16_t>(t.scales + place * t.groups * 2, s.scale_codes, units);
    floor_any_rows<kEvenOdd<D>>(t.bits, s, n, t.groups, N, t.codes + place * t.row_bytes, t.row_bytes);
  }
}

template <int BITS>
KVFERRY_APART void unpack_rows(const uint8_t* in, int64_t row_bytes, int64_t n, int64_t dim, uint8_t* codes) {
  if (!V::in_blocks(dim)) {
    for (int64_t i = 0; i < n; ++i, in += row_bytes, codes += dim) V::template unpack<BITS>(in, codes, dim);
    return;
  }
  for (int64_t i = 0; i < n; ++i, in += row_bytes)
    for (int64_t c = 0; c < dim; c += 64, codes += 64) V::store(codes, V::template unpack_block<BITS>(in, dim, c));
}

inline void unpack_any_rows(int bits, const uint8_t* in, int64_t row_bytes, int64_t n, int64_t dim, uint8_t* codes) {
  switch (bits) {
    case 2: return unpack_rows<2>(in, row_bytes, n, dim, codes);
    case 3: return unpack_rows<3>(in, row_bytes, n, dim, codes);
    case 4: return unpack_rows<4>(in, row_bytes, n, dim, codes);
    case 5: return unpack_rows<5>(in, row_bytes, n, dim, codes);
    case 6: return unpack_rows<6>(in, row_bytes, n, dim, codes);
    default: return unpack_rows<8>(in, row_bytes, n, dim, codes);
  }
}

// Scales; returns whether all groups are plain: no value, whatever its codes, comes near either end of the format, so that
// it need not be divided by the group's width before the rotation and multiplied after it. `room` is what the mean leaves.
KVFERRY_APART bool open_rotated(const uint8_t* scale_bytes, float* __restrict factor, int64_t n, float most_steps,
                                float room) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t code = read<uint16_t>(scale_bytes + 2 * i);
    const float scale = float_of(code << 15);
    factor[i] = scale;
    found |= ones_if((code > kLargestScale) | !(scale * most_steps < room) | !(scale >= kSafeFloor));
  }
  return found == 0;
}

template <Dtype D, int N, bool MEAN, bool STREAM>
KVFERRY_APART void restore_rows(const uint8_t* codes, const float* factor, int64_t n, int64_t groups, float middle,
                                const float* mean, uint8_t* const* rows) {
  constexpr int kCount = N / 16;
  for (int64_t i = 0; i < n; ++i) {
    uint8_t* row = rows[i];
    for (int64_t g = 0; g < groups; ++g, ++factor, codes += N, row += N * kItem<D>) {
      // Codes less the middle, times the step: no product of so few bits is rounded.
      const __m512 step = _mm512_set1_ps(*factor), offset = _mm512_set1_ps(-middle * *factor);
      __m512 v[kCount];
#pragma GCC unroll 4
      for (int k = 0; k < kCount; k += 4) {
        const auto block = V::template widen<D>(V::load_codes(codes + k * 16));
        for (int j = 0; j < 4; ++j) v[k + j] = _mm512_fmadd_ps(block.v[j], step, offset);
      }
      rotate_vectors<kCount, kEvenOddOut<D>>(v);
#pragma GCC unroll 4
      for (int k = 0; k < kCount; k += 4) {
        typename V::Floats block;
        for (int j = 0; j < 4; ++j) {
          block.v[j] = v[k + j];
          if constexpr (MEAN) block.v[j] = _mm512_add_ps(block.v[j], _mm512_load_ps(mean + g * N + (k + j) * 16));
        }
        V::template put<D, false, STREAM>(row + k * 16 * kItem<D>, block);
      }
    }
  }
}

template <Dtype D, int N>
KVFERRY_APART void decode_batches(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                                  Rotated& s) {
  const float half = float(1 << (t.bits - 1)), middle = half - 0.5f;
  const float* mean = mean_of<D>(x, t, head, s);
  float room = least(kHuge, Traits<D>::limit / 2);
  if (mean != nullptr) {
    for (int64_t c = 0; c < x.dim; c += 64) V::template lanes_out<D>(mean + c, s.mean_lanes + c);
    if (!(largest_magnitude(mean, x.dim) < room)) room = 0.0f;  // a NaN is larger
    // Nor may a sum become subnormal, which the conversion to bfloat16 takes for zero.
    for (int64_t c = 0; c < x.dim; ++c)
      if (mean[c] != 0.0f && !(mean[c] >= kSafeFloor) && !(mean[c] <= -kSafeFloor)) room = 0.0f;
  }
  for (int64_t rank = first; rank < last; rank += s.batch) {
    const int64_t n = least(s.batch, last - rank), units = n * t.groups, place = head * t.count + rank;
    if (!open_rotated(t.scales + place * t.groups * 2, s.factor, units, half * float(N), room)) {
      decode_groups<D, N>(x, t, head, rank, rank + n, s);
      continue;
    }
    find_batch(x, t, head, rank, n, last, s);
    unpack_any_rows(t.bits, t.codes + place * t.row_bytes, t.row_bytes, n, x.dim, s.opened);
    const auto restore = mean == nullptr ? s.stream ? &restore_rows<D, N, false, true> : &restore_rows<D, N, false, false>
                         : s.stream      ? &restore_rows<D, N, true, true>
                                         : &restore_rows<D, N, true, false>;
    restore(s.opened, s.factor, n, t.groups, middle, s.mean_lanes, s.rows);
  }
}

// Sums of the rows of a head into `s.mean`, as kernels_means.hpp has them, eight rows at a time; rows of whole vectors, side
// by side. Returns whether all sums are finite: so are the rows then.
template <Dtype D>
KVFERRY_APART bool sum_batches(const Rows& x, const Section& t, int64_t head, const Rotated& s) {
  using Floats = typename V::Floats;
  const auto load = [&](int64_t rank, int64_t c) {
    return V::template load<D>(row_of(x, t, head, rank) + c * kItem<D>);
  };
  const auto plus = [](Floats a, const Floats& b) {
    for (int k = 0; k < 4; ++k) a.v[k] = _mm512_add_ps(a.v[k], b.v[k]);
    return a;
  };
  const auto put = [](float* p, const Floats& f) {
    for (int k = 0; k < 4; ++k) _mm512_store_ps(p + 16 * k, f.v[k]);
  };
  const int64_t blocks = t.count / 8, row = x.dim * kItem<D>, ahead = most<int64_t>(8, (4 << 10) / row);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = 8 * block;
    for (int64_t i = 0; i < 8; ++i) fetch(row_of(x, t, head, least(first + i + ahead, t.count - 1)), row);
    for (int64_t c = 0; c < x.dim; c += 64) {
      Floats sum = plus(plus(plus(load(first, c), load(first + 1, c)), plus(load(first + 2, c), load(first + 3, c))),
                        plus(plus(load(first + 4, c), load(first + 5, c)), plus(load(first + 6, c), load(first + 7, c))));
      int level = 3;
      for (int64_t carry = block; carry & 1; carry >>= 1, ++level) sum = plus(V::floats(level_of(s, level) + c), sum);
      put(level_of(s, level) + c, sum);
    }
  }
  for (int64_t rank = 8 * blocks; rank < t.count; ++rank)
    for (int64_t c = 0; c < x.dim; c += 64) {
      Floats sum = load(rank, c);
      int level = 0;
      for (int64_t carry = rank; carry & 1; carry >>= 1, ++level) sum = plus(V::floats(level_of(s, level) + c), sum);
      put(level_of(s, level) + c, sum);
    }
  close_sums(s, t.count, x.dim);
  if (kEvenOdd<D>)
    for (int64_t c = 0; c < x.dim; c += 32) {
      const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
      const __m512 even = _mm512_load_ps(s.mean + c), odd = _mm512_load_ps(s.mean + c + 16);
      _mm512_store_ps(s.mean + c, _mm512_permutex2var_ps(even, first, odd));
      _mm512_store_ps(s.mean + c + 16, _mm512_permutex2var_ps(even, second, odd));
    }
  return largest_magnitude(s.mean, x.dim) < float_of(Traits<Dtype::fp32>::infinity);
}
