// Hadamard-rotated rows (`had`), and the same of rows less their mean (`cen`): docs/quantizers.md, "rotated" and
// "centred". Included by kernels.hpp. Every sum is rounded on its own and in the documented order, so that vectors of any
// width give the oracle's bits.

#include "kernels_lanes.hpp"

// Times the Hadamard matrix of `size`, a power of two; x is aligned to 64 bytes.
inline void rotate(float* x, int64_t size) {
  int64_t distance = 1;
  if (size >= kWide) {
    for (int64_t i = 0; i < size; i += kWide) {
      WideFloats v = *reinterpret_cast<const WideFloats*>(x + i);
      v = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(v))));
      *reinterpret_cast<WideFloats*>(x + i) = v;
    }
    distance = kWide;
    for (; distance < size; distance *= 2)
      for (int64_t start = 0; start < size; start += 2 * distance)
        for (int64_t i = start; i < start + distance; i += kWide) {
          const WideFloats a = *reinterpret_cast<const WideFloats*>(x + i);
          const WideFloats b = *reinterpret_cast<const WideFloats*>(x + i + distance);
          *reinterpret_cast<WideFloats*>(x + i) = a + b;
          *reinterpret_cast<WideFloats*>(x + i + distance) = a - b;
        }
    return;
  }
  for (; distance < size; distance *= 2)
    for (int64_t start = 0; start < size; start += 2 * distance)
      for (int64_t i = start; i < start + distance; ++i) {
        const float a = x[i], b = x[i + distance];
        x[i] = a + b;
        x[i + distance] = a - b;
      }
}

// Width of the group that begins at channel `from`: the last one is just wide enough.
inline int64_t group_width(const Rows& x, const Section& t, int64_t from) {
  if (x.dim - from >= t.group) return t.group;
  int64_t width = 1;
  while (width < x.dim - from) width *= 2;
  return width;
}

// Widths of a row's groups together: the codes of a row.
inline int64_t rotated_width(const Rows& x, const Section& t) {
  const int64_t whole = x.dim / t.group * t.group;
  return whole < x.dim ? whole + group_width(x, t, whole) : whole;
}

struct Rotated {
  float *values, *mean;  // a row, padded; a head's mean
  uint8_t* codes;
  float* sums;  // means: a row each for the levels of the tree
  int64_t stride;
  bool stream;  // decode: rows go to their place past the caches
  // Where vectors hold 64 elements, a batch of rows:
  int64_t batch;
  float *block, *factor, *mean_lanes;  // rotated values; a group's 1 / scale or scale / width; means in lanes' order
  int32_t* top;                        // patterns of the groups' largest magnitudes
  uint32_t* scale_codes;
  uint8_t *opened, **rows, **ahead;  // codes, one byte each; where the rows are, and those to be fetched meanwhile
};

constexpr int kMostLevels = 33;         // of 2^31 tokens, and the tokens themselves
constexpr int64_t kBatchValues = 4096;  // 16 KiB as fp32

inline size_t carve_rotated(Rotated& s, const Rows& x, const Section& t, uint8_t* base) {
  s.stride = up(rotated_width(x, t), 64) + 64;
  size_t used = 0;
  const auto take = [&](int64_t bytes) {
    uint8_t* at = base ? base + used : nullptr;
    used += size_t(up(bytes, 64));
    return at;
  };
  s.values = reinterpret_cast<float*>(take(4 * s.stride));
  s.mean = reinterpret_cast<float*>(take(4 * s.stride));
  s.codes = take(s.stride);
  const bool centred = t.family == Family::cen;
  s.sums = reinterpret_cast<float*>(take(centred ? 4 * s.stride * kMostLevels : 0));
  if (V::U != 64) return used;
  s.batch = most<int64_t>(1, kBatchValues / most<int64_t>(1, x.dim));
  const int64_t units = up(s.batch * t.groups, kLanes) + kLanes;
  s.block = reinterpret_cast<float*>(take(4 * s.batch * x.dim));
  s.factor = reinterpret_cast<float*>(take(4 * units));
  s.mean_lanes = reinterpret_cast<float*>(take(4 * s.stride));
  s.top = reinterpret_cast<int32_t*>(take(4 * units));
  s.scale_codes = reinterpret_cast<uint32_t*>(take(4 * units));
  s.opened = take(s.batch * x.dim);
  s.rows = reinterpret_cast<uint8_t**>(take(s.batch * int64_t(sizeof(uint8_t*))));
  s.ahead = reinterpret_cast<uint8_t**>(take(s.batch * int64_t(sizeof(uint8_t*))));
  return used;
}

