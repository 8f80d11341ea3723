// Second half of kernels.hpp: from packed codes back to elements, and the functions of the table.

// Scales and minima of n units as fp32. A unit that is marked, or hostile (non-finite), gets a NaN scale and a zero
// minimum, so that plain arithmetic gives the canonical NaN. Returns whether the fast store may not be exact for some
// unit, because values may leave the finite range or be subnormal.
template <Dtype D, bool SYM>
KVFERRY_APART bool open_units(const uint8_t* scale_bytes, const uint8_t* minima,
                              float* __restrict low, float* __restrict scale,
                              int64_t n, int bits) {
  using Bits = typename Traits<D>::Bits;
  const float most_levels = float(1 << bits);
  int any = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t code = read<uint16_t>(scale_bytes + 2 * i);
    const uint32_t stored = SYM ? 0 : read<Bits>(minima + i * kItem<D>);
    const uint32_t magnitude = D == Dtype::fp32 ? stored & 0x7FFFFFFF : stored & 0x7FFF;
    const bool marked = (code > kLargestScale) | (magnitude >= Traits<D>::infinity);
    const uint32_t keep = ~ones_if(marked);
    const float lo = value_of<D>(stored & keep), size = value_of<D>(magnitude & keep);
    const float step = float_of((code << 15 & keep) | (0x7FC00000u & ~keep));
    const bool plain = (size + step * most_levels < least(kHuge, Traits<D>::limit / 2)) & (step >= kSafeFloor) &
                       ((size == 0.0f) | (size >= kSafeFloor));
    low[i] = lo;
    scale[i] = step;
    any |= int(!plain);
  }
  return any != 0;
}

template <Dtype D, int BITS>
constexpr bool kLookUp = D != Dtype::fp32 && BITS <= V::kTableBits;

template <int BITS, bool SYM, bool SAFE>
inline typename V::Floats value_block(typename V::Floats f, typename V::One low, typename V::One scale) {
  if constexpr (SYM)
    return V::template centred<SAFE>(f, 1 << (BITS - 1), scale);
  else
    return V::times_plus(f, scale, low);
}

// Rows whose groups are whole vectors; SAFE where some unit is not plain. Narrow codes are looked up among the group's
// 2^BITS values. BLOCKS: codes come straight from the packed row.
template <Dtype D, int BITS, bool SYM, bool SAFE, bool BLOCKS>
KVFERRY_APART void fill_rows(const uint8_t* in, int64_t row_bytes, uint8_t* const* rows, int n, const float* low,
                             const float* scale, int64_t groups, int64_t size, uint8_t* buffer) {
  const int64_t dim = groups * size;
  for (int i = 0; i < n; ++i, in += row_bytes) {
    uint8_t* row = rows[i];
    if constexpr (!BLOCKS) V::template unpack<BITS>(in, buffer, dim);
    const auto codes = [&](int64_t c) {
      if constexpr (BLOCKS) return V::template unpack_block<BITS>(in, dim, c);
      else return V::load_codes(buffer + c);
    };
    int64_t c = 0;
    for (int64_t unit = i * groups; unit < (i + 1) * groups; ++unit) {
      const int64_t stop = c + size;
      if constexpr (kLookUp<D, BITS>) {
        const auto table = V::template make_table<D, BITS, SYM, SAFE>(low[unit], scale[unit]);
        for (; c < stop; c += V::U) V::look_up(table, codes(c), row + c * kItem<D>);
      } else {
        const auto lo = V::one(low[unit]), step = V::one(scale[unit]);
        for (; c < stop; c += V::U)
          V::template put<D, SAFE>(row + c * kItem<D>,
                                   value_block<BITS, SYM, SAFE>(V::template widen<D>(codes(c)), lo, step));
      }
    }
  }
}

