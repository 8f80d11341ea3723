// The algorithm of every kernel, written once over the vector type `V` of a CPU level; included inside an anonymous
// namespace (see scalar.hpp) after `V` is defined. Rows are handled in batches: the ranges of all first, then all scales at
// once (a division costs as much for sixteen as for one, and its latency is paid once a batch), then the codes.

constexpr int kRows = 64;  // most rows in a batch
constexpr int kFew = 4;    // by channel, rows at a time: read from end to end, with parameters fetched not too often
constexpr float kSafeFloor = 7.888609052210118e-31f;  // 2^-100: nothing below it can round to a subnormal
constexpr float kHuge = 1e38f;

struct Scratch {
  uint8_t* const* rows;         // the batch's rows: target or staged
  uint8_t** target = found[0];  // where they are in the tensor
  uint8_t** ahead = found[1];   // rows to be fetched while this batch is coded: the next one's, mostly
  int64_t ahead_rank = -1;
  uint8_t* found[2][kRows];
  uint8_t* staged[kRows];       // where they are in the scratch block, if gathered
  int batch;          // rows a batch: all of it stays in the first cache level
  uint8_t* gathered;  // a batch of elements, where rows cannot be read or written where they are
  bool stream;        // rows of decode go from there, codes of encode from `coded`, to their place by streaming stores
  uint8_t* coded;     // encode: a batch of packed rows
  uint8_t* codes;     // a batch of rows, one byte a code, each padded by V::U
  int32_t *low_keys, *high_keys;
  float *low, *factor, *low_lanes, *factor_lanes;  // factor: 1 / scale in encode, scale in decode
  uint32_t *scale_codes, *minima;
  uint8_t** units;  // where each (row, group) of a batch starts
  uint8_t* range;  // chan: three rows of patterns
  int64_t gathered_stride, codes_stride;
};

inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Carves the scratch block; with base == nullptr it only measures.
inline size_t carve(Scratch& s, const Rows& x, const Section& t, bool encode, bool stream, uint8_t* base) {
  const int64_t width = up(x.dim, V::U) + V::U;
  const int64_t fitting = (16 << 10) / (x.dim * item_bytes(x.dtype)) / kLanes * kLanes;
  s.batch = int(most<int64_t>(kLanes, least<int64_t>(kRows, fitting)));
  const int64_t units = up(t.family == Family::chan ? width : s.batch * t.groups, 64);
  size_t used = 0;
  auto take = [&](int64_t bytes) {
    uint8_t* at = base ? base + used : nullptr;
    used += size_t(up(bytes, 64));
    return at;
  };
  s.gathered_stride = up(width * item_bytes(x.dtype), 64);
  s.codes_stride = up(width, 64);
  s.stream = stream;
  const bool direct = x.dim_stride == item_bytes(x.dtype) && (encode || !stream);
  s.gathered = direct && base ? nullptr : take(s.gathered_stride * s.batch);
  s.coded = take(t.row_bytes * s.batch + 64);
  s.codes = take(s.codes_stride * s.batch + 64);
  s.low_keys = reinterpret_cast<int32_t*>(take(units * 4));
  s.high_keys = reinterpret_cast<int32_t*>(take(units * 4));
  s.low = reinterpret_cast<float*>(take(units * 4));
  s.factor = reinterpret_cast<float*>(take(units * 4));
  s.low_lanes = reinterpret_cast<float*>(take(units * 4));
  s.factor_lanes = reinterpret_cast<float*>(take(units * 4));
  s.scale_codes = reinterpret_cast<uint32_t*>(take(units * 4));
  s.minima = reinterpret_cast<uint32_t*>(take(units * 4));
  s.units = reinterpret_cast<uint8_t**>(take(units * int64_t(sizeof(uint8_t*))));
  s.range = take(3 * units * 4);
  return used;
}

// Whether every group of a row is made of whole vectors, all of one size.
inline bool in_vectors(const Rows& x, int64_t size) { return size % V::U == 0 && x.dim % size == 0; }

