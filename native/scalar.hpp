// Scalar arithmetic of the codec, and the packing of short rows: included by every kernel file *inside* an anonymous
// namespace, so that no function compiled for a newer CPU can be picked by the linker for an older one. For the same
// reason kernel files include no standard header that defines non-trivial inline functions.

// Tight loops apart from each other keep their registers, and are compiled once.
#define KVFERRY_APART [[gnu::noinline]]

constexpr int kLanes = 16;  // arrays of units are padded to this
constexpr float kTwoTo112 = 5192296858534827628530496329220096.0f;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

template <class T>
inline T read(const uint8_t* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof(T));
  return value;
}

template <class T>
inline void write(uint8_t* p, T value) {
  __builtin_memcpy(p, &value, sizeof(T));
}

template <class T>
inline T least(T a, T b) {
  return b < a ? b : a;
}

template <class T>
inline T most(T a, T b) {
  return a < b ? b : a;
}

template <Dtype D>
struct Traits;
template <>
struct Traits<Dtype::bf16> {
  using Bits = uint16_t;
  static constexpr uint32_t infinity = 0x7F80, nan = 0x7FC0;
  static constexpr float limit = 3.3895313892515355e38f;
};
template <>
struct Traits<Dtype::fp16> {
  using Bits = uint16_t;
  static constexpr uint32_t infinity = 0x7C00, nan = 0x7E00;
  static constexpr float limit = 65504.0f;
};
template <>
struct Traits<Dtype::fp32> {
  using Bits = uint32_t;
  static constexpr uint32_t infinity = 0x7F800000, nan = 0x7FC00000;
  static constexpr float limit = 3.4028234663852886e38f;
};

template <Dtype D>
constexpr int64_t kItem = int64_t(sizeof(typename Traits<D>::Bits));

// The exact fp32 value of a pattern. A NaN or infinity in fp16 comes out finite: those rows are told by their pattern.
template <Dtype D>
inline float value_of(uint32_t pattern) {
  if constexpr (D == Dtype::bf16) return float_of(pattern << 16);
  if constexpr (D == Dtype::fp32) return float_of(pattern);
  const float magnitude = float_of((pattern & 0x7FFF) << 13) * kTwoTo112;
  return float_of(bits_of(magnitude) | (pattern & 0x8000) << 16);
}

// Pattern of an fp32 value that is NaN (the canonical one) or within the finite range; round to nearest even.
template <Dtype D>
inline typename Traits<D>::Bits pattern_of(float value) {
  const uint32_t bits = bits_of(value);
  if constexpr (D == Dtype::fp32) return bits;
  if constexpr (D == Dtype::bf16) return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  // Subnormal halves: adding 0.5 puts the unit of the last place at 2^-24, which is theirs.
  const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
  const uint32_t normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  const uint32_t half = magnitude < (113u << 23) ? small : normal;
  return uint16_t(sign | (magnitude > 0x7F800000 ? Traits<D>::nan : half));
}

// Patterns as integers in the order of their values: NaNs lie beyond the infinities, -0 just below 0.
template <Dtype D>
inline int32_t order_key(uint32_t pattern) {
  if constexpr (D == Dtype::fp32) return int32_t(pattern ^ uint32_t(int32_t(pattern) >> 31) >> 1);
  const int32_t wide = int16_t(pattern);
  return wide ^ (wide >> 31 & 0x7FFF);
}

template <Dtype D>
inline uint32_t pattern_of_key(int32_t key) {
  if constexpr (D == Dtype::fp32) return uint32_t(key) ^ uint32_t(key >> 31) >> 1;
  return uint32_t(key ^ (key >> 31 & 0x7FFF)) & 0xFFFF;
}

// The scale format: fp32 without sign and 15 low mantissa bits, to nearest; 0 below 2^-126, 0xFEFF at most.
constexpr uint32_t kMarked = 0xFFFF, kLargestScale = 0xFEFF;

// All ones where the condition holds. Loops that select with it are vectorised into plain stores; with ?: compilers
// make masked stores, which later loads have to wait for.
inline uint32_t ones_if(bool condition) { return 0u - uint32_t(condition); }

inline uint32_t scale_code(float scale) {
  const uint32_t code = least<uint32_t>((bits_of(scale) + 0x4000) >> 15, kLargestScale);
  return code & ~ones_if(scale < 1.17549435e-38f);
}

