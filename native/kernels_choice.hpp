// What the choice among quantisers asks: whether all is finite, what a quantiser did to each token, and each token's best
// tier. Included by kernels.hpp. Plain loops that compilers vectorise; every order of sums is the torch oracle's.

// Whether the magnitudes of all patterns lie below `infinity`; `stride` in bytes.
template <class Int>
KVFERRY_APART bool finite_elements(const uint8_t* data, int64_t count, int64_t stride, Int infinity) {
  constexpr int64_t kSize = int64_t(sizeof(Int)), kBlock = (64 << 10) / kSize;
  constexpr Int magnitude = Int(~(uint64_t(1) << (8 * kSize - 1)));
  for (int64_t from = 0; from < count; from += kBlock) {
    const uint8_t* block = data + from * stride;
    const int64_t n = least(kBlock, count - from);
    Int worst = 0;
    if (stride == kSize)
      for (int64_t i = 0; i < n; ++i) worst = most<Int>(worst, Int(read<Int>(block + i * kSize) & magnitude));
    else
      for (int64_t i = 0; i < n; ++i) worst = most<Int>(worst, Int(read<Int>(block + i * stride) & magnitude));
    if (worst >= infinity) return false;
  }
  return true;
}

bool finite(const uint8_t* data, int64_t count, int64_t stride, int item, uint64_t infinity) {
  if (item == 2) return finite_elements<int16_t>(data, count, stride, int16_t(infinity));
  if (item == 4) return finite_elements<int32_t>(data, count, stride, int32_t(infinity));
  return finite_elements<int64_t>(data, count, stride, int64_t(infinity));
}

constexpr int kSums = 16;  // channels 16 apart are added up one after the other, then the first half takes the second

template <Dtype D>
KVFERRY_APART void square_rows(const Rows& x, const int32_t* index, int64_t count, const uint8_t* decoded,
                               const float* weights, float* sums, bool add) {
  using Bits = typename Traits<D>::Bits;
  constexpr int kParts = kSums / kWide;
  const int64_t whole = x.dim_stride == kItem<D> ? x.dim / kSums * kSums : 0;
  WideInts unused = {};
  for (int64_t rank = 0; rank < count; ++rank, decoded += x.dim * kItem<D>) {
    const uint8_t* row = x.data + (index == nullptr ? rank : int64_t(index[rank])) * x.token_stride;
    WideFloats parts[kParts] = {};
    for (int64_t c = 0; c < whole; c += kSums)
      for (int k = 0; k < kParts; ++k) {
        const int64_t at = c + k * kWide;
        const WideFloats lost = widen_lanes<D>(row + at * kItem<D>, unused) - widen_lanes<D>(decoded + at * kItem<D>, unused);
        const WideFloats weighted = lost * take_wide<WideFloats>(weights + at);
        parts[k] = parts[k] + weighted * weighted;
      }
    float lanes[kSums];
    for (int k = 0; k < kParts; ++k) give_wide(lanes + k * kWide, parts[k]);
    for (int64_t c = whole; c < x.dim; ++c) {
      const float lost = value_of<D>(read<Bits>(row + c * x.dim_stride)) - value_of<D>(read<Bits>(decoded + c * kItem<D>));
      const float weighted = lost * weights[c];
      lanes[c % kSums] = lanes[c % kSums] + weighted * weighted;
    }
    for (int half = kSums / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
    sums[rank] = add ? sums[rank] + lanes[0] : lanes[0];
  }
}

// Weighted squared errors of the rows of one head, each row added up; `decoded` has the selected rows side by side.
void squares(const Rows& x, const int32_t* index, int64_t count, const uint8_t* decoded, const float* weights,
             float* sums, bool add) {
  if (x.dtype == Dtype::bf16) return square_rows<Dtype::bf16>(x, index, count, decoded, weights, sums, add);
  if (x.dtype == Dtype::fp16) return square_rows<Dtype::fp16>(x, index, count, decoded, weights, sums, add);
  square_rows<Dtype::fp32>(x, index, count, decoded, weights, sums, add);
}

constexpr int64_t kTokens = 64;  // of a block, whose best tiers so far stay in registers or the first cache level

inline void choose_block(const Menu& menu, int64_t from, int64_t n, uint8_t* tiers, float* chosen) {
  float lowest[kTokens];
  int32_t best[kTokens];
  const float* error = menu.error + from;
  for (int64_t i = 0; i < n; ++i) {
    chosen[i] = error[i];
    lowest[i] = error[i] + menu.cost[0];
    best[i] = 0;
  }
  for (int64_t tier = 1; tier < menu.tiers; ++tier) {
    const float cost = menu.cost[tier];
    if (bits_of(cost) == Traits<Dtype::fp32>::infinity) continue;
    const float* here = error + tier * menu.tokens;
    for (int64_t i = 0; i < n; ++i) {
      const float total = here[i] + cost;
      const bool better = total < lowest[i];
      chosen[i] = better ? here[i] : chosen[i];
      lowest[i] = better ? total : lowest[i];
      best[i] = better ? int32_t(tier) : best[i];
    }
  }
  for (int64_t i = 0; i < n; ++i) tiers[i] = uint8_t(best[i]);
}

// The tier of the least error + cost for each token, the first of equals; their errors are summed as in
// kvferry/ship/policy/optimal.py.
void choose_tiers(const Menu& menu, uint8_t* tiers, double* error) {
  double sums[8] = {};
  for (int64_t from = 0; from < menu.tokens; from += kTokens) {
    float chosen[kTokens] = {};
    if (menu.tokens - from >= kTokens)
      choose_block(menu, from, kTokens, tiers + from, chosen);
    else
      choose_block(menu, from, menu.tokens - from, tiers + from, chosen);
    for (int64_t i = 0; i < kTokens; i += 8)
      for (int k = 0; k < 8; ++k) sums[k] = sums[k] + double(chosen[i + k]);
  }
  for (int half = 4; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) sums[k] = sums[k] + sums[k + half];
  *error = sums[0];
}

// How many tokens that count have each tier.
void count_tiers(const uint8_t* tiers, const uint8_t* sent, int64_t n, int64_t most_tiers, int64_t* counts) {
  for (int64_t tier = 0; tier < most_tiers; ++tier) {
    int64_t total = 0;
    for (int64_t from = 0; from < n; from += 128) {
      uint8_t some = 0;
      const int64_t stop = least<int64_t>(n, from + 128);
      for (int64_t i = from; i < stop; ++i) some = uint8_t(some + ((tiers[i] == uint8_t(tier)) & sent[i]));
      total += some;
    }
    counts[tier] = total;
  }
}
