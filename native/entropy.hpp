// The entropy coder's definition in C++: static tables, 32 interleaved range-ANS states, integers only.
// The definition in words is docs/entropy.md; the numpy coder in src/kvferry/ship/entropy/reference.py is its oracle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvferry {

constexpr int kLanes = 32;
constexpr int kScaleBits = 12;
constexpr uint32_t kLow = 1u << 16;
constexpr int kAlphabet = 256;

// Tables of every bin: symbol v of bin b has index v + reach[b]; index 2 * reach[b] + 1 is the escape.
struct Symbol {
  uint64_t reciprocal;  // ceil(2^64 / freq): the high half of its product with a state is the quotient; 0: freq is 1
  uint32_t freq, start;
};

struct Bank {
  int bins = 0;
  std::vector<Symbol> symbols;  // bins x kAlphabet
  std::vector<uint32_t> slots;  // bins x 4096: freq << 20 | slot - start << 8 | index
  std::vector<int> reach;
};

// Throws std::invalid_argument unless every bin's frequencies are positive and sum to 4096.
Bank make_bank(const uint16_t* freq, const uint8_t* reach, int bins);

// codes: rows x columns; the bin of (r, c) is row_bin[r] + column_bin[c]; below 0 it is not coded.
std::vector<uint8_t> entropy_encode(const Bank& bank, const int32_t* codes, int64_t rows, int64_t columns,
                                    const int16_t* row_bin, const int16_t* column_bin);

// Throws std::invalid_argument for bytes that no encoder wrote for this shape and these bins.
void entropy_decode(const Bank& bank, const uint8_t* data, size_t nbytes, int64_t rows, int64_t columns,
                    const int16_t* row_bin, const int16_t* column_bin, int32_t* codes);

// Nearest codes of values (rows x columns) with a dead zone: sign(v) floor(|v| / step[c] + 1 - threshold); 0 where the
// bin is below 0. `codes` may be null. Returns what they cost, in bits, by the tables' frequencies.
double entropy_quantize(const Bank& bank, const float* values, int64_t rows, int64_t columns, const int16_t* row_bin,
                        const int16_t* column_bin, const float* step, float threshold, int32_t* codes);

}  // namespace kvferry