template <Dtype D>
KVFERRY_APART void find_rows(Scratch& s, const Rows& x, const Section& t, int64_t head, int64_t rank, int n, bool gather,
                             int64_t ahead = 0) {
  uint8_t* base = x.data + head * x.head_stride;
  const auto find = [&](uint8_t** rows, int64_t from, int64_t count) {
    if (t.index == nullptr)
      for (int64_t i = 0; i < count; ++i) rows[i] = base + (from + i) * x.token_stride;
    else
      for (int64_t i = 0; i < count; ++i) rows[i] = base + t.index[from + i] * x.token_stride;
  };
  if (s.ahead_rank == rank) {  // found already, when the last batch looked ahead
    uint8_t** const swapped = s.target;
    s.target = s.ahead;
    s.ahead = swapped;
    s.ahead_rank = -1;
  } else {
    find(s.target, rank, n);
  }
  if (ahead > 0) {
    const int64_t next = rank + ahead, count = most<int64_t>(0, least<int64_t>(s.batch, t.count - next));
    find(s.ahead, next, count);
    for (int64_t i = count; i < n; ++i) s.ahead[i] = base;
    s.ahead_rank = next;
  }
  s.rows = s.target;
  if (s.gathered == nullptr) return;
  using Bits = typename Traits<D>::Bits;
  for (int i = 0; i < n; ++i) {
    s.staged[i] = s.gathered + i * s.gathered_stride;
    if (gather)
      for (int64_t c = 0; c < x.dim; ++c)
        write(s.staged[i] + c * kItem<D>, read<Bits>(s.target[i] + c * x.dim_stride));
  }
  s.rows = s.staged;
}

// ---- encode -------------------------------------------------------------------------------------------------------

// What a batch holds beside plain units: the careful functions handle such a batch.
constexpr uint32_t kPlain = 0, kSomeCapped = 2;  // and 1: some marked

// Scales and inverses of n rows from their largest magnitudes' patterns.
template <Dtype D>
KVFERRY_APART uint32_t finish_symmetric(const int32_t* __restrict amax, float* __restrict inverse,
                                        uint32_t* __restrict code, int64_t n, float qmax) {
  constexpr int32_t infinity = int32_t(Traits<D>::infinity);
  uint32_t found = kPlain;
  for (int64_t i = 0; i < up(n, kLanes); ++i) {
    const uint32_t c = scale_code(value_of<D>(uint32_t(amax[i])) / qmax);
    const float scale = float_of(c << 15), inv = 1.0f / scale;
    const bool marked = amax[i] >= infinity;
    inverse[i] = float_of(bits_of(inv) & ~ones_if(scale == 0.0f));
    code[i] = c | (ones_if(marked) & kMarked);
    found |= uint32_t(marked);
  }
  return found;
}

// Minima, scales and inverses of n groups from the order keys of their extremes.
template <Dtype D>
KVFERRY_APART uint32_t finish_ranges(const int32_t* __restrict low_key, const int32_t* __restrict high_key,
                                     float* __restrict low, float* __restrict inverse, uint32_t* __restrict code,
                                     uint32_t* __restrict minima, int64_t n, float levels) {
  constexpr int32_t infinity = int32_t(Traits<D>::infinity);
  uint32_t found = kPlain;
  for (int64_t i = 0; i < up(n, kLanes); ++i) {
    const bool marked = (high_key[i] >= infinity) | (low_key[i] <= ~infinity);
    const uint32_t pattern = pattern_of_key<D>(low_key[i] & int32_t(~ones_if((low_key[i] == -1) | marked)));
    const float lo = value_of<D>(pattern), hi = value_of<D>(pattern_of_key<D>(high_key[i]));
    const uint32_t c = scale_code((hi - lo) / levels);
    const float scale = float_of(c << 15), inv = 1.0f / scale;
    minima[i] = pattern;
    low[i] = lo;
    inverse[i] = float_of(bits_of(inv) & ~ones_if((scale == 0.0f) | marked));
    code[i] = c | (ones_if(marked) & kMarked);
    found |= uint32_t(marked) | uint32_t(c == kLargestScale) << 1;
  }
  return found;
}

// Past the caches: whole lines by streaming stores, and what is left at both ends by plain ones.
KVFERRY_APART void stream_out(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const int64_t head = least(bytes, int64_t(-reinterpret_cast<uintptr_t>(to) & 63)), whole = (bytes - head) / 64 * 64;
  __builtin_memcpy(to, from, size_t(head));
  V::stream_row(to + head, from + head, whole);
  __builtin_memcpy(to + head + whole, from + head + whole, size_t(bytes - head - whole));
}

template <class Word>
KVFERRY_APART void write_words(uint8_t* out, const uint32_t* __restrict words, int64_t n) {
  for (int64_t i = 0; i < n; ++i) write(out + i * int64_t(sizeof(Word)), Word(words[i]));
}

