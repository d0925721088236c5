// What a sampling op is given: the checks of its arguments, and its queries as plain views.
#pragma once

#include "autograd.h"
#include "filter.h"
#include "math/footprint.h"
#include "tensor.h"

namespace texvlm {

constexpr int64_t kMaxAnisotropy = 1024;

struct SampleInputs {
  Levels table;
  Reducers reducers;
  Filter filter;
  Address address;
};

// Of `data`, its dtype, device and batch.
inline void check_lod_coordinates(const char* op, const Tensor& data, const Tensor& uv, const Tensor& lod) {
  check_coordinates(op, "uv", uv, data, "[B, N, 2]", {-1, -1, 2});
  check_coordinates(op, "lod", lod, data, "[B, N]", {uv.size(0), uv.size(1)});
}

inline void check_grad_coordinates(const char* op, const Tensor& data, const Tensor& uv, const Tensor& ddx, const Tensor& ddy,
                                   int64_t max_anisotropy, int64_t most) {
  check_coordinates(op, "uv", uv, data, "[B, N, 2]", {-1, -1, 2});
  check_coordinates(op, "ddx", ddx, data, "[B, N, 2]", {uv.size(0), uv.size(1), 2});
  check_coordinates(op, "ddy", ddy, data, "[B, N, 2]", {uv.size(0), uv.size(1), 2});
  TEXVLM_CHECK(max_anisotropy >= 1 && max_anisotropy <= most, op, "max_anisotropy", "from 1 to " + std::to_string(most),
               max_anisotropy);
}

inline SampleInputs check_lod_queries(const char* op, const Tensor& data, const Tensor& uv, const Tensor& lod, int64_t height,
                                      int64_t width, const Names& reducer, int64_t levels, std::string_view filter,
                                      std::string_view address) {
  const Levels table = check_texture(op, data, height, width, levels);
  check_lod_coordinates(op, data, uv, lod);
  return {table, check_reducers(op, strings(reducer), data.size(2)), parse_filter(op, filter), parse_address(op, address)};
}

inline SampleInputs check_grad_queries(const char* op, const Tensor& data, const Tensor& uv, const Tensor& ddx, const Tensor& ddy,
                                       int64_t height, int64_t width, const Names& reducer, int64_t levels,
                                       int64_t max_anisotropy, std::string_view address, int64_t most = kMaxAnisotropy) {
  const Levels table = check_texture(op, data, height, width, levels);
  check_grad_coordinates(op, data, uv, ddx, ddy, max_anisotropy, most);
  return {table, check_reducers(op, strings(reducer), data.size(2)), Filter::trilinear, parse_address(op, address)};
}

template <class A>
QueryView<A> query_view(const Tensor& uv, const Tensor& lod) {
  return {pointer<const A>(uv), pointer<const A>(lod), uv.stride(0), uv.stride(1), uv.stride(2), lod.stride(0), lod.stride(1)};
}

template <class A>
FootprintView<A> footprint_view(const Tensor& uv, const Tensor& ddx, const Tensor& ddy) {
  return {{pointer<const A>(uv), pointer<const A>(ddx), pointer<const A>(ddy)},
          {uv.stride(0), ddx.stride(0), ddy.stride(0)},
          {uv.stride(1), ddx.stride(1), ddy.stride(1)},
          {uv.stride(2), ddx.stride(2), ddy.stride(2)}};
}

}  // namespace texvlm
