// What the kernels, the dispatcher and the Python binding share: plain data and a table of functions a CPU level.
//
// The codec itself (scale format, arithmetic, packing) is defined in docs/quantizers.md; the torch quantisers in
// src/kvferry/ship/quantize are the oracle that every kernel must match byte for byte.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

enum class Dtype : int { bf16 = 0, fp16 = 1, fp32 = 2 };
enum class Family : int { raw = 0, sym = 1, asym = 2, chan = 3, had = 4, cen = 5 };  // cen: rotated inside

constexpr int64_t item_bytes(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// One batch row of one layer's keys or values; strides are in bytes and not negative.
struct Rows {
  uint8_t* data;
  int64_t heads, tokens, dim;
  int64_t head_stride, token_stride, dim_stride;
  Dtype dtype;
};

// The part of a frame that holds one precision tier: [minima] [scales] [codes], each head-major; cen has its means there
// in place of minima.
struct Section {
  Family family;
  int bits;
  int64_t group;         // asym, had, cen: channels a group; chan: tokens a block; else unused
  const int32_t* index;  // the tier's tokens, ascending, checked against Rows::tokens; nullptr means all
  int64_t count;         // how many tokens
  int64_t groups;        // scales a row (sym 1, groups of a row) or blocks a head (chan)
  int64_t row_bytes;     // packed codes of one token
  int64_t total_bytes;
  uint8_t* minima;
  uint8_t* scales;
  uint8_t* codes;
};

// What the tokens of one part of a cache may take: the error of each tier and token, and the cost of each tier.
struct Menu {
  const float* error;  // (tiers, tokens)
  const float* cost;   // infinite where a tier is not allowed
  int64_t tiers, tokens;
};

// One CPU level. Encode and decode handle the tokens of rank [first, last) within the tier, of one head; for `chan`
// first is a multiple of the block and last is one too or equals count, so that calls are independent of each other.
struct Kernels {
  const char* name;
  size_t (*scratch_bytes)(const Rows&, const Section&);
  void (*encode)(const Rows&, const Section&, int64_t head, int64_t first, int64_t last, uint8_t* scratch, bool stream);
  void (*decode)(const Rows&, const Section&, int64_t head, int64_t first, int64_t last, uint8_t* scratch, bool stream);
  void (*means)(const Rows&, const Section&, int64_t head, uint8_t* scratch);  // cen: before any token of it is encoded
  // For what chooses among quantisers (kernels_choice.hpp).
  void (*squares)(const Rows& x, const int32_t* index, int64_t count, const uint8_t* decoded, const float* weights,
                  float* sums, bool add);
  bool (*finite)(const uint8_t* data, int64_t count, int64_t stride, int item_bytes, uint64_t infinity);
  void (*choose)(const Menu&, uint8_t* tiers, double* error);
  void (*count)(const uint8_t* tiers, const uint8_t* sent, int64_t tokens, int64_t most_tiers, int64_t* counts);
};

// Defined by every build; nullptr where the compiler or the architecture lacks the level.
const Kernels* kernels_portable();  // named neon on AArch64
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512bf16();

// Levels that this very CPU can run, best first; `count` is set.
const Kernels* const* usable_kernels(int* count);

// Fills groups, row_bytes, total_bytes and, when data is given, the three pointers. False: sizes overflow.
bool lay_out(Section& section, const Rows& rows, uint8_t* data);

// Runs the tiers of one tensor in a single pass over it, on up to `threads` threads; buffers are checked by then.
void run(const Kernels& kernels, bool encode, const Rows& rows, const Section* sections, int n_sections, int threads);

}  // namespace kvferry