// The commonest row, of one vector, without the loops.
template <Dtype D, int BITS, bool SYM, bool SAFE>
KVFERRY_APART void fill_short_rows(const uint8_t* in, int64_t row_bytes, uint8_t* const* rows, int n,
                                   const float* low, const float* scale) {
  for (int i = 0; i < n; ++i, in += row_bytes) {
    uint8_t* row = rows[i];
    const auto codes = V::template unpack_block<BITS>(in, 64, 0);
    if constexpr (kLookUp<D, BITS>)
      V::look_up(V::template make_table<D, BITS, SYM, SAFE>(low[i], scale[i]), codes, row);
    else
      V::template put<D, SAFE>(
          row, value_block<BITS, SYM, SAFE>(V::template widen<D>(codes), V::one(low[i]), V::one(scale[i])));
  }
}

template <Dtype D, int BITS, bool SYM, bool SAFE>
void fill_any_rows(const Scratch& s, const uint8_t* in, int64_t row_bytes, int n, int64_t groups, int64_t size) {
  if constexpr (V::U == 64) {
    if (size == 64 && groups == 1)
      return fill_short_rows<D, BITS, SYM, SAFE>(in, row_bytes, s.rows, n, s.low, s.factor);
    if (V::in_blocks(groups * size))
      return fill_rows<D, BITS, SYM, SAFE, true>(in, row_bytes, s.rows, n, s.low, s.factor, groups, size, s.codes);
  }
  fill_rows<D, BITS, SYM, SAFE, false>(in, row_bytes, s.rows, n, s.low, s.factor, groups, size, s.codes);
}

// Any rows, by arithmetic; vectors do not run over a group.
template <Dtype D, int BITS, bool SYM>
KVFERRY_APART void fill_rows_careful(const Scratch& s, const uint8_t* in, int64_t row_bytes, int n, int64_t dim,
                                     int64_t groups, int64_t size) {
  for (int i = 0; i < n; ++i, in += row_bytes) {
    uint8_t* row = s.rows[i];
    V::template unpack<BITS>(in, s.codes, up(dim, 8));
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t stop = least(g * size + size, dim), unit = i * groups + g;
      const auto lo = V::one(s.low[unit]), step = V::one(s.factor[unit]);
      for (int64_t c = g * size; c < stop; c += V::U) {
        const auto v = value_block<BITS, SYM, true>(V::template widen<D>(V::load_codes(s.codes + c)), lo, step);
        if (c + V::U <= stop)
          V::template put<D, true>(row + c * kItem<D>, v);
        else
          V::template put_part<D>(row + c * kItem<D>, int(stop - c), v);
      }
    }
  }
}

// Brings decoded rows from the scratch block to where they belong, if they were not decoded there.
template <Dtype D>
KVFERRY_APART void scatter_rows(const Scratch& s, const Rows& x, int n) {
  if (s.gathered == nullptr) return;
  using Bits = typename Traits<D>::Bits;
  for (int i = 0; i < n; ++i) {
    if (s.stream) {
      V::stream_row(s.target[i], s.rows[i], x.dim * kItem<D>);
      continue;
    }
    for (int64_t c = 0; c < x.dim; ++c) write(s.target[i] + c * x.dim_stride, read<Bits>(s.rows[i] + c * kItem<D>));
  }
}

template <Dtype D, int BITS, bool SYM>
KVFERRY_APART void decode_rowwise(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                                  Scratch& s) {
  const int64_t groups = t.groups, size = SYM ? x.dim : least(t.group, x.dim);
  const bool vectors = in_vectors(x, size);
  for (int64_t rank = first; rank < last; rank += s.batch) {
    const int n = int(least<int64_t>(s.batch, last - rank));
    const int64_t unit0 = (head * t.count + rank) * groups;
    find_rows<D>(s, x, t, head, rank, n, false);
    const bool safe = open_units<D, SYM>(t.scales + unit0 * 2, t.minima + unit0 * kItem<D>, s.low, s.factor,
                                         n * groups, BITS);
    const uint8_t* in = t.codes + (head * t.count + rank) * t.row_bytes;
    if (!vectors)
      fill_rows_careful<D, BITS, SYM>(s, in, t.row_bytes, n, x.dim, groups, size);
    else if (safe)
      fill_any_rows<D, BITS, SYM, true>(s, in, t.row_bytes, n, groups, size);
    else
      fill_any_rows<D, BITS, SYM, false>(s, in, t.row_bytes, n, groups, size);
    scatter_rows<D>(s, x, n);
  }
}