template <Dtype D, int BITS, bool SYM>
inline typename V::Codes code_block(typename V::Floats f, typename V::One lo, typename V::One inverse) {
  if constexpr (SYM) return V::template round<D, true>(V::times(f, inverse), 1 << (BITS - 1));
  return V::template round<D, false>(V::minus_times(f, lo, inverse), 0);
}

// The first read of a row would wait for memory while the arithmetic rests: so rows are fetched one batch ahead.
template <int LEVEL = 1>
inline void fetch(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, LEVEL == 1 ? 3 : 2);
}

// Plain rows whose groups are whole vectors.
template <Dtype D, int BITS, bool SYM>
KVFERRY_APART void code_rows(uint8_t* const* rows, uint8_t* const* ahead, int n, const float* low, const float* inverse, int64_t groups,
                             int64_t size, uint8_t* out, int64_t row_bytes, uint8_t* buffer) {
  constexpr int64_t kStep = V::U * kItem<D>;
  if constexpr (V::U == 64) {
    if (size == 64 && groups == 1) {
      for (int i = 0; i < n; ++i) {
        fetch(ahead[i], kStep);
        V::template pack_one<BITS>(code_block<D, BITS, SYM>(V::template load<D>(rows[i]), V::one(SYM ? 0.0f : low[i]),
                                                            V::one(inverse[i])),
                                   out + i * row_bytes);
      }
      return;
    }
  }
  for (int i = 0; i < n; ++i, out += row_bytes) {
    uint8_t* codes = BITS == 8 ? out : buffer;
    const uint8_t *row = rows[i], *next = ahead[i];
    for (int64_t g = 0; g < groups; ++g) {
      const auto lo = V::one(SYM ? 0.0f : low[i * groups + g]), inv = V::one(inverse[i * groups + g]);
      for (int64_t c = 0; c < size; c += V::U, codes += V::U, row += kStep, next += kStep) {
        fetch(next, kStep);
        V::store(codes, code_block<D, BITS, SYM>(V::template load<D>(row), lo, inv));
      }
    }
    if (BITS != 8) V::template pack<BITS>(buffer, out, groups * size);
  }
}

// Any rows. Whole vectors may run over the end of a group into the rest of the row: the next group, coded after it,
// overwrites them.
template <Dtype D, int BITS, bool SYM>
KVFERRY_APART void code_rows_careful(const Scratch& s, int n, int64_t dim, int64_t groups, int64_t size, uint8_t* out,
                                     int64_t row_bytes) {
  constexpr float levels = float((1 << BITS) - 1);
  const int64_t padded = up(dim, 8);
  uint8_t* codes = s.codes;
  for (int i = 0; i < n; ++i, out += row_bytes) {
    const uint8_t* row = s.rows[i];
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t from = g * size, count = least(size, dim - from), unit = i * groups + g;
      const float lo = SYM ? 0.0f : s.low[unit], inv = s.factor[unit];
      if (s.scale_codes[unit] == kMarked) {
        __builtin_memset(codes + from, 0, size_t(count));
      } else if (!SYM && s.scale_codes[unit] == kLargestScale) {
        quantize_capped<D>(row + from * kItem<D>, codes + from, count, lo, inv, levels);
      } else {
        for (int64_t c = from; c < from + count; c += V::U) {
          const uint8_t* at = row + c * kItem<D>;
          const auto f = c + V::U <= dim ? V::template load<D>(at) : V::template load_part<D>(at, int(dim - c));
          V::store(codes + c, code_block<D, BITS, SYM>(f, V::one(lo), V::one(inv)));
        }
      }
    }
    __builtin_memset(codes + dim, 0, size_t(padded - dim));
    V::template pack<BITS>(codes, out, padded);
  }
}

template <Dtype D, bool SYM>
KVFERRY_APART void find_ranges(Scratch& s, int n, int64_t dim, int64_t groups, int64_t size, bool vectors) {
  uint8_t* const* units = s.rows;
  if (groups > 1) {
    units = s.units;
    for (int i = 0; i < n; ++i)
      for (int64_t g = 0; g < groups; ++g) s.units[i * groups + g] = s.rows[i] + g * size * kItem<D>;
  }
  const int64_t count = n * groups;
  if (vectors) {
    for (int64_t unit = 0; unit < count; unit += kLanes) {
      uint8_t* const* some = units + unit;
      uint8_t* filled[kLanes];
      if (unit + kLanes > count) {
        for (int k = 0; k < kLanes; ++k) filled[k] = units[least(unit + k, count - 1)];
        some = filled;
      }
      if constexpr (SYM)
        V::template amax_batch<D>(some, size, s.high_keys + unit);
      else
        V::template minmax_batch<D>(some, size, s.low_keys + unit, s.high_keys + unit);
    }
    return;
  }
  for (int64_t unit = 0; unit < count; ++unit) {
    if constexpr (SYM)
      s.high_keys[unit] = int32_t(V::template amax<D>(units[unit], size));
    else
      V::template minmax<D>(units[unit], least(size, dim - unit % groups * size), s.low_keys + unit,
                            s.high_keys + unit);
  }
  for (int64_t unit = count; unit < up(count, kLanes); ++unit) s.low_keys[unit] = s.high_keys[unit] = 0;
}

