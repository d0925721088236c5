#include "check.h"

#include <sstream>

namespace texvlm {

std::string shape_of(const at::Tensor& t) {
  std::ostringstream out;
  out << '[';
  for (int64_t i = 0; i < t.dim(); ++i) out << (i ? ", " : "") << t.size(i);
  out << ']';
  return out.str();
}

void check_shape(const char* op, const char* argument, const at::Tensor& t, const char* names,
                 std::initializer_list<int64_t> sizes) {
  bool ok = t.dim() == static_cast<int64_t>(sizes.size());
  int64_t i = 0;
  for (const int64_t size : sizes) {
    ok = ok && (size < 0 || t.size(i) == size);
    ++i;
  }
  if (ok) return;
  std::ostringstream expected;
  expected << names << " = [";
  i = 0;
  for (const int64_t size : sizes) {
    expected << (i++ ? ", " : "");
    size < 0 ? expected << '*' : expected << size;
  }
  expected << ']';
  TEXVLM_CHECK(false, op, argument, expected.str(), shape_of(t));
}

void check_dtype(const char* op, const char* argument, const at::Tensor& t, at::ScalarType expected, const char* why) {
  TEXVLM_CHECK(t.scalar_type() == expected, op, argument, std::string(at::toString(expected)) + why,
               at::toString(t.scalar_type()));
}

void check_same_device(const char* op, const char* argument, const at::Tensor& t, const at::Tensor& other) {
  TEXVLM_CHECK(t.device() == other.device(), op, argument, "on the device of the other arguments (" + other.device().str() + ")",
               t.device().str());
}

void check_texel_dtype(const char* op, const char* argument, at::ScalarType dtype) {
  TEXVLM_CHECK(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16, op, argument,
               "float32, float64, float16 or bfloat16", at::toString(dtype));
}

Levels check_levels(const char* op, int64_t height, int64_t width, int64_t levels) {
  constexpr int64_t kMaxSide = int64_t{1} << 30;  // H * W * levels then stays far from 2^63
  TEXVLM_CHECK(height >= 1 && width >= 1 && height <= kMaxSide && width <= kMaxSide, op, "height and width",
               "at least 1 and at most 2^30", height, " x ", width);
  const int full = level_count(height, width);
  TEXVLM_CHECK(levels >= 1 && levels <= full, op, "levels",
               "from 1 to " + std::to_string(full) + " for " + std::to_string(height) + " x " + std::to_string(width), levels);
  return make_levels(height, width, static_cast<int>(levels));
}

namespace {

Reducer parse_reducer(const char* op, const std::string& name) {
  if (name == "mean") return Reducer::mean;
  if (name == "max") return Reducer::max;
  if (name == "min") return Reducer::min;
  TEXVLM_CHECK(name == "mode", op, "reducer", "mean, max, min or mode", "'", name, "'");
  return Reducer::mode;
}

}  // namespace

Reducers check_reducers(const char* op, const std::vector<std::string>& names, int64_t channels) {
  const auto count = static_cast<int64_t>(names.size());
  TEXVLM_CHECK(count == 1 || count == channels, op, "reducer",
               "one name, or one for each of the " + std::to_string(channels) + " channels", count, " names");
  Reducers r{};
  r.first = count ? parse_reducer(op, names[0]) : Reducer::mean;
  r.uniform = true;
  for (int64_t c = 0; c < count; ++c) {
    const Reducer reducer = parse_reducer(op, names[c]);
    r.uniform = r.uniform && reducer == r.first;
    r.any_mode = r.any_mode || reducer == Reducer::mode;
    r.any_extremum = r.any_extremum || reducer == Reducer::max || reducer == Reducer::min;
    if (c < Reducers::kMaxMixed) r.bits[c >> 5] |= static_cast<uint64_t>(reducer) << (2 * (c & 31));
  }
  TEXVLM_CHECK(r.uniform || channels <= Reducers::kMaxMixed, op, "reducer",
               "the same for all channels beyond " + std::to_string(Reducers::kMaxMixed) + " channels", channels, " channels");
  return r;
}

Levels check_texture(const char* op, const at::Tensor& data, int64_t height, int64_t width, int64_t levels) {
  check_texel_dtype(op, "data", data.scalar_type());
  const Levels table = check_levels(op, height, width, levels);
  check_shape(op, "data", data, "[B, T, C]", {-1, table.texels, -1});
  TEXVLM_CHECK(data.is_contiguous(), op, "data", "contiguous (the levels of [B, T, C] are one packed buffer; call .contiguous())",
               "strides ", data.strides());
  return table;
}

}  // namespace texvlm
