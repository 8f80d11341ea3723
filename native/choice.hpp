// What the choice among quantisers asks of the kernels, for whole tensors and all parts of a cache.
#pragma once

#include <cstdint>
#include <vector>

#include "codec.hpp"

namespace kvferry {

// Elements in up to four dimensions; strides are in bytes and not negative.
struct Elements {
  const uint8_t* data;
  int64_t sizes[4], strides[4];
  int item;  // bytes of an element
};

// Whether the magnitudes of all patterns lie below `infinity`.
bool all_finite(const Kernels& kernels, const Elements& x, uint64_t infinity, int threads);

// What writing the section's tokens and reading them back does to each: the squared error, channels weighted by
// `weights` (heads, dim), summed over channels and heads into `sums`. The section's layout is set, its data is not.
void measure(const Kernels& kernels, const Rows& x, const Section& section, const float* weights, float* sums,
             int threads);

// All parts of a cache, with what they have in common: arrays of `parts`, sizes of `tiers`, `batch` and `tokens`.
struct Parts {
  int64_t parts, tiers, batch, tokens;
  const float *error, *cost;  // (parts, tiers, batch, tokens), (parts, tiers)
  const uint8_t* sent;        // (parts, batch, tokens): which tokens count
  const int64_t* tables;      // bytes of sections, by the number of tokens
  int64_t table_size;
  const int64_t *start, *names;  // (parts, tiers): where in the tables a tier's begins; bytes of its description
};

// Each part's best tiers (parts, batch, tokens), their error and their bytes. False: a place beyond the tables.
bool choose_all(const Kernels& kernels, const Parts& given, uint8_t* tiers, double* error, int64_t* nbytes,
                int threads);

}  // namespace kvferry
