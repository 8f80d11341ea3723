#include "entropy.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace kvferry {
namespace {

constexpr uint32_t kScale = 1u << kScaleBits;
constexpr uint32_t kSlotMask = kScale - 1;
constexpr int kBinsPerOctave = 4;
constexpr size_t kHead = 8 + 4 * kLanes;  // number of words, number of escapes, final states

void put_u32(uint8_t* at, uint32_t value) {
  for (int i = 0; i < 4; ++i) at[i] = uint8_t(value >> (8 * i));
}

uint32_t get_u32(const uint8_t* at) {
  return uint32_t(at[0]) | uint32_t(at[1]) << 8 | uint32_t(at[2]) << 16 | uint32_t(at[3]) << 24;
}

uint32_t get_u16(const uint8_t* at) { return uint32_t(at[0]) | uint32_t(at[1]) << 8; }

// Where a cell is coded: its table (below 0: nowhere), and how many low bits are written as they are beside it. Above
// the last table a code is split: two more bits of it for every octave of spread.
struct Place {
  int bin, shift;
};

Place place_of(const Bank& bank, int row, int column) {
  const int bin = row + column, top = bank.bins - 1;
  if (bin <= top) return {bin, 0};
  const int shift = std::min((bin - top + kBinsPerOctave - 1) / kBinsPerOctave, kScaleBits);
  return {std::min(bin - kBinsPerOctave * shift, top), shift};
}

}  // namespace

Bank make_bank(const uint16_t* freq, const uint8_t* reach, int bins) {
  Bank bank;
  bank.bins = bins;
  bank.symbols.assign(size_t(bins) * kAlphabet, Symbol{});
  bank.slots.assign(size_t(bins) * kScale, 0);
  for (int b = 0; b < bins; ++b) {
    const int symbols = 2 * int(reach[b]) + 2;
    if (reach[b] < 1 || symbols > kAlphabet) throw std::invalid_argument("a table reaches too far");
    bank.reach.push_back(reach[b]);
    uint32_t total = 0;
    for (int s = 0; s < symbols; ++s) {
      const size_t at = size_t(b) * kAlphabet + size_t(s);
      const uint32_t f = freq[at];
      if (f < 1 || total + f > kScale) throw std::invalid_argument("a table's frequencies do not sum to 4096");
      bank.symbols[at] = Symbol{f == 1 ? 0 : UINT64_MAX / f + 1, f, total};
      for (uint32_t i = 0; i < f; ++i) bank.slots[size_t(b) * kScale + total + i] = f << 20 | i << 8 | uint32_t(s);
      total += f;
    }
    if (total != kScale) throw std::invalid_argument("a table's frequencies do not sum to 4096");
  }
  return bank;
}

std::vector<uint8_t> entropy_encode(const Bank& bank, const int32_t* codes, int64_t rows, int64_t columns,
                                    const int16_t* row_bin, const int16_t* column_bin) {
  uint32_t state[kLanes];
  std::fill_n(state, kLanes, kLow);
  std::vector<uint16_t> words(2 * size_t(rows * columns) + 1);  // last one first; a cell gives two at most
  std::vector<int32_t> escapes;                         // last one first
  uint16_t* word = words.data();
  const auto renormalise = [&word](uint32_t x, uint32_t freq) {
    const bool full = x >> (32 - kScaleBits) >= freq;
    *word = uint16_t(x);
    word += full;
    return full ? x >> 16 : x;
  };
  // What is read first is written last.
  for (int64_t r = rows - 1; r >= 0; --r) {
    const int32_t* row = codes + r * columns;
    for (int64_t block = (columns - 1) / kLanes; block >= 0; --block) {
      const int64_t first = block * kLanes;
      const int lanes = int(std::min<int64_t>(kLanes, columns - first));
      for (int lane = lanes - 1; lane >= 0; --lane) {
        const Place place = place_of(bank, row_bin[r], column_bin[first + lane]);
        if (place.bin < 0 || place.shift == 0) continue;
        const uint32_t low = uint32_t(row[first + lane]) & ((1u << place.shift) - 1);
        const int width = kScaleBits - place.shift;
        const uint32_t x = renormalise(state[lane], 1u << width);
        state[lane] = (x >> width << kScaleBits) + (low << width) + (x & ((1u << width) - 1));
      }
      for (int lane = lanes - 1; lane >= 0; --lane) {
        const Place place = place_of(bank, row_bin[r], column_bin[first + lane]);
        if (place.bin < 0) continue;
        const int32_t value = row[first + lane] >> place.shift;
        const int reach = bank.reach[size_t(place.bin)];
        uint32_t index = uint32_t(value) + uint32_t(reach);
        if (index > 2 * uint32_t(reach)) {
          index = 2 * uint32_t(reach) + 1;
          escapes.push_back(value);
        }
        const Symbol& symbol = bank.symbols[size_t(place.bin) * kAlphabet + index];
        const uint32_t x = renormalise(state[lane], symbol.freq);
        const uint32_t quotient =
            symbol.reciprocal == 0 ? x : uint32_t((static_cast<unsigned __int128>(symbol.reciprocal) * x) >> 64);
        state[lane] = (quotient << kScaleBits) + (x - quotient * symbol.freq) + symbol.start;
      }
    }
  }
  const size_t n_words = size_t(word - words.data());
  if (n_words > UINT32_MAX || escapes.size() > UINT32_MAX) throw std::invalid_argument("too many symbols");
  std::vector<uint8_t> out(kHead + 2 * n_words + 4 * escapes.size());
  put_u32(out.data(), uint32_t(n_words));
  put_u32(out.data() + 4, uint32_t(escapes.size()));
  for (int i = 0; i < kLanes; ++i) put_u32(out.data() + 8 + 4 * i, state[i]);
  uint8_t* at = out.data() + kHead;
  for (size_t i = n_words; i-- > 0; at += 2) {
    at[0] = uint8_t(words[i]);
    at[1] = uint8_t(words[i] >> 8);
  }
  for (size_t i = escapes.size(); i-- > 0; at += 4) put_u32(at, uint32_t(escapes[i]));
  return out;
}

