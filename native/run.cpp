// Sections' layout, the cutting of a tensor into tasks, and who runs them.
#include <vector>

#include "codec.hpp"
#include "pool.hpp"
#include "thread.hpp"

namespace kvferry {
namespace {

int64_t least(int64_t a, int64_t b) { return b < a ? b : a; }

// First rank at or after `from` whose token is at or after `token`. Looks nearby first: tiles follow each other.
int64_t rank_at(const Section& section, int64_t token, int64_t from) {
  if (section.index == nullptr) return token < section.count ? token : section.count;
  int64_t low = from, high = from, step = 16;
  while (high < section.count && section.index[high] < token) {
    low = high + 1;
    high += step;
    step *= 2;
  }
  high = high < section.count ? high : section.count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    section.index[middle] < token ? low = middle + 1 : high = middle;
  }
  return low;
}

// Asks for a tile's rows in their order, which memory answers faster than the tiers' jumps among them.
void fetch_tile(const Rows& x, int64_t head, int64_t begin, int64_t end) {
  const uint8_t* rows = x.data + head * x.head_stride;
  const int64_t row = x.dim * item_bytes(x.dtype);
  for (int64_t token = begin; token < end; ++token)
    for (int64_t i = 0; i < row; i += 64) __builtin_prefetch(rows + token * x.token_stride + i, 0, 2);
}

// Blocks of `chan` are coded by the tile that holds their last token, so tiles never share one.
int64_t cut(const Section& section, int64_t rank) {
  return section.family == Family::chan && rank < section.count ? rank / section.group * section.group : rank;
}

// A centred section's means are of all its tokens: a pass of its own over some heads before those are encoded.
void find_means(const Kernels& kernels, const Rows& x, const std::vector<const Section*>& centred, int64_t from,
                int64_t heads, int workers, size_t scratch_bytes) {
  const int64_t tasks = int64_t(centred.size()) * heads;
  parallel(tasks, workers, [&](TaskQueue& queue) {
    const ExactArithmetic exact;
    uint8_t* const scratch = thread_scratch(scratch_bytes);
    for (int64_t task = queue.next(); task < tasks; task = queue.next())
      kernels.means(x, *centred[size_t(task / heads)], from + task % heads, scratch);
  });
}

constexpr int64_t kLeastTile = 32 << 10;        // bytes of the tensor in one task
constexpr int64_t kMostTile = 512 << 10;        // it and its codes stay in the second cache level
constexpr int64_t kStreamBytes = 16 << 20;      // a target beyond this bypasses the caches
constexpr int64_t kBytesPerThread = 128 << 10;  // waking a thread for less does not pay
constexpr int64_t kHeadBytes = 256 << 10;       // heads of less are not worth a round of their own

}  // namespace

bool lay_out(Section& s, const Rows& x, uint8_t* data) {
  const int64_t padded = (x.dim + 7) / 8 * 8, item = item_bytes(x.dtype);
  int64_t units = 0, minima = 0, codes = 0, rows = 0;
  bool bad = __builtin_mul_overflow(x.heads, s.count, &rows);
  s.groups = 0;
  s.row_bytes = s.family == Family::raw ? x.dim * item : padded / 8 * s.bits;
  if (s.family == Family::had || s.family == Family::cen) {
    const int64_t whole = x.dim / s.group, rest = x.dim % s.group;
    int64_t last = rest > 0 ? 1 : 0;
    while (last < rest) last *= 2;
    s.groups = whole + (rest > 0 ? 1 : 0);
    s.row_bytes = (whole * s.group + last + 7) / 8 * s.bits;
  }
  if (s.family == Family::sym) s.groups = 1;
  if (s.family == Family::asym) s.groups = (x.dim + s.group - 1) / s.group;
  if (s.family == Family::chan) s.groups = (s.count + s.group - 1) / s.group;
  if (s.family == Family::chan) {
    bad |= __builtin_mul_overflow(x.heads, s.groups, &units);
    bad |= __builtin_mul_overflow(units, x.dim, &units);
  } else {
    bad |= __builtin_mul_overflow(rows, s.groups, &units);
  }
  if (s.family == Family::asym || s.family == Family::chan) bad |= __builtin_mul_overflow(units, item, &minima);
  if (s.family == Family::cen && rows > 0) bad |= __builtin_mul_overflow(x.heads, x.dim * item, &minima);
  int64_t scales = 0;
  bad |= __builtin_mul_overflow(units, int64_t(2), &scales);
  bad |= __builtin_mul_overflow(rows, s.row_bytes, &codes);
  bad |= __builtin_add_overflow(minima, scales, &s.total_bytes);
  bad |= __builtin_add_overflow(s.total_bytes, codes, &s.total_bytes);
  if (bad) return false;
  if (data != nullptr) {
    s.minima = data;
    s.scales = data + minima;
    s.codes = data + minima + scales;
  }
  return true;
}

