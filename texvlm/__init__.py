"""texvlm: pictures as mipmapped textures, and what a vision-language model shall see sharply under a fixed budget.

The way of the data: image -> channels -> pyramid -> sample -> fovea -> cascade. One module per stage; the ops under them are
torch.ops.texvlm.*, and texvlm.reference holds a plain-PyTorch version of each.
"""

__version__ = "0.1.0"  # before all that can fail: `doctor` says it then

import sys as _sys
from pathlib import Path as _Path

from texvlm import _ext as _ext
from texvlm import attention as attention
from texvlm import gl as gl
from texvlm._ext import build_info, cached_bytes, empty_cache
from texvlm.allocator import Allocator, Information, Participation, Perspective, TensionBalancer
from texvlm.attention import hierarchical_attention
from texvlm.carrying import Carried, carry
from texvlm.cascade import compact, select, topk
from texvlm.channels import (
    CHANNELS,
    LOCAL,
    MINIMAL,
    Channel,
    build_channels,
    channel_planes,
    contrast_edges,
    edges,
    update_channels,
)
from texvlm.distance import distance_transform
from texvlm.embedding import ClipEmbedding, DigitsEmbedding, Embedding, EmbeddingProvider, embedding_planes, relevance
from texvlm.features import cell_features
from texvlm.flow import optical_flow
from texvlm.footprint import sample_grad
from texvlm.fovea import FoveaLayout, FoveatedTokens, fixate, line_axes, sample_foveated
from texvlm.hardware import empty_texture_cache, sample_grad_hardware, sample_lod_hardware, texture_cache_stats
from texvlm.history import attention_map, fixation_history, gaussian_splat, gaze_history
from texvlm.laplacian import laplacian_decompose, laplacian_reconstruct
from texvlm.packing import pack_cells
from texvlm.patches import extract_patches
from texvlm.paths import CascadeConfig
from texvlm.pca import PCA
from texvlm.perturbation import perturbed_topk
from texvlm.prediction import predict_cells
from texvlm.pyramid import generate_mipmaps, level_count, update_mipmaps
from texvlm.quadtree import QuadtreeCut, quadtree_cut
from texvlm.salience import saliency, saliency_state, update_saliency
from texvlm.sample import sample_lod
from texvlm.selection import Selection, Tokens
from texvlm.soft_selection import (
    gumbel_noise,
    gumbel_topk,
    log_soft_topk,
    noise_gate,
    noisy_topk,
    sample_exact,
    soft_topk,
    straight_through,
)
from texvlm.superpixel import boundaries, superpixel_channels, superpixels
from texvlm.text import text_regions
from texvlm.texture import Texture, TextureBuffer
from texvlm.tiles import DirtyTiles, dirty_tiles
from texvlm.video import VideoStream
from texvlm.warping import motion, warp

_ext.describe_ops(_sys.modules[__name__])

cmake_prefix_path = str(_Path(__file__).parent / "cmake")
"""Where CMake finds texvlm: C++ programs say find_package(texvlm) and link to texvlm::texvlm (texvlm/include/texvlm/ops.h)."""


def __getattr__(name: str) -> object:
    """The parts that bring libraries of their own are imported when they are asked for: `texvlm.qwen` needs transformers."""
    if name in ("data", "qwen", "training"):
        import importlib

        return importlib.import_module(f"texvlm.{name}")
    raise AttributeError(f"module 'texvlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What can be called or is a value; modules are imported by their names, and none is taken for a function (`texvlm.sample`)."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


__all__ = [
    "CHANNELS",
    "LOCAL",
    "MINIMAL",
    "PCA",
    "Allocator",
    "Carried",
    "CascadeConfig",
    "Channel",
    "ClipEmbedding",
    "DigitsEmbedding",
    "DirtyTiles",
    "Embedding",
    "EmbeddingProvider",
    "FoveaLayout",
    "FoveatedTokens",
    "Information",
    "Participation",
    "Perspective",
    "QuadtreeCut",
    "Selection",
    "TensionBalancer",
    "Texture",
    "TextureBuffer",
    "Tokens",
    "VideoStream",
    "attention_map",
    "boundaries",
    "build_channels",
    "build_info",
    "cached_bytes",
    "carry",
    "cell_features",
    "channel_planes",
    "cmake_prefix_path",
    "compact",
    "contrast_edges",
    "dirty_tiles",
    "distance_transform",
    "edges",
    "embedding_planes",
    "empty_cache",
    "empty_texture_cache",
    "extract_patches",
    "fixate",
    "fixation_history",
    "gaussian_splat",
    "gaze_history",
    "generate_mipmaps",
    "gumbel_noise",
    "gumbel_topk",
    "hierarchical_attention",
    "laplacian_decompose",
    "laplacian_reconstruct",
    "level_count",
    "line_axes",
    "log_soft_topk",
    "motion",
    "noise_gate",
    "noisy_topk",
    "optical_flow",
    "pack_cells",
    "perturbed_topk",
    "predict_cells",
    "quadtree_cut",
    "relevance",
    "saliency",
    "saliency_state",
    "sample_exact",
    "sample_foveated",
    "sample_grad",
    "sample_grad_hardware",
    "sample_lod",
    "sample_lod_hardware",
    "select",
    "soft_topk",
    "straight_through",
    "superpixel_channels",
    "superpixels",
    "text_regions",
    "texture_cache_stats",
    "topk",
    "update_channels",
    "update_mipmaps",
    "update_saliency",
    "warp",
]