inline const uint8_t* row_of(const Rows& x, const Section& t, int64_t head, int64_t rank) {
  return x.data + head * x.head_stride + (t.index == nullptr ? rank : int64_t(t.index[rank])) * x.token_stride;
}

// Widens n elements; returns the largest magnitude's pattern, which tells what is not finite.
template <Dtype D>
KVFERRY_APART uint32_t widen_row(const uint8_t* __restrict from, int64_t stride, int64_t n, float* __restrict to) {
  using Bits = typename Traits<D>::Bits;
  constexpr uint32_t magnitude = D == Dtype::fp32 ? 0x7FFFFFFF : 0x7FFF;
  int32_t worst = 0;
  if (stride == kItem<D>) {
    for (int64_t c = 0; c < n; ++c) {
      const uint32_t pattern = read<Bits>(from + c * kItem<D>);
      worst = most(worst, int32_t(pattern & magnitude));
      to[c] = value_of<D>(pattern);
    }
  } else {
    for (int64_t c = 0; c < n; ++c) {
      const uint32_t pattern = read<Bits>(from + c * stride);
      worst = most(worst, int32_t(pattern & magnitude));
      to[c] = value_of<D>(pattern);
    }
  }
  return uint32_t(worst);
}

// Rounds n values to the dtype, limited to its finite range; every NaN becomes the canonical one.
template <Dtype D>
inline typename Traits<D>::Bits narrowed(float value) {
  constexpr float limit = Traits<D>::limit;
  const uint32_t none = ones_if(value != value);
  const float low = value < -limit ? -limit : value, kept = low > limit ? limit : low;
  return typename Traits<D>::Bits((pattern_of<D>(kept) & ~none) | (Traits<D>::nan & none));
}

template <Dtype D>
KVFERRY_APART void narrow_row(const float* __restrict from, int64_t n, uint8_t* __restrict to, int64_t stride) {
  if (stride == kItem<D>) {
    for (int64_t c = 0; c < n; ++c) write(to + c * kItem<D>, narrowed<D>(from[c]));
  } else {
    for (int64_t c = 0; c < n; ++c) write(to + c * stride, narrowed<D>(from[c]));
  }
}

KVFERRY_APART void subtract(float* __restrict x, const float* __restrict mean, int64_t n) {
  for (int64_t c = 0; c < n; ++c) {
    const float v = x[c] - mean[c];
    const float low = v < -kLargestFloat ? -kLargestFloat : v;
    x[c] = low > kLargestFloat ? kLargestFloat : low;
  }
}

// A NaN or an infinity where there is one.
KVFERRY_APART float largest_magnitude(const float* __restrict x, int64_t n) {
  int32_t best = 0;
  for (int64_t c = 0; c < n; ++c) best = most(best, int32_t(bits_of(x[c]) & 0x7FFFFFFF));
  return float_of(uint32_t(best));
}

KVFERRY_APART void scale_by(float* __restrict x, float factor, int64_t n) {
  for (int64_t c = 0; c < n; ++c) x[c] = x[c] * factor;
}

KVFERRY_APART void floor_codes(const float* __restrict x, float inverse, int32_t half, int64_t n,
                               uint8_t* __restrict codes) {
  for (int64_t c = 0; c < n; ++c) {
    const float v = x[c] * inverse;
    int32_t q = int32_t(v);
    q -= int32_t(v < float(q));
    q = q < -half ? -half : q;
    q = q > half - 1 ? half - 1 : q;
    codes[c] = uint8_t(q + half);
  }
}

KVFERRY_APART void open_codes(const uint8_t* __restrict codes, float middle, float factor, int64_t n,
                              float* __restrict x) {
  for (int64_t c = 0; c < n; ++c) x[c] = (float(codes[c]) - middle) * factor;
}

// Times the group's width, limited to fp32's range, and the mean put back.
KVFERRY_APART void finish_group(float* __restrict x, float width, const float* __restrict mean, int64_t n) {
  for (int64_t c = 0; c < n; ++c) {
    const float v = x[c] * width;
    const float low = v < -kLargestFloat ? -kLargestFloat : v;
    x[c] = low > kLargestFloat ? kLargestFloat : low;
  }
  if (mean != nullptr)
    for (int64_t c = 0; c < n; ++c) x[c] = x[c] + mean[c];
}

