// Vectors of floats as wide as a CPU level has them, and groups of channels held in them: for kernels_rotated.hpp, which
// includes this. Every sum is rounded on its own and in the documented order, so that vectors of any width give the
// oracle's bits.

#if defined(__AVX512F__)
#define KVFERRY_EACH_LANE(F) \
  F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)
constexpr int kWide = 16;
#elif defined(__AVX__)
#define KVFERRY_EACH_LANE(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7)
constexpr int kWide = 8;
#else
#define KVFERRY_EACH_LANE(F) F(0), F(1), F(2), F(3)
constexpr int kWide = 4;
#endif

using WideFloats = float __attribute__((vector_size(4 * kWide)));
using WideBits = uint32_t __attribute__((vector_size(4 * kWide)));

constexpr float kLargestFloat = 3.4028234663852886e38f;

// Lanes i and i ^ D change places; D is below kWide.
template <int D>
inline WideFloats partners(WideFloats v) {
#define KVFERRY_PARTNER(i) ((i) ^ D)
#if defined(__clang__)
  return __builtin_shufflevector(v, v, KVFERRY_EACH_LANE(KVFERRY_PARTNER));
#else
  constexpr WideBits order = {KVFERRY_EACH_LANE(KVFERRY_PARTNER)};
  return __builtin_shuffle(v, order);
#endif
#undef KVFERRY_PARTNER
}

// Butterflies at distance D within one vector: (a, b) becomes (a + b, a - b).
template <int D>
inline WideFloats butterfly(WideFloats v) {
  if constexpr (D < kWide) {
#define KVFERRY_SIGN(i) ((i) & D ? 0x80000000u : 0u)
    constexpr WideBits signs = {KVFERRY_EACH_LANE(KVFERRY_SIGN)};
#undef KVFERRY_SIGN
    return partners<D>(v) + (WideFloats)((WideBits)v ^ signs);
  }
  return v;
}

using WideInts = int32_t __attribute__((vector_size(4 * kWide)));
using WideHalves = uint16_t __attribute__((vector_size(2 * kWide)));
using WideBytes = uint8_t __attribute__((vector_size(kWide)));

template <class T>
inline T take_wide(const void* p) {
  T v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
inline void give_wide(void* p, T v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// Between bytes and words by way of halves: compilers take a step of two at once element by element.
inline WideInts widen_codes(const uint8_t* p) {
  return __builtin_convertvector(__builtin_convertvector(take_wide<WideBytes>(p), WideHalves), WideInts);
}

inline WideBytes narrow_codes(WideInts codes) {
  return __builtin_convertvector(__builtin_convertvector(codes, WideHalves), WideBytes);
}

// kWide elements that follow each other; `worst` gathers the magnitudes of their patterns.
template <Dtype D>
inline WideFloats widen_lanes(const uint8_t* p, WideInts& worst) {
  WideBits pattern;
  if constexpr (D == Dtype::fp32)
    pattern = take_wide<WideBits>(p);
  else
    pattern = __builtin_convertvector(take_wide<WideHalves>(p), WideBits);
  const WideInts magnitude = (WideInts)(pattern & (D == Dtype::fp32 ? 0x7FFFFFFF : 0x7FFF));
  worst = magnitude > worst ? magnitude : worst;
  if constexpr (D == Dtype::fp32) return (WideFloats)pattern;
  if constexpr (D == Dtype::bf16) return (WideFloats)(pattern << 16);
  return (WideFloats)((WideBits)((WideFloats)(magnitude << 13) * kTwoTo112) | (pattern & 0x8000) << 16);
}

inline WideFloats limited(WideFloats v, float limit) {  // a NaN stays
  const WideFloats least_value = WideFloats{} - limit, most_value = WideFloats{} + limit;
  v = v < least_value ? least_value : v;
  return v > most_value ? most_value : v;
}

template <Dtype D>
inline void narrow_lanes(WideFloats v, uint8_t* p) {
  const WideBits none = (WideBits)(v != v), bits = (WideBits)limited(v, Traits<D>::limit);
  if constexpr (D == Dtype::fp32) give_wide(p, (bits & ~none) | (none & Traits<D>::nan));
  if constexpr (D == Dtype::bf16) {
    const WideBits rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    give_wide(p, __builtin_convertvector((rounded & ~none) | (none & Traits<D>::nan), WideHalves));
  }
  if constexpr (D == Dtype::fp16) {  // see pattern_of
    const WideBits magnitude = bits & 0x7FFFFFFF;
    const WideBits small = (WideBits)((WideFloats)magnitude + 0.5f) - 0x3F000000;
    const WideBits normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    const WideBits half = (WideInts)magnitude < (113 << 23) ? small : normal;
    const WideBits rounded = (bits >> 16 & 0x8000) | half;
    give_wide(p, __builtin_convertvector((rounded & ~none) | (none & Traits<D>::nan), WideHalves));
  }
}

template <int D>
inline WideInts larger_of_partners(WideInts v) {
  if constexpr (D >= kWide) return v;
  const WideInts other = (WideInts)partners<D>((WideFloats)v);
  return other > v ? other : v;
}

inline int32_t largest_lane(WideInts v) {
  v = larger_of_partners<1>(larger_of_partners<2>(larger_of_partners<4>(larger_of_partners<8>(v))));
  return v[0];
}

// A group of N channels in registers.
template <int N>
struct Lanes {
  static constexpr int kCount = N / kWide;
  WideFloats v[kCount];

  void rotate() {
    for (auto& one : v) one = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(one))));
    for (int distance = 1; distance < kCount; distance *= 2)
      for (int start = 0; start < kCount; start += 2 * distance)
        for (int i = start; i < start + distance; ++i) {
          const WideFloats a = v[i], b = v[i + distance];
          v[i] = a + b;
          v[i + distance] = a - b;
        }
  }
};

