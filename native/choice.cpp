// The driver of the kernels in kernels_choice.hpp: cuts work into tasks.
#include "choice.hpp"

#include <atomic>
#include <cstring>

#include "pool.hpp"
#include "thread.hpp"

namespace kvferry {
namespace {

constexpr int64_t kBytesPerThread = 256 << 10;  // waking a thread for less does not pay
constexpr int64_t kRun = 256 << 10;             // bytes in one task
constexpr int64_t kTile = 64 << 10;             // of a head's rows: they, their codes and the rows read back stay close

int workers_for(int64_t bytes, int threads) {
  const int64_t most = bytes / kBytesPerThread;
  return int(most < 1 ? 1 : most > threads ? threads : most);
}

// Joins dimensions that lie in each other's row; those of one element go.
int join(Elements& x) {
  int dims = 0;
  for (int d = 0; d < 4; ++d) {
    if (x.sizes[d] == 1) continue;
    if (dims > 0 && x.strides[dims - 1] == x.strides[d] * x.sizes[d]) {
      x.sizes[dims - 1] *= x.sizes[d];
      x.strides[dims - 1] = x.strides[d];
    } else {
      x.sizes[dims] = x.sizes[d];
      x.strides[dims] = x.strides[d];
      ++dims;
    }
  }
  if (dims == 0) {
    x.sizes[0] = 1;
    x.strides[0] = x.item;
    dims = 1;
  }
  return dims;
}

}  // namespace

bool all_finite(const Kernels& kernels, const Elements& given, uint64_t infinity, int threads) {
  Elements x = given;
  int64_t bytes = x.item;
  for (const int64_t size : x.sizes) bytes *= size;
  if (bytes == 0) return true;
  const int dims = join(x), inner = dims - 1;
  int64_t rows = 1;
  for (int d = 0; d < inner; ++d) rows *= x.sizes[d];
  const int64_t row = x.sizes[inner] * x.item;
  // A task is a piece of a long row, or some short ones.
  const int64_t piece = row > kRun ? kRun / x.item : x.sizes[inner];
  const int64_t pieces = (x.sizes[inner] + piece - 1) / piece;
  const int64_t some = row > kRun ? 1 : kRun / row + 1;
  const int64_t tasks = (rows + some - 1) / some * pieces;
  std::atomic<bool> good{true};
  parallel(tasks, workers_for(bytes, threads), [&](TaskQueue& queue) {
    for (int64_t task = queue.next(); task < tasks && good.load(std::memory_order_relaxed); task = queue.next()) {
      const int64_t first = task / pieces * some, from = task % pieces * piece;
      const int64_t last = first + some < rows ? first + some : rows;
      const int64_t count = from + piece < x.sizes[inner] ? piece : x.sizes[inner] - from;
      for (int64_t r = first; r < last; ++r) {
        const uint8_t* at = x.data + from * x.strides[inner];
        int64_t rest = r;
        for (int d = inner - 1; d >= 0; --d) {
          at += rest % x.sizes[d] * x.strides[d];
          rest /= x.sizes[d];
        }
        if (!kernels.finite(at, count, x.strides[inner], x.item, infinity)) good.store(false);
      }
    }
  });
  return good.load();
}

void measure(const Kernels& kernels, const Rows& x, const Section& t, const float* weights, float* sums, int threads) {
  const int64_t row = x.dim * item_bytes(x.dtype);
  if (t.count == 0 || x.heads == 0) return;
  int64_t tile = kTile / row < 64 ? 64 : kTile / row / 64 * 64;
  if (t.family == Family::chan) tile = tile < t.group ? t.group : tile / t.group * t.group;
  tile = tile < t.count ? tile : t.count;
  const int64_t tiles = (t.count + tile - 1) / tile;
  const int workers = workers_for(t.count * x.heads * row, threads);

  Section shape = t;  // the largest section of one head and tile
  Rows one = x;
  one.heads = 1;
  shape.count = tile;
  if (!lay_out(shape, one, nullptr)) throw std::bad_alloc();
  const size_t working = (kernels.scratch_bytes(x, t) + 63) / 64 * 64;
  const size_t packed = (size_t(shape.total_bytes) + 64 + 63) / 64 * 64, rows = size_t(tile * row + 64 + 63) / 64 * 64;

  std::vector<uint8_t> means;
  Section whole = t;
  if (t.family == Family::cen) {
    means.resize(size_t(x.heads * row));
    whole.minima = means.data();
    parallel(x.heads, workers, [&](TaskQueue& queue) {
      const ExactArithmetic exact;
      uint8_t* const scratch = thread_scratch(working + packed + rows);
      for (int64_t head = queue.next(); head < x.heads; head = queue.next()) kernels.means(x, whole, head, scratch);
    });
  }
  parallel(tiles, workers, [&](TaskQueue& queue) {
    const ExactArithmetic exact;
    uint8_t* const scratch = thread_scratch(working + packed + rows);
    uint8_t* const decoded = scratch + working + packed;
    for (int64_t task = queue.next(); task < tiles; task = queue.next()) {
      const int64_t first = task * tile, count = first + tile < t.count ? tile : t.count - first;
      Section section = t;
      section.count = count;
      section.index = t.index == nullptr ? nullptr : t.index + first;
      for (int64_t head = 0; head < x.heads; ++head) {
        Rows source = one;
        source.data = x.data + head * x.head_stride + (t.index == nullptr ? first * x.token_stride : 0);
        source.tokens = t.index == nullptr ? count : x.tokens;
        lay_out(section, source, scratch + working);
        if (t.family == Family::cen) std::memcpy(section.minima, means.data() + head * row, size_t(row));
        kernels.encode(source, section, 0, 0, count, scratch, false);
        const Rows back = {decoded, 1, count, x.dim, 0, row, item_bytes(x.dtype), x.dtype};
        Section read = section;
        read.index = nullptr;
        kernels.decode(back, read, 0, 0, count, scratch, false);
        kernels.squares(source, section.index, count, decoded, weights + head * x.dim, sums + first, head > 0);
      }
    }
  });
}

bool choose_all(const Kernels& kernels, const Parts& p, uint8_t* tiers, double* error, int64_t* nbytes, int threads) {
  const int64_t tokens = p.batch * p.tokens;
  std::atomic<bool> good{true};
  parallel(p.parts, workers_for(p.parts * p.tiers * tokens * 4, threads), [&](TaskQueue& queue) {
    const ExactArithmetic exact;
    std::vector<int64_t> counts(size_t(p.tiers), 0);
    for (int64_t part = queue.next(); part < p.parts; part = queue.next()) {
      uint8_t* const chosen = tiers + part * tokens;
      kernels.choose({p.error + part * p.tiers * tokens, p.cost + part * p.tiers, p.tiers, tokens}, chosen,
                     error + part);
      const uint8_t* const sent = p.sent + part * tokens;
      int64_t total = 0, all = 0;
      uint64_t used = 0;
      for (int64_t row = 0; row < p.batch; ++row) {
        kernels.count(chosen + row * p.tokens, sent + row * p.tokens, p.tokens, p.tiers, counts.data());
        for (int64_t tier = 0; tier < p.tiers; ++tier) {
          const int64_t place = p.start[part * p.tiers + tier] + counts[size_t(tier)];
          if (place < 0 || place >= p.table_size) {
            good.store(false);
            continue;
          }
          total += p.tables[place];
          all += counts[size_t(tier)];
          used |= uint64_t(counts[size_t(tier)] > 0) << tier;
        }
      }
      int64_t number = 0, width = 0;
      for (int64_t tier = 0; tier < p.tiers; ++tier) {
        if ((used >> tier & 1) == 0) continue;
        total += p.names[part * p.tiers + tier];
        ++number;
      }
      while ((int64_t(1) << width) < number) ++width;
      nbytes[part] = 1 + total + (width * all + 7) / 8;
    }
  });
  return good.load();
}

}  // namespace kvferry