inline void pack_codes(int bits, const uint8_t* codes, uint8_t* out, int64_t n) {
  switch (bits) {
    case 2: return V::template pack<2>(codes, out, n);
    case 3: return V::template pack<3>(codes, out, n);
    case 4: return V::template pack<4>(codes, out, n);
    case 5: return V::template pack<5>(codes, out, n);
    case 6: return V::template pack<6>(codes, out, n);
    default: return V::template pack<8>(codes, out, n);
  }
}

inline void unpack_codes(int bits, const uint8_t* in, uint8_t* codes, int64_t n) {
  switch (bits) {
    case 2: return V::template unpack<2>(in, codes, n);
    case 3: return V::template unpack<3>(in, codes, n);
    case 4: return V::template unpack<4>(in, codes, n);
    case 5: return V::template unpack<5>(in, codes, n);
    case 6: return V::template unpack<6>(in, codes, n);
    default: return V::template unpack<8>(in, codes, n);
  }
}

// A head's means, as the section holds them. What is not finite is none, where a section was damaged.
template <Dtype D>
const float* mean_of(const Rows& x, const Section& t, int64_t head, const Rotated& s) {
  if (t.family != Family::cen) return nullptr;
  widen_row<D>(t.minima + head * x.dim * kItem<D>, kItem<D>, x.dim, s.mean);
  for (int64_t c = 0; c < x.dim; ++c) {
    const uint32_t pattern = read<typename Traits<D>::Bits>(t.minima + (head * x.dim + c) * kItem<D>);
    if ((pattern & (D == Dtype::fp32 ? 0x7FFFFFFF : 0x7FFF)) >= Traits<D>::infinity) s.mean[c] = float_of(0x7FC00000);
  }
  return s.mean;
}

template <Dtype D>
KVFERRY_APART void encode_rotated(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                                  Rotated& s) {
  const int half = 1 << (t.bits - 1);
  const int64_t width = rotated_width(x, t), padded = up(width, 8);
  const float* mean = mean_of<D>(x, t, head, s);
  __builtin_memset(s.codes, 0, size_t(padded));
  for (int64_t rank = first; rank < last; ++rank) {
    const uint8_t* row = row_of(x, t, head, rank);
    uint8_t* scales = t.scales + (head * t.count + rank) * t.groups * 2;
    for (int64_t from = 0; from < x.dim; scales += 2) {
      const int64_t size = group_width(x, t, from), count = least(size, x.dim - from);
      const uint32_t worst = widen_row<D>(row + from * x.dim_stride, x.dim_stride, count, s.values);
      if (worst >= Traits<D>::infinity) {
        write(scales, uint16_t(kMarked));
        __builtin_memset(s.codes + from, 0, size_t(size));
        from += size;
        continue;
      }
      if (mean != nullptr) subtract(s.values, mean + from, count);
      scale_by(s.values, 1.0f / float(size), count);
      if (count < size) __builtin_memset(s.values + count, 0, size_t(size - count) * 4);
      rotate(s.values, size);
      const uint32_t code = scale_code(largest_magnitude(s.values, size) * (1.0f / float(half)));
      const float scale = float_of(code << 15);
      write(scales, uint16_t(code));
      floor_codes(s.values, scale == 0.0f ? 0.0f : 1.0f / scale, half, size, s.codes + from);
      from += size;
    }
    pack_codes(t.bits, s.codes, t.codes + (head * t.count + rank) * t.row_bytes, padded);
  }
}

template <Dtype D>
KVFERRY_APART void decode_rotated(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                                  Rotated& s) {
  const float middle = float(1 << (t.bits - 1)) - 0.5f;
  const int64_t padded = up(rotated_width(x, t), 8);
  const float* mean = mean_of<D>(x, t, head, s);
  for (int64_t rank = first; rank < last; ++rank) {
    uint8_t* row = const_cast<uint8_t*>(row_of(x, t, head, rank));
    const uint8_t* scales = t.scales + (head * t.count + rank) * t.groups * 2;
    unpack_codes(t.bits, t.codes + (head * t.count + rank) * t.row_bytes, s.codes, padded);
    for (int64_t from = 0; from < x.dim; scales += 2) {
      const int64_t size = group_width(x, t, from), count = least(size, x.dim - from);
      const uint32_t code = read<uint16_t>(scales);
      if (code > kLargestScale) {
        for (int64_t c = 0; c < count; ++c) s.values[c] = float_of(0x7FC00000);
      } else {
        open_codes(s.codes + from, middle, float_of(code << 15) * (1.0f / float(size)), size, s.values);
        rotate(s.values, size);
        finish_group(s.values, float(size), mean == nullptr ? nullptr : mean + from, count);
      }
      narrow_row<D>(s.values, count, row + from * x.dim_stride, x.dim_stride);
      from += size;
    }
  }
}

