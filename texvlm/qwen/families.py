"""The Qwen models with eyes: what each family's tower needs, in one table, and what of transformers is there."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

OLDEST = "5.9"
"""The first transformers whose towers take geometry that was made elsewhere."""

MEAN_CLIP, STD_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Family:
    """What differs between the families; sizes (patch, merge, windows) are read from a model's configuration.

    Attributes:
        windows: whether most blocks of the tower attend within windows (Qwen2.5-VL).
        learned_positions: whether the tower adds a learned table of positions (Qwen3-VL and later).
        linear_layers: whether some layers of the decoder are linear attention, which has no keys to bias (Qwen3.5, Qwen4).
        frames_apart: whether a video is one run of tokens per frame, each a picture of its own to the positions (Qwen3-VL and later).
        mean, std: what the processor normalises by.
        groups: the least and the most that the published processors resize a picture to.
    """

    windows: bool = False
    learned_positions: bool = False
    linear_layers: bool = False
    frames_apart: bool = False
    mean: tuple[float, float, float] = HALF
    std: tuple[float, float, float] = HALF
    groups: tuple[int, int] = (64, 16384)


_QWEN3 = Family(learned_positions=True, frames_apart=True)
_QWEN35 = Family(learned_positions=True, linear_layers=True, frames_apart=True)

FAMILIES = {
    "qwen2_vl": Family(mean=MEAN_CLIP, std=STD_CLIP, groups=(4, 1280)),
    "qwen2_5_vl": Family(windows=True, mean=MEAN_CLIP, std=STD_CLIP, groups=(4, 1280)),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35,
    "qwen4_exp": _QWEN35,
}
"""By a configuration's `model_type`."""


def transformers_version() -> str:
    """The version that is installed; too old a one, or none, raises ImportError in one line."""
    try:
        import transformers
    except ImportError:
        raise ImportError(f"texvlm.qwen needs transformers >= {OLDEST}: pip install 'texvlm[qwen]'") from None
    numbers = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if numbers < tuple(int(part) for part in OLDEST.split(".")):
        raise ImportError(f"texvlm.qwen needs transformers >= {OLDEST}, found {transformers.__version__}")
    return transformers.__version__


def family_of(config: Any) -> Family:
    """The family of a model's configuration.

    Raises:
        ValueError: no such family; the message names those that work.
    """
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise ValueError(f"model must be one of the families {', '.join(FAMILIES)}, got model_type={kind!r}")
    return FAMILIES[kind]


def interpolation_names() -> tuple[str, str, bool]:
    """The tower's names for the taps of its learned positions and their weights, and whether taps come first ([4, N], up to 5.14)."""
    from transformers import vision_utils

    if hasattr(vision_utils, "get_vision_interpolation_indices_and_weights"):
        return "interp_indices", "interp_weights", False
    return "bilinear_indices", "bilinear_weights", True


@dataclass(frozen=True)
class Sizes:
    """The numbers of one model's tower and its special tokens, all that preparing a batch needs to know of it.

    Attributes:
        patch, merge, temporal: pixels of a patch, patches along a side of a group, frames of a patch.
        channels: of a picture.
        window: groups along a side of a window, 0 where there are none.
        side: rows of the learned table of positions, 0 where there is none.
        align_corners: how a picture's grid is laid over that table.
    """

    patch: int
    merge: int
    temporal: int
    channels: int
    window: int
    side: int
    align_corners: bool

    @property
    def cell(self) -> int:
        """Pixels along a side of a merged group: the unit of selection."""
        return self.patch * self.merge

    @property
    def unit(self) -> int:
        """Patches of a group."""
        return self.merge**2

    @property
    def row(self) -> int:
        """Numbers of a row of pixels."""
        return self.channels * self.temporal * self.patch**2


def sizes_of(model: Any) -> Sizes:
    """Of a model of one of the families, read from its tower."""
    tower = model.model.visual
    if family_of(model.config).learned_positions and getattr(tower, "interpolation_mode", "bilinear") != "bilinear":
        raise ValueError(f"the tower interpolates its positions {tower.interpolation_mode!r}; only 'bilinear' is known")
    return sizes_of_config(model.config, bool(getattr(tower, "interpolation_align_corners", True)))


def sizes_of_config(model_config: Any, align_corners: bool = True) -> Sizes:
    """Of a model of one of the families, of which there is no more than its configuration."""
    config, family = model_config.vision_config, family_of(model_config)
    return Sizes(
        patch=config.patch_size,
        merge=config.spatial_merge_size,
        temporal=config.temporal_patch_size,
        channels=config.in_channels if hasattr(config, "in_channels") else config.in_chans,
        window=config.window_size // config.spatial_merge_size // config.patch_size if family.windows else 0,
        side=int(config.num_position_embeddings**0.5) if family.learned_positions else 0,
        align_corners=align_corners,
    )


def rope_index(model_class: type, config: Any, **inputs: Any) -> Any:
    """A model's own 3-D positions of a prompt, without the model: the method needs nothing but the configuration."""
    bare: Any = object.__new__(model_class)
    bare.__dict__["config"] = config
    known = inspect.signature(model_class.get_rope_index).parameters  # type: ignore[attr-defined]
    return model_class.get_rope_index(bare, **{k: v for k, v in inputs.items() if k in known})  # type: ignore[attr-defined]
