// CUDA's vector types, with its alignments: a misaligned access is then undefined here too, and UBSan reports it.
#pragma once

#define TEXVLM_SHIM_VECTORS(name, T, align2, align4)                                          \
  struct name##1 {                                                                            \
    T x;                                                                                      \
  };                                                                                          \
  struct alignas(align2) name##2 {                                                            \
    T x, y;                                                                                   \
  };                                                                                          \
  struct name##3 {                                                                            \
    T x, y, z;                                                                                \
  };                                                                                          \
  struct alignas(align4) name##4 {                                                            \
    T x, y, z, w;                                                                             \
  };                                                                                          \
  constexpr name##1 make_##name##1(T x) { return {x}; }                                       \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }                               \
  constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                       \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
TEXVLM_SHIM_VECTORS(char, signed char, 2, 4)
TEXVLM_SHIM_VECTORS(uchar, unsigned char, 2, 4)
TEXVLM_SHIM_VECTORS(short, short, 4, 8)
TEXVLM_SHIM_VECTORS(ushort, unsigned short, 4, 8)
TEXVLM_SHIM_VECTORS(int, int, 8, 16)
TEXVLM_SHIM_VECTORS(uint, unsigned, 8, 16)
TEXVLM_SHIM_VECTORS(longlong, long long, 16, 16)
TEXVLM_SHIM_VECTORS(ulonglong, unsigned long long, 16, 16)
TEXVLM_SHIM_VECTORS(float, float, 8, 16)
TEXVLM_SHIM_VECTORS(double, double, 16, 16)
#undef TEXVLM_SHIM_VECTORS