void run(const Kernels& kernels, bool encode, const Rows& x, const Section* sections, int n_sections, int threads) {
  const int64_t row = x.dim * item_bytes(x.dtype);
  int64_t selected = 0;
  size_t scratch_bytes = 0;
  for (int k = 0; k < n_sections; ++k) {
    selected += sections[k].count;
    const size_t need = kernels.scratch_bytes(x, sections[k]);
    scratch_bytes = need > scratch_bytes ? need : scratch_bytes;
  }
  if (selected == 0 || x.heads == 0) return;
  const int64_t bytes = selected * x.heads * row;
  int64_t workers = bytes / kBytesPerThread;
  workers = workers < 1 ? 1 : workers > threads ? threads : workers;
  // Tiles are cut by token, or by rank when one tier has the tensor to itself. Several tiers take their turns over a
  // tile, which is in the cache from the second on; several threads need enough tiles to share.
  const bool alone = n_sections == 1;
  const int64_t length = alone ? sections[0].count : x.tokens;
  int64_t tile_bytes = workers == 1 ? kMostTile : bytes / (8 * workers);
  tile_bytes = tile_bytes < kLeastTile ? kLeastTile : tile_bytes > kMostTile ? kMostTile : tile_bytes;
  int64_t tile = (tile_bytes / (row > 0 ? row : 1) + 63) / 64 * 64;
  if (alone && sections[0].family == Family::chan) {
    const int64_t block = sections[0].group;
    tile = tile < block ? block : tile / block * block;
  }
  const int64_t tiles = (length + tile - 1) / tile;
  // What does not fit the caches is written past them: they would first have to read each line.
  int64_t coded = 0;
  for (int k = 0; k < n_sections; ++k) coded += sections[k].total_bytes;
  const bool stream = (encode ? coded : bytes) >= kStreamBytes;
  const bool fetch = !alone && (encode || !stream) && selected * 2 >= length && row >= 64 && x.dim_stride == item_bytes(x.dtype);

  std::vector<const Section*> centred;
  for (int k = 0; encode && k < n_sections; ++k)
    if (sections[k].family == Family::cen && sections[k].count > 0) centred.push_back(sections + k);
  // What the pass for the means has read, the encoding reads again: a few heads at a time, which the caches still hold.
  const bool by_head = !centred.empty() && bytes / x.heads >= kHeadBytes;
  const int64_t round = by_head ? least(workers, x.heads) : x.heads;
  for (int64_t from = 0; from < x.heads; from += round) {
    const int64_t heads = least(round, x.heads - from), tasks = tiles * heads;
    if (!centred.empty()) find_means(kernels, x, centred, from, heads, int(workers), scratch_bytes);
    parallel(tasks, int(workers), [&](TaskQueue& queue) {
      const ExactArithmetic exact;
      uint8_t* const scratch = thread_scratch(scratch_bytes);
      std::vector<int64_t> reached(size_t(n_sections), 0);  // ranks at which the last tile ended
      int64_t reached_token = 0;
      for (int64_t task = queue.next(); task < tasks; task = queue.next()) {
        const int64_t head = from + task / tiles, begin = task % tiles * tile;
        const int64_t end = begin + tile < length ? begin + tile : length;
        const bool follows = begin >= reached_token;
        reached_token = end;
        if (fetch) fetch_tile(x, head, begin, end);
        for (int k = 0; k < n_sections; ++k) {
          const Section& section = sections[k];
          int64_t first = begin, last = end;
          if (!alone) {
            first = rank_at(section, begin, follows ? reached[size_t(k)] : 0);
            last = reached[size_t(k)] = rank_at(section, end, first);
          }
          first = cut(section, first);
          last = cut(section, last);
          if (first >= last) continue;
          if (encode)
            kernels.encode(x, section, head, first, last, scratch, stream);
          else
            kernels.decode(x, section, head, first, last, scratch, stream);
        }
      }
#if defined(__x86_64__) || defined(__i386__)
      if (stream) _mm_sfence();  // streaming stores are not ordered with the signal that the work is done
#endif
    });
  }
}

}  // namespace kvferry
