"""texvlm: pictures as mipmapped textures, and what a vision-language model shall see sharply under a fixed budget.

The way of the data, one module a stage. help(texvlm.select) says all about one function; `python -m texvlm` has the same on the command
line; texvlm.reference holds a plain-PyTorch version of each op of torch.ops.texvlm.

    pictures    Texture (Texture.open, .patches, .sample), build_channels, update_channels, CHANNELS
    channels    edges, contrast_edges, saliency, superpixels, boundaries, text_regions, distance_transform, optical_flow, motion
    embeddings  Embedding, ClipEmbedding, DigitsEmbedding, relevance, PCA
    pyramids    generate_mipmaps, update_mipmaps, laplacian_decompose, laplacian_reconstruct
    sampling    sample_lod, sample_grad, extract_patches, warp; sample_lod_hardware, sample_grad_hardware (texture units)
    fovea       FoveaLayout, sample_foveated, fixate, fixation_history
    selection   select, CascadeConfig, Selection, topk, quadtree_cut, predict_cells, pack_cells
    learning    Allocator, soft_topk, gumbel_topk, noisy_topk, sample_exact, perturbed_topk, straight_through; texvlm.training
    video       VideoStream, dirty_tiles, carry
    attention   hierarchical_attention, texvlm.attention
    models      texvlm.qwen (Qwen-VL with fewer tokens), texvlm.towers
    data        texvlm.data (Select for loaders, index for many pictures)

    >>> import torch, texvlm
    >>> texvlm.select(torch.rand(3, 256, 256), k=64).indices.shape
    torch.Size([1, 64])
"""

__version__ = "0.1.0"  # before all that can fail: `doctor` says it then

import sys as _sys
from pathlib import Path as _Path
from types import ModuleType as _ModuleType

# Each name is imported as itself, which makes it public; a list of them would have help(texvlm) print the text of every one.
from texvlm import _ext as _ext, attention as attention, gl as gl
from texvlm._ext import (
    build_info as build_info,
    cached_bytes as cached_bytes,
    empty_cache as empty_cache,
)
from texvlm.allocator import (
    Allocator as Allocator,
    Information as Information,
    Participation as Participation,
    Perspective as Perspective,
    TensionBalancer as TensionBalancer,
)
from texvlm.attention import hierarchical_attention as hierarchical_attention
from texvlm.carrying import (
    Carried as Carried,
    carry as carry,
)
from texvlm.cascade import (
    compact as compact,
    select as select,
    topk as topk,
)
from texvlm.channels import (
    CHANNELS as CHANNELS,
    LOCAL as LOCAL,
    MINIMAL as MINIMAL,
    Channel as Channel,
    build_channels as build_channels,
    channel_planes as channel_planes,
    contrast_edges as contrast_edges,
    edges as edges,
    update_channels as update_channels,
)
from texvlm.distance import distance_transform as distance_transform
from texvlm.embedding import (
    ClipEmbedding as ClipEmbedding,
    DigitsEmbedding as DigitsEmbedding,
    Embedding as Embedding,
    EmbeddingProvider as EmbeddingProvider,
    embedding_planes as embedding_planes,
    relevance as relevance,
)
from texvlm.features import cell_features as cell_features
from texvlm.flow import optical_flow as optical_flow
from texvlm.footprint import sample_grad as sample_grad
from texvlm.fovea import (
    FoveaLayout as FoveaLayout,
    FoveatedTokens as FoveatedTokens,
    fixate as fixate,
    line_axes as line_axes,
    sample_foveated as sample_foveated,
)
from texvlm.hardware import (
    empty_texture_cache as empty_texture_cache,
    sample_grad_hardware as sample_grad_hardware,
    sample_lod_hardware as sample_lod_hardware,
    texture_cache_stats as texture_cache_stats,
)
from texvlm.history import (
    attention_map as attention_map,
    fixation_history as fixation_history,
    gaussian_splat as gaussian_splat,
    gaze_history as gaze_history,
)
from texvlm.laplacian import (
    laplacian_decompose as laplacian_decompose,
    laplacian_reconstruct as laplacian_reconstruct,
)
from texvlm.packing import pack_cells as pack_cells
from texvlm.patches import extract_patches as extract_patches
from texvlm.paths import CascadeConfig as CascadeConfig
from texvlm.pca import PCA as PCA
from texvlm.perturbation import perturbed_topk as perturbed_topk
from texvlm.prediction import predict_cells as predict_cells
from texvlm.pyramid import (
    generate_mipmaps as generate_mipmaps,
    level_count as level_count,
    update_mipmaps as update_mipmaps,
)
from texvlm.quadtree import (
    QuadtreeCut as QuadtreeCut,
    quadtree_cut as quadtree_cut,
)
from texvlm.salience import (
    saliency as saliency,
    saliency_state as saliency_state,
    update_saliency as update_saliency,
)
from texvlm.sample import sample_lod as sample_lod
from texvlm.selection import (
    Selection as Selection,
    Tokens as Tokens,
)
from texvlm.soft_selection import (
    gumbel_noise as gumbel_noise,
    gumbel_topk as gumbel_topk,
    log_soft_topk as log_soft_topk,
    noise_gate as noise_gate,
    noisy_topk as noisy_topk,
    sample_exact as sample_exact,
    soft_topk as soft_topk,
    straight_through as straight_through,
)
from texvlm.superpixel import (
    boundaries as boundaries,
    superpixel_channels as superpixel_channels,
    superpixels as superpixels,
)
from texvlm.text import text_regions as text_regions
from texvlm.texture import (
    Texture as Texture,
    TextureBuffer as TextureBuffer,
)
from texvlm.tiles import (
    DirtyTiles as DirtyTiles,
    dirty_tiles as dirty_tiles,
)
from texvlm.video import VideoStream as VideoStream
from texvlm.warping import (
    motion as motion,
    warp as warp,
)

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
    return sorted(
        name for name, value in globals().items() if name[:2] == "__" or (name[0] != "_" and not isinstance(value, _ModuleType))
    )
