// Argument checks with one message style: "texvlm::op: argument must be ..., got ...".
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "math/texture.h"

namespace texvlm {

std::string shape_of(const at::Tensor& t);

// ok, or an error "texvlm::<op>: <argument> must be <expected>, got <actual>"
#define TEXVLM_CHECK(ok, op, argument, expected, ...) \
  TORCH_CHECK_VALUE(ok, "texvlm::", op, ": ", argument, " must be ", expected, ", got ", __VA_ARGS__)

// The rank, and where a size is not -1, the size of each dimension. `names` is the shape as the user knows it: "[B, N, 2]".
void check_shape(const char* op, const char* argument, const at::Tensor& t, const char* names,
                 std::initializer_list<int64_t> sizes);
void check_dtype(const char* op, const char* argument, const at::Tensor& t, at::ScalarType expected, const char* why);
void check_same_device(const char* op, const char* argument, const at::Tensor& t, const at::Tensor& other);
// float32, float64, float16 or bfloat16
void check_texel_dtype(const char* op, const char* argument, at::ScalarType dtype);

// height, width >= 1, 1 <= levels <= floor(log2(max side)) + 1, and no overflow of 64-bit texel counts.
Levels check_levels(const char* op, int64_t height, int64_t width, int64_t levels);
// One reducer for all channels or one per channel.
Reducers check_reducers(const char* op, const std::vector<std::string>& names, int64_t channels);
// data [B, T, C]: packed, contiguous, T matching the level table. Returns the table.
Levels check_texture(const char* op, const at::Tensor& data, int64_t height, int64_t width, int64_t levels);

}  // namespace texvlm
