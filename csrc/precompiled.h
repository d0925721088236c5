// What the host code includes of torch and of the standard library, to be parsed once per build (see setup.py). Nothing needs
// this file: every source includes what it uses.
#include <ATen/FuncTorchTLS.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>
