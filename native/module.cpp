// The Python binding: integers in, a typed error or the work done out. Tensors are checked by kvferry/ship/native.py,
// which alone calls this; what only the kernels can get wrong (sizes, indices, overflow) is checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "choice.hpp"
#include "codec.hpp"
#include "entropy.hpp"

namespace nb = nanobind;
using namespace kvferry;

namespace {

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& active() {
  const Kernels* kernels = chosen.load();
  if (kernels == nullptr) {
    int count = 0;
    kernels = usable_kernels(&count)[0];
    chosen.store(kernels);
  }
  return *kernels;
}

std::vector<std::string> levels() {
  int count = 0;
  const Kernels* const* list = usable_kernels(&count);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.emplace_back(list[i]->name);
  return names;
}

bool use_level(const std::string& name) {
  int count = 0;
  const Kernels* const* list = usable_kernels(&count);
  for (int i = 0; i < count; ++i)
    if (name.empty() || name == list[i]->name) {
      chosen.store(list[i]);
      return true;
    }
  return false;
}

// family, bits, group, index address (0: all), index item size, count, data address, data bytes
using Tier = std::tuple<int, int, int64_t, uintptr_t, int, int64_t, uintptr_t, int64_t>;
using Triple = std::tuple<int64_t, int64_t, int64_t>;

Section check_spec(int family, int bits, int64_t group, int64_t count) {
  const bool known = bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8;
  const bool rotated = family == int(Family::had) || family == int(Family::cen);
  const bool grouped = family == int(Family::asym) || family == int(Family::chan) || rotated;
  const bool power_of_two = group >= 2 && group <= 1024 && (group & (group - 1)) == 0;
  if (family < 0 || family > int(Family::cen) || (family != int(Family::raw) && !known) || (grouped && group < 1) ||
      (rotated && !power_of_two) || count < 0)
    throw std::invalid_argument("no such quantiser");
  Section section{};
  section.family = Family(family);
  section.bits = bits;
  section.group = group;
  section.count = count;
  return section;
}

Rows check_rows(uintptr_t data, const Triple& shape, const Triple& strides, int dtype) {
  const auto [heads, tokens, dim] = shape;
  const auto [head_stride, token_stride, dim_stride] = strides;
  if (dtype < 0 || dtype > int(Dtype::fp32)) throw std::invalid_argument("no such dtype");
  if (heads < 0 || tokens < 0 || tokens > INT32_MAX || dim < 1 || dim > (int64_t(1) << 31))
    throw std::invalid_argument("shape out of range");
  if (head_stride < 0 || token_stride < 0 || dim_stride < 0) throw std::invalid_argument("negative stride");
  return Rows{reinterpret_cast<uint8_t*>(data), heads,        tokens,     dim,
              head_stride,                      token_stride, dim_stride, Dtype(dtype)};
}

// A private copy of the indices, ascending and in range: what the kernels follow nobody can change under them.
template <class T>
void copy_index(const void* source, int64_t count, int64_t tokens, std::vector<int32_t>& out) {
  out.resize(size_t(count));
  int64_t before = -1;
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, static_cast<const uint8_t*>(source) + i * int64_t(sizeof(T)), sizeof(T));
    if (value <= before || value >= tokens)
      throw std::invalid_argument("token index " + std::to_string(value) + " at place " + std::to_string(i) +
                                  (value <= before ? " is negative or not above the one before it"
                                                   : " is outside of " + std::to_string(tokens) + " tokens"));
    out[size_t(i)] = int32_t(value);
    before = value;
  }
}

// The copy, or nullptr where there is no index and the tier holds all tokens.
const int32_t* check_index(uintptr_t index, int item, int64_t count, int64_t tokens, std::vector<int32_t>& copy) {
  if (index == 0) {
    if (count != tokens) throw std::invalid_argument("a tier without an index holds all tokens");
    return nullptr;
  }
  const void* from = reinterpret_cast<const void*>(index);
  if (item == 8)
    copy_index<int64_t>(from, count, tokens, copy);
  else if (item == 4)
    copy_index<int32_t>(from, count, tokens, copy);
  else
    throw std::invalid_argument("indices must be int32 or int64");
  return copy.data();
}