template <Dtype D, int BITS, bool SYM>
KVFERRY_APART void encode_rowwise(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                                  Scratch& s) {
  const int64_t groups = t.groups, size = SYM ? x.dim : least(t.group, x.dim);
  const bool vectors = in_vectors(x, size);
  for (int64_t rank = first; rank < last; rank += s.batch) {
    const int n = int(least<int64_t>(s.batch, last - rank));
    const int64_t unit0 = (head * t.count + rank) * groups;
    find_rows<D>(s, x, t, head, rank, n, true, s.batch);
    find_ranges<D, SYM>(s, n, x.dim, groups, size, vectors);
    uint32_t found;
    if constexpr (SYM) {
      found = finish_symmetric<D>(s.high_keys, s.factor, s.scale_codes, n, float((1 << (BITS - 1)) - 1));
    } else {
      found = finish_ranges<D>(s.low_keys, s.high_keys, s.low, s.factor, s.scale_codes, s.minima, n * groups,
                               float((1 << BITS) - 1));
      write_words<typename Traits<D>::Bits>(t.minima + unit0 * kItem<D>, s.minima, n * groups);
    }
    write_words<uint16_t>(t.scales + unit0 * 2, s.scale_codes, n * groups);
    uint8_t *place = t.codes + (head * t.count + rank) * t.row_bytes, *out = s.stream ? s.coded : place;
    if (vectors && found == kPlain)
      code_rows<D, BITS, SYM>(s.rows, s.ahead, n, s.low, s.factor, groups, size, out, t.row_bytes, s.codes);
    else
      code_rows_careful<D, BITS, SYM>(s, n, x.dim, groups, size, out, t.row_bytes);
    if (s.stream) stream_out(place, out, n * t.row_bytes);
  }
}

template <Dtype D, int BITS, bool CAP>
inline typename V::Codes code_channel_block(typename V::Floats f, const typename V::Floats& low,
                                            const typename V::Floats& inverse) {
  auto v = V::minus_times(f, low, inverse);
  if constexpr (CAP) v = V::cap(v, V::one(float((1 << BITS) - 1)));
  return V::template round<D, false>(v, 0);
}

// Rows of one vector: the channels' parameters stay in registers.
template <Dtype D, int BITS, bool CAP>
KVFERRY_APART void code_short_channels(const Scratch& s, int n, uint8_t* out, int64_t row_bytes) {
  const auto low = V::floats(s.low_lanes), inverse = V::floats(s.factor_lanes);
  for (int i = 0; i < n; ++i) {
    fetch(s.ahead[i], V::U * kItem<D>);
    V::template pack_one<BITS>(code_channel_block<D, BITS, CAP>(V::template load<D>(s.rows[i]), low, inverse),
                               out + i * row_bytes);
  }
}

template <Dtype D, int BITS, bool CAP>
KVFERRY_APART void code_channels(const Scratch& s, int n, int64_t dim, uint8_t* out, int64_t row_bytes) {
  if constexpr (V::U == 64)
    if (dim == 64) return code_short_channels<D, BITS, CAP>(s, n, out, row_bytes);
  const int64_t padded = up(dim, 8), whole = dim / V::U * V::U;
  for (int first = 0; first < n; first += kFew) {
    const int few = least(kFew, n - first);
    uint8_t* const* rows = s.rows + first;
    for (int64_t c = 0; c < whole; c += V::U) {
      const auto low = V::floats(s.low_lanes + c), inverse = V::floats(s.factor_lanes + c);
      for (int i = 0; i < few; ++i) {
        fetch<2>(s.ahead[first + i] + c * kItem<D>, V::U * kItem<D>);
        V::store(s.codes + i * s.codes_stride + c,
                 code_channel_block<D, BITS, CAP>(V::template load<D>(rows[i] + c * kItem<D>), low, inverse));
      }
    }
    for (int i = 0; i < few; ++i) {
      uint8_t* codes = s.codes + i * s.codes_stride;
      if (whole < dim) {
        const auto part = V::template load_part<D>(rows[i] + whole * kItem<D>, int(dim - whole));
        V::store(codes + whole, code_channel_block<D, BITS, CAP>(part, V::floats(s.low_lanes + whole),
                                                                 V::floats(s.factor_lanes + whole)));
        for (int64_t c = dim; c < padded; ++c) codes[c] = 0;
      }
      V::template pack<BITS>(codes, out + (first + i) * row_bytes, padded);
    }
  }
}

