"""texvlm: pictures as mipmapped textures, and what a vision-language model shall see sharply under a fixed budget.

The way of the data: image -> channels -> pyramid -> sample -> fovea -> cascade. One module per stage; the ops under them are
torch.ops.texvlm.*, and texvlm.reference holds a plain-PyTorch version of each.
"""

from texvlm import _ext as _ext
from texvlm._ext import build_info, cached_bytes, empty_cache
from texvlm.cascade import Selection, select, topk
from texvlm.channels import CHANNELS, MINIMAL, Channel, build_channels, contrast_edges, edges
from texvlm.distance import distance_transform
from texvlm.footprint import sample_grad
from texvlm.fovea import FoveaLayout, FoveatedTokens, sample_foveated
from texvlm.laplacian import laplacian_pyramid, laplacian_reconstruct
from texvlm.patches import extract_patches
from texvlm.pyramid import generate_mipmaps, level_count, update_mipmaps
from texvlm.salience import saliency
from texvlm.sample import sample_lod
from texvlm.text import text_regions
from texvlm.texture import Texture

__version__ = "0.1.0"

__all__ = [
    "CHANNELS",
    "MINIMAL",
    "Channel",
    "FoveaLayout",
    "FoveatedTokens",
    "Selection",
    "Texture",
    "build_channels",
    "build_info",
    "cached_bytes",
    "contrast_edges",
    "distance_transform",
    "edges",
    "empty_cache",
    "extract_patches",
    "generate_mipmaps",
    "laplacian_pyramid",
    "laplacian_reconstruct",
    "level_count",
    "saliency",
    "sample_foveated",
    "sample_grad",
    "sample_lod",
    "select",
    "text_regions",
    "topk",
    "update_mipmaps",
]