void work(bool encode, uintptr_t data, const Triple& shape, const Triple& strides, int dtype,
          const std::vector<Tier>& tiers, int threads) {
  const nb::gil_scoped_release released;
  const Rows rows = check_rows(data, shape, strides, dtype);
  std::vector<Section> sections;
  std::vector<std::vector<int32_t>> indices(tiers.size());
  for (size_t k = 0; k < tiers.size(); ++k) {
    const auto& [family, bits, group, index, index_item, count, bytes_at, bytes] = tiers[k];
    Section section = check_spec(family, bits, group, count);
    section.index = check_index(index, index_item, count, rows.tokens, indices[k]);
    if (!lay_out(section, rows, reinterpret_cast<uint8_t*>(bytes_at)) || section.total_bytes != bytes)
      throw std::invalid_argument("the buffer holds " + std::to_string(bytes) + " bytes where the section takes " +
                                  std::to_string(section.total_bytes));
    if (count > 0 && rows.heads > 0) sections.push_back(section);
  }
  if (!sections.empty()) run(active(), encode, rows, sections.data(), int(sections.size()), threads);
}

// The tier is as for `work`, without its data; weights (heads, dim) and sums (count) are fp32, side by side.
void measure_tier(uintptr_t data, const Triple& shape, const Triple& strides, int dtype, const Tier& tier,
                  uintptr_t weights, uintptr_t sums, int threads) {
  const nb::gil_scoped_release released;
  const Rows rows = check_rows(data, shape, strides, dtype);
  const auto& [family, bits, group, index, index_item, count, unused_data, unused_bytes] = tier;
  (void)unused_data, (void)unused_bytes;
  Section section = check_spec(family, bits, group, count);
  std::vector<int32_t> copy;
  section.index = check_index(index, index_item, count, rows.tokens, copy);
  if (!lay_out(section, rows, nullptr)) throw std::invalid_argument("the section is too large");
  measure(active(), rows, section, reinterpret_cast<const float*>(weights), reinterpret_cast<float*>(sums), threads);
}

using Four = std::tuple<int64_t, int64_t, int64_t, int64_t>;

bool all_below(uintptr_t data, const Four& sizes, const Four& strides, int item, uint64_t infinity, int threads) {
  const nb::gil_scoped_release released;
  const auto [a, b, c, d] = sizes;
  const auto [e, f, g, h] = strides;
  if (item != 2 && item != 4 && item != 8) throw std::invalid_argument("elements have 2, 4 or 8 bytes");
  if (a < 0 || b < 0 || c < 0 || d < 0 || e < 0 || f < 0 || g < 0 || h < 0)
    throw std::invalid_argument("negative size or stride");
  return all_finite(active(), {reinterpret_cast<const uint8_t*>(data), {a, b, c, d}, {e, f, g, h}, item}, infinity,
                    threads);
}

template <class T, class... Shape>
using Array = nb::ndarray<T, nb::numpy, nb::c_contig, nb::device::cpu, Shape...>;
using Frequencies = Array<const uint16_t, nb::shape<-1, kAlphabet>>;
using Reach = Array<const uint8_t, nb::ndim<1>>;
using Bins = Array<const int16_t, nb::ndim<1>>;

Bank bank_of(const Frequencies& freq, const Reach& reach) {
  if (freq.shape(0) != reach.shape(0) || freq.shape(0) < 1 || freq.shape(0) > 1024)
    throw std::invalid_argument("the tables and their reaches differ in number");
  return make_bank(freq.data(), reach.data(), int(freq.shape(0)));
}

nb::bytes encode_entropy(const Frequencies& freq, const Reach& reach, const Array<const int32_t, nb::ndim<2>>& codes,
                         const Bins& row_bin, const Bins& column_bin) {
  if (codes.shape(0) != row_bin.shape(0) || codes.shape(1) != column_bin.shape(0))
    throw std::invalid_argument("codes and bins differ in shape");
  std::vector<uint8_t> out;
  {
    const nb::gil_scoped_release released;
    out = entropy_encode(bank_of(freq, reach), codes.data(), int64_t(codes.shape(0)), int64_t(codes.shape(1)),
                         row_bin.data(), column_bin.data());
  }
  return nb::bytes(out.data(), out.size());
}

void decode_entropy(const Frequencies& freq, const Reach& reach, const Array<const uint8_t, nb::ndim<1>>& data,
                    const Bins& row_bin, const Bins& column_bin, const Array<int32_t, nb::ndim<2>>& codes) {
  if (codes.shape(0) != row_bin.shape(0) || codes.shape(1) != column_bin.shape(0))
    throw std::invalid_argument("codes and bins differ in shape");
  const nb::gil_scoped_release released;
  entropy_decode(bank_of(freq, reach), data.data(), data.shape(0), int64_t(codes.shape(0)), int64_t(codes.shape(1)),
                 row_bin.data(), column_bin.data(), codes.data());
}

