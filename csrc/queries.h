// What a sampling op is given: the names of filters and address modes parsed, the checks of its arguments, and its queries as
// plain views.
#pragma once

#include <string_view>

#include "autograd.h"
#include "check.h"
#include "math/footprint.h"
#include "tensor.h"

namespace texvlm {

constexpr int64_t kMaxAnisotropy = 1024;

inline Address parse_address(const char* op, std::string_view name) {
  if (name == "clamp") return Address::clamp;
  if (name == "wrap") return Address::wrap;
  if (name == "mirror") return Address::mirror;
  TEXVLM_CHECK(name == "border", op, "address", "clamp, wrap, mirror or border", "'", name, "'");
  return Address::border;
}

inline Filter parse_filter(const char* op, std::string_view name) {
  if (name == "nearest") return Filter::nearest;
  if (name == "bilinear") return Filter::bilinear;
  TEXVLM_CHECK(name == "trilinear", op, "filter", "nearest, bilinear or trilinear", "'", name, "'");
  return Filter::trilinear;
}

// Coordinates beside a texture: dtype (float32, or float64 beside float64 texels), device, shape, and a batch of the texture's or
// any when the texture has a batch of 1.
inline void check_coordinates(const char* op, const char* argument, const at::Tensor& t, const at::Tensor& data,
                              const char* names, std::initializer_list<int64_t> sizes) {
  check_shape(op, argument, t, names, sizes);
  check_dtype(op, argument, t, data.scalar_type() == at::kDouble ? at::kDouble : at::kFloat,
              data.scalar_type() == at::kDouble ? " (beside Double texels)" : " (coordinates beside texels other than Double)");
  check_same_device(op, argument, t, data);
  TEXVLM_CHECK(data.size(0) == 1 || data.size(0) == t.size(0), op, "data",
               "of batch 1 or of the batch of " + std::string(argument) + " (" + std::to_string(t.size(0)) + ")", "batch ",
               data.size(0));
}

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

// data [B, T, C] with its other arguments: the levels and how each channel is reduced.
struct TextureInputs {
  Levels table;
  Reducers reducers;
};
inline TextureInputs check_texture(const char* op, const Tensor& data, const TextureArgs& of) {
  const Levels table = check_texture(op, data, of.height, of.width, of.levels);
  return {table, check_reducers(op, strings(of.reducer), data.size(2))};
}

inline SampleInputs check_lod_queries(const char* op, const Tensor& data, const Tensor& uv, const Tensor& lod,
                                      const TextureArgs& of, std::string_view filter, std::string_view address) {
  const auto [table, reducers] = check_texture(op, data, of);
  check_lod_coordinates(op, data, uv, lod);
  return {table, reducers, parse_filter(op, filter), parse_address(op, address)};
}

inline SampleInputs check_grad_queries(const char* op, const Tensor& data, const Tensor& uv, const Tensor& ddx, const Tensor& ddy,
                                       const TextureArgs& of, int64_t max_anisotropy, std::string_view address,
                                       int64_t most = kMaxAnisotropy) {
  const auto [table, reducers] = check_texture(op, data, of);
  check_grad_coordinates(op, data, uv, ddx, ddy, max_anisotropy, most);
  return {table, reducers, Filter::trilinear, parse_address(op, address)};
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