template <Dtype D, int BITS, bool SAFE, bool BLOCKS>
KVFERRY_APART void fill_channels(const Scratch& s, const uint8_t* in, int64_t row_bytes, int n, int64_t dim) {
  const int64_t whole = dim / V::U * V::U;
  for (int first = 0; first < n; first += kFew) {
    const int few = least(kFew, n - first);
    uint8_t* const* rows = s.rows + first;
    const uint8_t* packed = in + first * row_bytes;
    if constexpr (!BLOCKS)
      for (int i = 0; i < few; ++i)
        V::template unpack<BITS>(packed + i * row_bytes, s.codes + i * s.codes_stride, up(dim, 8));
    const auto values = [&](int i, int64_t c, const typename V::Floats& low, const typename V::Floats& scale) {
      if constexpr (BLOCKS)
        return V::times_plus(V::template widen<D>(V::template unpack_block<BITS>(packed + i * row_bytes, dim, c)),
                             scale, low);
      else
        return V::times_plus(V::template widen<D>(V::load_codes(s.codes + i * s.codes_stride + c)), scale, low);
    };
    for (int64_t c = 0; c < whole; c += V::U) {
      const auto low = V::floats(s.low_lanes + c), scale = V::floats(s.factor_lanes + c);
      for (int i = 0; i < few; ++i) V::template put<D, SAFE>(rows[i] + c * kItem<D>, values(i, c, low, scale));
    }
    if (!BLOCKS && whole < dim) {
      const auto low = V::floats(s.low_lanes + whole), scale = V::floats(s.factor_lanes + whole);
      for (int i = 0; i < few; ++i)
        V::template put_part<D>(rows[i] + whole * kItem<D>, int(dim - whole), values(i, whole, low, scale));
    }
  }
}

// Rows of one vector: the channels' parameters stay in registers.
template <Dtype D, int BITS, bool SAFE>
KVFERRY_APART void fill_short_channels(const Scratch& s, const uint8_t* in, int64_t row_bytes, int n) {
  const auto low = V::floats(s.low_lanes), scale = V::floats(s.factor_lanes);
  for (int i = 0; i < n; ++i)
    V::template put<D, SAFE>(
        s.rows[i],
        V::times_plus(V::template widen<D>(V::template unpack_block<BITS>(in + i * row_bytes, 64, 0)), scale, low));
}

template <Dtype D, int BITS, bool SAFE>
void fill_any_channels(const Scratch& s, const uint8_t* in, int64_t row_bytes, int n, int64_t dim) {
  if constexpr (V::U == 64) {
    if (dim == 64) return fill_short_channels<D, BITS, SAFE>(s, in, row_bytes, n);
    if (V::in_blocks(dim)) return fill_channels<D, BITS, SAFE, true>(s, in, row_bytes, n, dim);
  }
  fill_channels<D, BITS, SAFE, false>(s, in, row_bytes, n, dim);
}

template <Dtype D, int BITS>
KVFERRY_APART void decode_channels(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last,
                                   Scratch& s) {
  const int64_t dim = x.dim;
  for (int64_t start = first; start < last; start += t.group) {
    const int64_t stop = least(start + t.group, last), block = (head * t.groups + start / t.group) * dim;
    const bool safe =
        open_units<D, false>(t.scales + block * 2, t.minima + block * kItem<D>, s.low, s.factor, dim, BITS);
    for (int64_t c = 0; c < dim; c += V::U) {
      V::template lanes_out<D>(s.low + c, s.low_lanes + c);
      V::template lanes_out<D>(s.factor + c, s.factor_lanes + c);
    }
    for (int64_t rank = start; rank < stop; rank += s.batch) {
      const int n = int(least<int64_t>(s.batch, stop - rank));
      find_rows<D>(s, x, t, head, rank, n, false);
      const uint8_t* in = t.codes + (head * t.count + rank) * t.row_bytes;
      if (safe)
        fill_any_channels<D, BITS, true>(s, in, t.row_bytes, n, dim);
      else
        fill_any_channels<D, BITS, false>(s, in, t.row_bytes, n, dim);
      scatter_rows<D>(s, x, n);
    }
  }
}