// Rows whose groups are all of N channels, elements side by side.
template <Dtype D, int N>
KVFERRY_APART void encode_groups(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                                 Rotated& s) {
  const int32_t half = 1 << (t.bits - 1);
  const float* mean = mean_of<D>(x, t, head, s);
  for (int64_t rank = first; rank < last; ++rank) {
    const uint8_t* row = row_of(x, t, head, rank);
    const int64_t place = head * t.count + rank;
    for (int64_t g = 0; g < t.groups; ++g) {
      uint8_t *scale_at = t.scales + (place * t.groups + g) * 2, *codes = s.codes + g * N;
      const float* own = mean == nullptr ? nullptr : mean + g * N;
      if (!encode_group<D, N>(row + g * N * kItem<D>, own, half, scale_at, codes)) {
        write(scale_at, uint16_t(kMarked));
        __builtin_memset(codes, 0, N);
      }
    }
    pack_codes(t.bits, s.codes, t.codes + place * t.row_bytes, x.dim);
  }
}

template <Dtype D, int N>
KVFERRY_APART void decode_groups(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                                 Rotated& s) {
  const float middle = float(1 << (t.bits - 1)) - 0.5f;
  const float* mean = mean_of<D>(x, t, head, s);
  for (int64_t rank = first; rank < last; ++rank) {
    uint8_t* row = const_cast<uint8_t*>(row_of(x, t, head, rank));
    const int64_t place = head * t.count + rank;
    unpack_codes(t.bits, t.codes + place * t.row_bytes, s.codes, x.dim);
    for (int64_t g = 0; g < t.groups; ++g) {
      const uint32_t code = read<uint16_t>(t.scales + (place * t.groups + g) * 2);
      const float scale = float_of(code > kLargestScale ? 0x7FC00000 : code << 15);
      decode_group<D, N>(s.codes + g * N, scale, middle, mean == nullptr ? nullptr : mean + g * N,
                         row + g * N * kItem<D>);
    }
  }
}

#include "kernels_means.hpp"

#if defined(__AVX512F__)
#include "avx512_rotated.hpp"
#endif

// Rows of groups of N channels, elements side by side.
template <Dtype D, int N>
void code_groups(bool encode, const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last, Rotated& s) {
#if defined(__AVX512F__)
  encode ? encode_batches<D, N>(x, t, head, first, last, s) : decode_batches<D, N>(x, t, head, first, last, s);
#else
  encode ? encode_groups<D, N>(x, t, head, first, last, s) : decode_groups<D, N>(x, t, head, first, last, s);
#endif
}

template <Dtype D>
void code_rotated(bool encode, const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                  uint8_t* scratch, bool stream) {
  Rotated s;
  s.stream = stream;
  carve_rotated(s, x, t, scratch);
  if (x.dim_stride == kItem<D>) {
    if (t.groups * 64 == x.dim) return code_groups<D, 64>(encode, x, t, head, first, last, s);
    if (t.groups * 128 == x.dim) return code_groups<D, 128>(encode, x, t, head, first, last, s);
    if (t.groups * 256 == x.dim) return code_groups<D, 256>(encode, x, t, head, first, last, s);
  }
  encode ? encode_rotated<D>(x, t, head, first, last, s) : decode_rotated<D>(x, t, head, first, last, s);
}

void any_rotated(bool encode, const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                 uint8_t* scratch, bool stream) {
  if (x.dtype == Dtype::bf16) return code_rotated<Dtype::bf16>(encode, x, t, head, first, last, scratch, stream);
  if (x.dtype == Dtype::fp16) return code_rotated<Dtype::fp16>(encode, x, t, head, first, last, scratch, stream);
  code_rotated<Dtype::fp32>(encode, x, t, head, first, last, scratch, stream);
}

inline bool is_rotated(const Section& t) { return t.family == Family::had || t.family == Family::cen; }