// codes of shape (0, 0): only what they would cost is wanted.
double quantize_entropy(const Frequencies& freq, const Reach& reach, const Array<const float, nb::ndim<2>>& values,
                        const Bins& row_bin, const Bins& column_bin, const Array<const float, nb::ndim<1>>& step,
                        float threshold, const Array<int32_t, nb::ndim<2>>& codes) {
  const bool wanted = codes.shape(0) != 0;
  if (values.shape(0) != row_bin.shape(0) || values.shape(1) != column_bin.shape(0) ||
      values.shape(1) != step.shape(0) ||
      (wanted && (codes.shape(0) != values.shape(0) || codes.shape(1) != values.shape(1))))
    throw std::invalid_argument("values, codes, steps and bins differ in shape");
  const nb::gil_scoped_release released;
  return entropy_quantize(bank_of(freq, reach), values.data(), int64_t(values.shape(0)), int64_t(values.shape(1)),
                          row_bin.data(), column_bin.data(), step.data(), threshold, wanted ? codes.data() : nullptr);
}

template <class T, int N>
using Whole = Array<T, nb::ndim<N>>;

void choose_tiers(const Whole<const float, 4>& error, const Whole<const float, 2>& cost,
                  const Whole<const uint8_t, 3>& sent, const Whole<const int64_t, 1>& tables,
                  const Whole<const int64_t, 2>& start, const Whole<const int64_t, 2>& names,
                  const Whole<uint8_t, 3>& tiers, const Whole<double, 1>& errors, const Whole<int64_t, 1>& nbytes,
                  int threads) {
  const size_t parts = error.shape(0), most = error.shape(1), batch = error.shape(2), tokens = error.shape(3);
  const auto is = [&](const auto& array, size_t first, size_t second) {
    return array.shape(0) == first && array.shape(1) == second;
  };
  if (most < 1 || most > 64 || !is(cost, parts, most) || !is(start, parts, most) || !is(names, parts, most) ||
      !is(sent, parts, batch) || sent.shape(2) != tokens || !is(tiers, parts, batch) || tiers.shape(2) != tokens ||
      errors.shape(0) != parts || nbytes.shape(0) != parts)
    throw std::invalid_argument("the arrays of a choice differ in shape");
  const Parts given = {int64_t(parts), int64_t(most),  int64_t(batch),          int64_t(tokens), error.data(), cost.data(),
                       sent.data(),    tables.data(), int64_t(tables.shape(0)), start.data(),    names.data()};
  bool good = false;
  {
    const nb::gil_scoped_release released;
    good = choose_all(active(), given, tiers.data(), errors.data(), nbytes.data(), threads);
  }
  if (!good) throw std::invalid_argument("a tier has more tokens than its table says the bytes of");
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "CPU kernels of the kvferry codec; called through kvferry.ship.native.";
  m.def("levels", &levels, "CPU levels that this machine can run, best first.");
  m.def("level", [] { return std::string(active().name); }, "The CPU level in use.");
  m.def("use_level", &use_level, nb::arg("name"), "Use a level ('' for the best); False where it cannot run here.");
  m.def("work", &work, nb::arg("encode"), nb::arg("data"), nb::arg("shape"), nb::arg("strides"), nb::arg("dtype"),
        nb::arg("tiers"), nb::arg("threads"), "Encode or decode the tiers of one (heads, tokens, dim) tensor.");
  m.def("measure", &measure_tier, nb::arg("data"), nb::arg("shape"), nb::arg("strides"), nb::arg("dtype"),
        nb::arg("tier"), nb::arg("weights"), nb::arg("sums"), nb::arg("threads"),
        "What encoding the tokens of a tier does to each: its weighted squared error.");
  m.def("all_below", &all_below, nb::arg("data"), nb::arg("sizes"), nb::arg("strides"), nb::arg("item"),
        nb::arg("infinity"), nb::arg("threads"), "Whether all patterns' magnitudes lie below one of them.");
  m.def("choose", &choose_tiers, nb::arg("error"), nb::arg("cost"), nb::arg("sent"), nb::arg("tables"),
        nb::arg("start"), nb::arg("names"), nb::arg("tiers"), nb::arg("errors"), nb::arg("nbytes"),
        nb::arg("threads"), "Each token's best tier, and each part's error and bytes.");
  m.def("entropy_encode", &encode_entropy, nb::arg("freq"), nb::arg("reach"), nb::arg("codes"), nb::arg("row_bin"),
        nb::arg("column_bin"), "Entropy-code a matrix of integers.");
  m.def("entropy_decode", &decode_entropy, nb::arg("freq"), nb::arg("reach"), nb::arg("data"), nb::arg("row_bin"),
        nb::arg("column_bin"), nb::arg("codes"), "Inverse of entropy_encode, into codes.");
  m.def("entropy_quantize", &quantize_entropy, nb::arg("freq"), nb::arg("reach"), nb::arg("values"),
        nb::arg("row_bin"), nb::arg("column_bin"), nb::arg("step"), nb::arg("threshold"), nb::arg("codes"),
        "Codes of a matrix of values, and the bits that they cost.");
}
