"""Every op of texvlm in plain PyTorch: independent of the compiled code, clear before fast.

The oracle of tests and benchmarks: names and arguments are those of `torch.ops.texvlm`, gradients
are torch's own autograd. All functions work in float64 and float32 on any device; half inputs are computed in
float32 and rounded where they are stored.
"""

from .attention import attention_pack, hierarchical_attention
from .carrying import carry
from .cascade import Selection, compact, keep_topk, select, select_topk
from .channels import build_channels, update_channels
from .distance import distance_transform
from .embedding import principal_axes, project, relevance
from .features import cell_features
from .flow import optical_flow
from .footprint import sample_grad
from .fovea import fovea_tokens
from .gl import generate_mipmaps_gl
from .hardware import sample_grad_hardware, sample_lod_hardware
from .history import enlarge, gaussian_splat
from .laplacian import laplacian_decompose, laplacian_reconstruct
from .packing import pack_cells
from .patches import extract_patches
from .perturbation import perturbed_topk
from .prediction import predict_cells
from .pyramid import generate_mipmaps, level_count, level_table, texel_count, update_mipmaps
from .quadtree import quadtree_cut
from .salience import saliency, update_saliency
from .sample import sample_lod
from .soft_selection import soft_topk
from .superpixel import boundaries, superpixel_channels, superpixels
from .text import text_regions
from .tiles import dirty_tiles
from .warping import motion, warp

__all__ = [
    "Selection",
    "attention_pack",
    "boundaries",
    "build_channels",
    "carry",
    "cell_features",
    "compact",
    "dirty_tiles",
    "distance_transform",
    "enlarge",
    "extract_patches",
    "fovea_tokens",
    "gaussian_splat",
    "generate_mipmaps",
    "generate_mipmaps_gl",
    "hierarchical_attention",
    "keep_topk",
    "laplacian_decompose",
    "laplacian_reconstruct",
    "level_count",
    "level_table",
    "motion",
    "optical_flow",
    "pack_cells",
    "perturbed_topk",
    "predict_cells",
    "principal_axes",
    "project",
    "quadtree_cut",
    "relevance",
    "saliency",
    "sample_grad",
    "sample_grad_hardware",
    "sample_lod",
    "sample_lod_hardware",
    "select",
    "select_topk",
    "soft_topk",
    "superpixel_channels",
    "superpixels",
    "texel_count",
    "text_regions",
    "update_channels",
    "update_mipmaps",
    "update_saliency",
    "warp",
]
