"""texvlm: pictures as mipmapped textures, and what a vision-language model shall see sharply under a fixed budget.

The way of the data: image -> channels -> pyramid -> sample -> fovea -> cascade. One module per stage; the ops under them are
torch.ops.texvlm.*, and texvlm.reference holds a plain-PyTorch version of each.
"""

from texvlm import _ext as _ext
from texvlm._ext import build_info
from texvlm.footprint import sample_grad
from texvlm.pyramid import generate_mipmaps, level_count, update_mipmaps
from texvlm.sample import sample_lod
from texvlm.texture import Texture

__version__ = "0.1.0"

__all__ = [
    "Texture",
    "build_info",
    "generate_mipmaps",
    "level_count",
    "sample_grad",
    "sample_lod",
    "update_mipmaps",
]