// ---- raw, and the table -------------------------------------------------------------------------------------------

template <Dtype D>
void copy_rows(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last, Scratch& s, bool encode) {
  uint8_t* packed = t.codes + (head * t.count + first) * t.row_bytes;
  const size_t bytes = size_t(t.row_bytes);
  for (int64_t rank = first; rank < last; rank += s.batch) {
    const int n = int(least<int64_t>(s.batch, last - rank));
    find_rows<D>(s, x, t, head, rank, n, encode);
    for (int i = 0; i < n; ++i, packed += bytes)
      encode ? __builtin_memcpy(packed, s.rows[i], bytes)
             : __builtin_memcpy(s.rows[i], packed, bytes);
    if (!encode) scatter_rows<D>(s, x, n);
  }
}

using Work = void (*)(const Rows&, const Section&, int64_t, int64_t, int64_t, Scratch&);

template <Dtype D>
void encode_raw(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last, Scratch& s) {
  copy_rows<D>(x, t, head, first, last, s, true);
}

template <Dtype D>
void decode_raw(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last, Scratch& s) {
  copy_rows<D>(x, t, head, first, last, s, false);
}

template <Dtype D, int BITS>
Work choose_family(bool encode, Family family) {
  if (family == Family::sym) return encode ? &encode_rowwise<D, BITS, true> : &decode_rowwise<D, BITS, true>;
  if (family == Family::asym) return encode ? &encode_rowwise<D, BITS, false> : &decode_rowwise<D, BITS, false>;
  return encode ? &encode_channels<D, BITS> : &decode_channels<D, BITS>;
}

template <Dtype D>
Work choose_bits(bool encode, const Section& t) {
  if (t.family == Family::raw) return encode ? &encode_raw<D> : &decode_raw<D>;
  switch (t.bits) {
    case 2: return choose_family<D, 2>(encode, t.family);
    case 3: return choose_family<D, 3>(encode, t.family);
    case 4: return choose_family<D, 4>(encode, t.family);
    case 5: return choose_family<D, 5>(encode, t.family);
    case 6: return choose_family<D, 6>(encode, t.family);
    default: return choose_family<D, 8>(encode, t.family);
  }
}

Work choose(bool encode, const Rows& x, const Section& t) {
  if (x.dtype == Dtype::bf16) return choose_bits<Dtype::bf16>(encode, t);
  if (x.dtype == Dtype::fp16) return choose_bits<Dtype::fp16>(encode, t);
  return choose_bits<Dtype::fp32>(encode, t);
}

// Streaming stores need whole, aligned cache lines.
bool may_stream(const Rows& x) {
  const uint64_t row = uint64_t(x.dim * item_bytes(x.dtype));
  return V::kStreams && x.dim_stride == item_bytes(x.dtype) &&
         (reinterpret_cast<uintptr_t>(x.data) | uint64_t(x.head_stride) | uint64_t(x.token_stride) | row) % 64 == 0;
}

size_t scratch_bytes(const Rows& x, const Section& t) {
  if (is_rotated(t)) {
    Rotated s;
    return carve_rotated(s, x, t, nullptr);
  }
  Scratch s;
  return carve(s, x, t, false, true, nullptr);
}

void encode(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last, uint8_t* scratch,
            bool stream) {
  if (is_rotated(t)) return any_rotated(true, x, t, head, first, last, scratch, false);
  Scratch s;
  carve(s, x, t, true, stream && V::kStreams, scratch);
  choose(true, x, t)(x, t, head, first, last, s);
}

void decode(const Rows& x, const Section& t, int64_t head, int64_t first, int64_t last, uint8_t* scratch,
            bool stream) {
  if (is_rotated(t)) return any_rotated(false, x, t, head, first, last, scratch, stream && may_stream(x));
  Scratch s;
  carve(s, x, t, false, stream && may_stream(x), scratch);
  choose(false, x, t)(x, t, head, first, last, s);
}
