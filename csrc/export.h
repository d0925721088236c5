// What leaves libtexvlm.so besides the ops: few functions, which texvlm._C binds.
#pragma once

#if defined(__GNUC__)
#define TEXVLM_API __attribute__((visibility("default")))
#else
#define TEXVLM_API
#endif