// Codes of one group whose scale was capped (its range overflows fp32): the only place where the upper clamp acts.
template <Dtype D>
inline void quantize_capped(const uint8_t* source, uint8_t* codes, int64_t n, float lo, float inverse, float levels) {
  for (int64_t i = 0; i < n; ++i) {
    float v = (value_of<D>(read<typename Traits<D>::Bits>(source + i * kItem<D>)) - lo) * inverse;
    v = v < levels ? v : levels;
    codes[i] = uint8_t(bits_of(v + 12582912.0f));  // 1.5 * 2^23: the sum's low bits are v rounded to nearest even
  }
}

// Planes of a packed row, lowest bits first; `step` codes at distance dp / per share a byte.
inline void pack_plane(const uint8_t* codes, uint8_t* out, int64_t bytes, int64_t from, int shift, int bits) {
  const int per = 8 / bits;
  for (int64_t j = from; j < bytes; ++j) {
    unsigned byte = 0;
    for (int k = 0; k < per; ++k) byte |= unsigned(codes[j + k * bytes] >> shift & ((1 << bits) - 1)) << (k * bits);
    out[j] = uint8_t(byte);
  }
}

inline void pack_ones(const uint8_t* codes, uint8_t* out, int64_t bytes, int64_t from, int shift) {
  for (int64_t j = from; j < bytes; ++j) {
    const uint64_t ones = read<uint64_t>(codes + 8 * j) >> shift & 0x0101010101010101u;
    out[j] = uint8_t(ones * 0x0102040810204080u >> 56);
  }
}

inline void unpack_plane(const uint8_t* in, uint8_t* codes, int64_t bytes, int64_t from, int shift, int bits) {
  const int per = 8 / bits;
  for (int64_t j = from; j < bytes; ++j)
    for (int k = 0; k < per; ++k) {
      const uint8_t part = uint8_t((in[j] >> (k * bits) & ((1 << bits) - 1)) << shift);
      codes[j + k * bytes] = shift ? uint8_t(codes[j + k * bytes] | part) : part;
    }
}

inline void unpack_ones(const uint8_t* in, uint8_t* codes, int64_t bytes, int64_t from, int shift) {
  for (int64_t j = from; j < bytes; ++j) {
    const uint64_t spread = (in[j] * 0x0101010101010101u & 0x8040201008040201u) + 0x7F7F7F7F7F7F7F7Fu;
    const uint64_t ones = spread >> 7 & 0x0101010101010101u;  // no byte carries: bit k of the byte, alone, plus 0x7F
    write(codes + 8 * j, read<uint64_t>(codes + 8 * j) | ones << shift);
  }
}

template <int BITS>
inline void pack_scalar(const uint8_t* codes, uint8_t* out, int64_t n) {
  if constexpr (BITS == 8) __builtin_memcpy(out, codes, size_t(n));
  if constexpr (BITS == 4 || BITS == 5 || BITS == 6) pack_plane(codes, out, n / 2, 0, 0, 4);
  if constexpr (BITS == 2 || BITS == 3) pack_plane(codes, out, n / 4, 0, 0, 2);
  if constexpr (BITS == 6) pack_plane(codes, out + n / 2, n / 4, 0, 4, 2);
  if constexpr (BITS == 5) pack_ones(codes, out + n / 2, n / 8, 0, 4);
  if constexpr (BITS == 3) pack_ones(codes, out + n / 4, n / 8, 0, 2);
}

template <int BITS>
inline void unpack_scalar(const uint8_t* in, uint8_t* codes, int64_t n) {
  if constexpr (BITS == 8) __builtin_memcpy(codes, in, size_t(n));
  if constexpr (BITS == 4 || BITS == 5 || BITS == 6) unpack_plane(in, codes, n / 2, 0, 0, 4);
  if constexpr (BITS == 2 || BITS == 3) unpack_plane(in, codes, n / 4, 0, 0, 2);
  if constexpr (BITS == 6) unpack_plane(in + n / 2, codes, n / 4, 0, 4, 2);
  if constexpr (BITS == 5) unpack_ones(in + n / 2, codes, n / 8, 0, 4);
  if constexpr (BITS == 3) unpack_ones(in + n / 4, codes, n / 8, 0, 2);
}
