"""Every op of texvlm in plain PyTorch: independent of the compiled code, clear before fast.

The oracle of tests, benchmarks and notebooks: names and arguments are those of `torch.ops.texvlm`, gradients
are torch's own autograd. All functions work in float64 and float32 on any device; half inputs are computed in
float32 and rounded where they are stored.
"""

from .cascade import Selection, score_cells, select, select_topk
from .channels import build_channels
from .distance import distance_transform
from .footprint import sample_grad
from .fovea import fovea_tokens
from .laplacian import laplacian_decompose, laplacian_reconstruct
from .patches import extract_patches
from .pyramid import generate_mipmaps, level_count, level_table, texel_count, update_mipmaps
from .salience import saliency
from .sample import sample_lod
from .text import text_regions

__all__ = [
    "Selection",
    "build_channels",
    "distance_transform",
    "extract_patches",
    "fovea_tokens",
    "generate_mipmaps",
    "laplacian_decompose",
    "laplacian_reconstruct",
    "level_count",
    "level_table",
    "saliency",
    "sample_grad",
    "sample_lod",
    "score_cells",
    "select",
    "select_topk",
    "texel_count",
    "text_regions",
    "update_mipmaps",
]