void entropy_decode(const Bank& bank, const uint8_t* data, size_t nbytes, int64_t rows, int64_t columns,
                    const int16_t* row_bin, const int16_t* column_bin, int32_t* codes) {
  if (nbytes < kHead) throw std::invalid_argument("the stream is cut off");
  const size_t n_words = get_u32(data), n_escapes = get_u32(data + 4);
  if (nbytes - kHead != 2 * n_words + 4 * n_escapes)
    throw std::invalid_argument("the stream has " + std::to_string(nbytes) + " bytes, not what it announces");
  uint32_t state[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    state[i] = get_u32(data + 8 + 4 * i);
    if (state[i] < kLow) throw std::invalid_argument("a state is out of range");
  }
  const uint8_t* word = data + kHead;
  const uint8_t* const words_end = word + 2 * n_words;
  const uint8_t* escape = words_end;
  const uint8_t* const end = data + nbytes;
  const auto refill = [&word, words_end](uint32_t x) {
    if (x >= kLow) return x;
    if (word == words_end) throw std::invalid_argument("the stream ends too early");
    const uint32_t filled = x << 16 | get_u16(word);
    word += 2;
    return filled;
  };
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t first = 0; first < columns; first += kLanes) {
      int32_t* cells = codes + r * columns + first;
      const int lanes = int(std::min<int64_t>(kLanes, columns - first));
      bool split = false;
      for (int lane = 0; lane < lanes; ++lane) {
        const Place place = place_of(bank, row_bin[r], column_bin[first + lane]);
        if (place.bin < 0) {
          cells[lane] = 0;
          continue;
        }
        split |= place.shift > 0;
        const uint32_t x = state[lane];
        const uint32_t entry = bank.slots[size_t(place.bin) * kScale + (x & kSlotMask)];
        state[lane] = refill((entry >> 20) * (x >> kScaleBits) + (entry >> 8 & kSlotMask));
        const int reach = bank.reach[size_t(place.bin)], index = int(entry & 0xFF);
        cells[lane] = index - reach;
        if (index > 2 * reach) {
          if (escape == end) throw std::invalid_argument("the stream lacks an escaped value");
          cells[lane] = int32_t(get_u32(escape));
          escape += 4;
          if (cells[lane] >= -reach && cells[lane] <= reach)
            throw std::invalid_argument("an escaped value needs no escape");
        }
      }
      if (!split) continue;
      for (int lane = 0; lane < lanes; ++lane) {
        const Place place = place_of(bank, row_bin[r], column_bin[first + lane]);
        if (place.bin < 0 || place.shift == 0) continue;
        const uint32_t x = state[lane];
        const int width = kScaleBits - place.shift;
        const uint32_t low = (x & kSlotMask) >> width;
        state[lane] = refill((x >> kScaleBits << width) + (x & ((1u << width) - 1)));
        const int32_t high = cells[lane];
        if (high > INT32_MAX >> place.shift || high < INT32_MIN >> place.shift)
          throw std::invalid_argument("an escaped value is too large");
        cells[lane] = int32_t(uint32_t(high) << place.shift | low);
      }
    }
  }
  if (word != words_end || escape != end) throw std::invalid_argument("the stream is too long");
  for (int i = 0; i < kLanes; ++i)
    if (state[i] != kLow) throw std::invalid_argument("the stream does not end where it began");
}

double entropy_quantize(const Bank& bank, const float* values, int64_t rows, int64_t columns, const int16_t* row_bin,
                        const int16_t* column_bin, const float* step, float threshold, int32_t* codes) {
  std::vector<float> inverse(size_t(columns), 0.0f);
  for (int64_t c = 0; c < columns; ++c) inverse[size_t(c)] = 1.0f / step[c];
  std::vector<float> cost(size_t(bank.bins) * kAlphabet, 0.0f);
  for (size_t i = 0; i < cost.size(); ++i)
    if (bank.symbols[i].freq > 0) cost[i] = float(kScaleBits) - std::log2(float(bank.symbols[i].freq));
  constexpr float kMost = 1 << 30;
  double bits = 0.0;
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = values + r * columns;
    double own = 0.0;
    for (int64_t c = 0; c < columns; ++c) {
      const Place place = place_of(bank, row_bin[r], column_bin[c]);
      int32_t code = 0;
      if (place.bin >= 0) {
        const int32_t size = int32_t(std::min(std::fabs(row[c]) * inverse[size_t(c)] + (1.0f - threshold), kMost));
        code = row[c] < 0 ? -size : size;
        const int reach = bank.reach[size_t(place.bin)];
        const int32_t value = code >> place.shift;
        const bool far = value < -reach || value > reach;
        const int index = far ? 2 * reach + 1 : value + reach;
        own += cost[size_t(place.bin) * kAlphabet + size_t(index)] + float(place.shift) + (far ? 32.0f : 0.0f);
      }
      if (codes != nullptr) codes[r * columns + c] = code;
    }
    bits += own;
  }
  return bits;
}

}  // namespace kvferry
