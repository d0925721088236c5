// Parsing of the sampler's names, once: filter and address strings to the enums of math/filter.h.
#pragma once

#include <string_view>

#include "check.h"
#include "math/filter.h"

namespace texvlm {

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

}  // namespace texvlm