// A plain group: false where a value is not finite. `mean` may be null.
template <Dtype D, int N>
inline bool encode_group(const uint8_t* row, const float* mean, int32_t half, uint8_t* scale_at, uint8_t* codes) {
  Lanes<N> x;
  WideInts worst = {};
  for (int k = 0; k < x.kCount; ++k) x.v[k] = widen_lanes<D>(row + k * kWide * kItem<D>, worst);
  if (uint32_t(largest_lane(worst)) >= Traits<D>::infinity) return false;
  for (int k = 0; k < x.kCount; ++k) {
    if (mean != nullptr) x.v[k] = limited(x.v[k] - take_wide<WideFloats>(mean + k * kWide), kLargestFloat);
    x.v[k] = x.v[k] * (1.0f / float(N));
  }
  x.rotate();
  WideInts top = {};
  for (const auto& one : x.v) {
    const WideInts magnitude = (WideInts)one & 0x7FFFFFFF;
    top = magnitude > top ? magnitude : top;
  }
  const uint32_t code = scale_code(float_of(uint32_t(largest_lane(top))) * (1.0f / float(half)));
  const float scale = float_of(code << 15), inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  write(scale_at, uint16_t(code));
  const WideInts lowest = WideInts{} - half, highest = WideInts{} + (half - 1);
  for (int k = 0; k < x.kCount; ++k) {
    const WideFloats y = x.v[k] * inverse;
    WideInts q = __builtin_convertvector(y, WideInts);
    q += (WideInts)(y < __builtin_convertvector(q, WideFloats));  // a comparison that holds is -1
    q = q < lowest ? lowest : q;
    q = q > highest ? highest : q;
    give_wide(codes + k * kWide, narrow_codes(q + half));
  }
  return true;
}

template <Dtype D, int N>
inline void decode_group(const uint8_t* codes, float scale, float middle, const float* mean, uint8_t* row) {
  Lanes<N> x;
  const float factor = scale * (1.0f / float(N));
  for (int k = 0; k < x.kCount; ++k) {
    const WideInts q = widen_codes(codes + k * kWide);
    x.v[k] = (__builtin_convertvector(q, WideFloats) - middle) * factor;
  }
  x.rotate();
  for (int k = 0; k < x.kCount; ++k) {
    WideFloats y = limited(x.v[k] * float(N), kLargestFloat);
    if (mean != nullptr) y = y + take_wide<WideFloats>(mean + k * kWide);
    narrow_lanes<D>(y, row + k * kWide * kItem<D>);
  }
}
