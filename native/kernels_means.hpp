// Means of a centred section (docs/quantizers.md, "centred"), included by kernels_rotated.hpp. The tree of sums of
// neighbours is a binary counter: level l holds the sum of 2^l rows until the next one comes, so that rows are read in
// their order and once.

KVFERRY_APART void add_row(float* __restrict x, const float* __restrict other, int64_t n) {
  for (int64_t c = 0; c < n; ++c) x[c] = x[c] + other[c];
}

inline float* level_of(const Rotated& s, int level) { return s.sums + level * s.stride; }

// What the counter holds when all rows are in: into `s.mean`.
inline void close_sums(const Rotated& s, int64_t rows, int64_t dim) {
  int level = 0;
  while ((rows >> level & 1) == 0) ++level;
  __builtin_memcpy(s.mean, level_of(s, level), size_t(dim) * 4);
  for (++level; rows >> level != 0; ++level)
    if (rows >> level & 1) add_row(s.mean, level_of(s, level), dim);
}

#if defined(__AVX512F__)
template <Dtype D>
bool sum_batches(const Rows& x, const Section& t, int64_t head, const Rotated& s);  // avx512_rotated.hpp
#else
// Rows as they come, elements side by side in whole vectors; returns whether all of them are finite.
template <Dtype D>
KVFERRY_APART bool sum_plain_rows(const Rows& x, const Section& t, int64_t head, const Rotated& s) {
  WideInts worst = {};
  const int64_t pairs = t.count / 2, ahead = most<int64_t>(2, (4 << 10) / (x.dim * kItem<D>));  // a page away
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const uint8_t *one = row_of(x, t, head, 2 * pair), *other = row_of(x, t, head, 2 * pair + 1);
    fetch(row_of(x, t, head, least(2 * pair + ahead, t.count - 1)), x.dim * kItem<D>);
    fetch(row_of(x, t, head, least(2 * pair + ahead + 1, t.count - 1)), x.dim * kItem<D>);
    for (int64_t c = 0; c < x.dim; c += kWide) {
      WideFloats sum = widen_lanes<D>(one + c * kItem<D>, worst) + widen_lanes<D>(other + c * kItem<D>, worst);
      int level = 1;
      for (int64_t carry = pair; carry & 1; carry >>= 1, ++level)
        sum = take_wide<WideFloats>(level_of(s, level) + c) + sum;
      give_wide(level_of(s, level) + c, sum);
    }
  }
  if (t.count & 1)
    for (int64_t c = 0; c < x.dim; c += kWide)
      give_wide(level_of(s, 0) + c, widen_lanes<D>(row_of(x, t, head, t.count - 1) + c * kItem<D>, worst));
  close_sums(s, t.count, x.dim);
  return uint32_t(largest_lane(worst)) < Traits<D>::infinity;
}
#endif

// Any rows; those that are not finite count as zeros. Returns how many are.
template <Dtype D>
KVFERRY_APART int64_t sum_rows(const Rows& x, const Section& t, int64_t head, const Rotated& s) {
  int64_t finite = 0;
  for (int64_t rank = 0; rank < t.count; ++rank) {
    const bool good = widen_row<D>(row_of(x, t, head, rank), x.dim_stride, x.dim, s.values) < Traits<D>::infinity;
    if (!good) __builtin_memset(s.values, 0, size_t(x.dim) * 4);
    finite += good;
    int level = 0;
    for (int64_t carry = rank; carry & 1; carry >>= 1, ++level) add_row(s.values, level_of(s, level), x.dim);
    __builtin_memcpy(level_of(s, level), s.values, size_t(x.dim) * 4);
  }
  close_sums(s, t.count, x.dim);
  return finite;
}

template <Dtype D>
void write_means(const Rows& x, const Section& t, int64_t head, Rotated& s) {
  int64_t finite = t.count;
  bool done = false;
#if defined(__AVX512F__)
  if (x.dim_stride == kItem<D> && x.dim % 64 == 0) done = sum_batches<D>(x, t, head, s);
#else
  if (x.dim_stride == kItem<D> && x.dim % kWide == 0) done = sum_plain_rows<D>(x, t, head, s);
#endif
  if (!done) finite = sum_rows<D>(x, t, head, s);
  const float share = 1.0f / float(finite > 0 ? finite : 1);
  for (int64_t c = 0; c < x.dim; ++c) {
    const float mean = s.mean[c] * share;
    s.mean[c] = mean == mean ? mean : 0.0f;  // sums beyond fp32 of both signs
  }
  narrow_row<D>(s.mean, x.dim, t.minima + head * x.dim * kItem<D>, kItem<D>);
}

// The means of a head, into the section; before any of its tokens is encoded.
void means(const Rows& x, const Section& t, int64_t head, uint8_t* scratch) {
  Rotated s;
  carve_rotated(s, x, t, scratch);
  if (x.dtype == Dtype::bf16) return write_means<Dtype::bf16>(x, t, head, s);
  if (x.dtype == Dtype::fp16) return write_means<Dtype::fp16>(x, t, head, s);
  return write_means<Dtype::fp32>(x, t, head, s);
}