// Order keys of the extremes by channel, from what V::range gathers: the keys themselves, or the signed maximum and the
// unsigned extremes of sign-magnitude patterns, which take fewer instructions a row.
template <Dtype D>
KVFERRY_APART void find_keys(const typename Traits<D>::Bits* __restrict highest,
                             const typename Traits<D>::Bits* __restrict largest,
                             const typename Traits<D>::Bits* __restrict smallest, int32_t* __restrict low_keys,
                             int32_t* __restrict high_keys, int64_t n) {
  using Bits = typename Traits<D>::Bits;
  constexpr int unused = 32 - 8 * int(sizeof(Bits));
  constexpr Bits sign = Bits(Bits(1) << (8 * sizeof(Bits) - 1));
  for (int64_t c = 0; c < n; ++c) {
    if constexpr (V::kRangeInKeys) {
      low_keys[c] = int32_t(uint32_t(largest[c]) << unused) >> unused;
      high_keys[c] = int32_t(uint32_t(highest[c]) << unused) >> unused;
    } else {
      low_keys[c] = order_key<D>(largest[c] & sign ? largest[c] : smallest[c]);
      high_keys[c] = order_key<D>(highest[c] & sign ? smallest[c] : highest[c]);
    }
  }
}

template <Dtype D, int BITS>
KVFERRY_APART void encode_channels(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                                   Scratch& s) {
  using Bits = typename Traits<D>::Bits;
  const int64_t dim = x.dim, padded = up(dim, 64);
  Bits* highest = reinterpret_cast<Bits*>(s.range);
  Bits *largest = highest + padded, *smallest = largest + padded;
  // While a block is coded the next one is fetched, if the second cache level has room for both.
  const int64_t ahead = t.group * dim * kItem<D> <= (256 << 10) ? t.group : s.batch;
  for (int64_t start = first; start < last; start += t.group) {
    const int64_t stop = least(start + t.group, last);
    for (int64_t rank = start; rank < stop; rank += s.batch) {
      const int n = int(least<int64_t>(s.batch, stop - rank));
      find_rows<D>(s, x, t, head, rank, n, true);
      for (int64_t c = 0; c < dim; c += V::U)
        V::template range<D>(s.rows, n, c, int(least<int64_t>(V::U, dim - c)), highest + c, largest + c, smallest + c,
                             rank == start);
    }
    find_keys<D>(highest, largest, smallest, s.low_keys, s.high_keys, dim);
    for (int64_t c = dim; c < up(dim, kLanes); ++c) s.low_keys[c] = s.high_keys[c] = 0;
    const int64_t block = (head * t.groups + start / t.group) * dim;
    const uint32_t found = finish_ranges<D>(s.low_keys, s.high_keys, s.low, s.factor, s.scale_codes, s.minima, dim,
                                            float((1 << BITS) - 1));
    write_words<Bits>(t.minima + block * kItem<D>, s.minima, dim);
    write_words<uint16_t>(t.scales + block * 2, s.scale_codes, dim);
    for (int64_t c = 0; c < dim; c += V::U) {
      V::template lanes_in<D>(s.low + c, s.low_lanes + c);
      V::template lanes_in<D>(s.factor + c, s.factor_lanes + c);
    }
    for (int64_t rank = start; rank < stop; rank += s.batch) {
      const int n = int(least<int64_t>(s.batch, stop - rank));
      find_rows<D>(s, x, t, head, rank, n, true, ahead);
      uint8_t* out = t.codes + (head * t.count + rank) * t.row_bytes;
      if (found & kSomeCapped)
        code_channels<D, BITS, true>(s, n, dim, out, t.row_bytes);
      else
        code_channels<D, BITS, false>(s, n, dim, out, t.row_bytes);
    }
  }
}

#include "kernels_rotated.hpp"
#include "kernels_decode.hpp"
#include "kernels_choice.hpp"
