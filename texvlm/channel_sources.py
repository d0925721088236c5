"""What the channels of a texture are made of, besides the formulas of its picture: planes, and where each of them came from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm._ext import acc_dtype, real_tensor
from texvlm.embedding import Embedding, EmbeddingProvider, relevance
from texvlm.flow import optical_flow
from texvlm.history import fixation_history, gaze_history
from texvlm.pca import AXES
from texvlm.pictures import as_float, as_previous
from texvlm.superpixel import boundaries, superpixel_channels, superpixels
from texvlm.text import text_regions
from texvlm.texture import Texture
from texvlm.warping import motion, warp

if TYPE_CHECKING:
    from texvlm.pictures import ImageLike

Field: TypeAlias = tuple[Tensor, Tensor | None]
"""Flow [B, 2, h, w] from the picture to the previous one, and occlusion [B, h, w]."""

COLOURS = ("red", "green", "blue")
CLUSTERS = ("cluster", "cluster_distance", "cluster_size")  # in the order of `superpixel_channels`
PREVIOUS = ("previous_relevance", "previous_saliency")
HISTORIES = ("fixation_history", "gaze_history")
EMBEDDING = tuple(f"embedding_{i}" for i in range(AXES))


class Sources:
    """What the wanted channels of a picture are made of.

    `follow` it, then `add_*`; afterwards the op `build_channels` takes all of it.

    Args:
        picture: [B, 3, H, W].
        previous: the picture before it, or its texture.
        wanted: names of channels.
        given: planes by name, as in `build_channels`.

    Attributes:
        picture: floating point where it is compared with pictures that are.
        before: the previous picture, moved along the flow if saliency needs it; or None.
        field: the flow, or None.
        planes: [B, n, h, w] each.
        names: of their channels, in turn.
        notes: for each channel where it came from, or why there is none.
    """

    def __init__(
        self, picture: Tensor, previous: ImageLike | Texture | None, wanted: Collection[str], given: Mapping[str, Tensor]
    ) -> None:
        self.texture = previous if isinstance(previous, Texture) else None
        self.before = None if previous is None else _before(previous, picture)
        self.picture = picture if self.before is None or self.before.dtype == picture.dtype else as_float(picture)
        self.wanted, self.given = set(wanted), given
        self.field: Field | None = None
        self.planes: list[Tensor] = []
        self.names: list[str] = []
        self.notes: dict[str, str] = {}
        for name, plane in given.items():
            _check_given(name, plane, picture)
            if name not in ("embedding", "cluster", *PREVIOUS):  # which need more than to be handed on
                self._add((name,), plane[:, None], "given")

    def lacks(self, *names: str) -> bool:
        """Whether one of these is wanted, and not given."""
        return any(name in self.wanted and name not in self.given for name in names)

    def _add(self, names: Sequence[str], planes: Tensor, note: str) -> None:
        if self.wanted.isdisjoint(names):
            return
        self.planes.append(planes if planes.is_floating_point() else planes.float())
        self.names += names
        self.notes |= dict.fromkeys(names, note)

    def follow(self, flow: Tensor | Field | str | None, always: bool) -> None:
        """Takes or estimates the flow, and compares the previous picture with this one along it.

        Args:
            flow: as in `build_channels`.
            always: estimate it for a previous picture even where nothing wanted is to be moved along it.
        """
        if isinstance(flow, str):
            if flow != "auto":
                raise ValueError(f"flow must be a tensor, 'auto' or None, got {flow!r}")
            if self.before is None or not (always or self._carries()):
                return
            self.field = optical_flow(self.before.detach(), self.picture.detach())
        else:
            self.field = (flow, None) if isinstance(flow, Tensor) else flow
            if self.field is not None:
                _check_field(self.field, self.picture)
        if self.before is None or self.field is None:
            return
        field, occlusion = self.field
        if self.lacks("motion"):
            now, before = (p if p.dtype == torch.uint8 else p.to(acc_dtype(p.dtype)) for p in (self.picture, self.before))
            self._add(
                ("motion",),
                motion(previous=before, current=now, flow=field, occlusion=occlusion)[:, None],
                "picture, previous picture and flow",
            )
        if self.lacks("saliency"):
            self.picture, self.before = as_float(self.picture), as_float(self.before)
            self.before = warp(self.before, field, occlusion, fill=None)

    def _carries(self) -> bool:
        """Whether something wanted is to be moved along the flow."""
        moved = self.wanted & {*PREVIOUS, *HISTORIES}
        return bool(moved) if self.texture is not None else bool(moved & set(PREVIOUS) & set(self.given))

    def _old(self, name: str) -> Tensor | None:
        """The plane of this name in the previous texture, if it is there and not a mere zero."""
        if self.texture is None or name not in self.texture.names:
            return None
        absent = str(self.texture.meta.get(name, "")).startswith("absent")
        return None if absent else self.texture.level(0)[:, self.texture.index(name)]

    def add_previous(self) -> None:
        """Relevance and saliency of the previous picture, moved along the flow."""
        for name in PREVIOUS:
            if name not in self.wanted:
                continue
            if name in self.given:
                plane, note = self.given[name], "given"
            elif name == "previous_saliency" and (saliency := self._old("saliency")) is not None:
                plane, note = saliency, "saliency of the previous texture"
            elif (
                name == "previous_relevance"
                and self.texture is not None
                and self._old("embedding_0") is not None
                and "query_vector" in self.texture.meta
            ):
                plane, note = relevance(self.texture), "relevance of the previous texture to its query"
            else:
                self.notes[name] = "absent: not given, and no previous texture that has it"
                continue
            plane = plane[:, None] if plane.is_floating_point() else plane[:, None].float()
            if self.field is not None:
                flow, occlusion = self.field
                plane, note = warp(plane, flow, occlusion), f"{note}, moved along the flow"
            self._add((name,), plane, note)

    def add_histories(self, fixations: Tensor | None, gaze: Tensor | None) -> None:
        """Where the eye and the foveas have been, on top of what the previous texture says, moved along the flow."""
        (batch, _, height, width), device = self.picture.shape, self.picture.device
        flow, occlusion = self.field or (None, None)
        for name, points, build in zip(HISTORIES, (fixations, gaze), (fixation_history, gaze_history), strict=True):
            if not self.lacks(name):
                continue
            before = self._old(name)
            if points is None and before is None:
                self.notes[name] = f"absent: no {'fixations' if name == 'fixation_history' else 'gaze'} given"
                continue
            if points is None:
                points = self.picture.new_empty((batch, 0, 2), dtype=torch.float32)
            points = real_tensor("fixations" if name == "fixation_history" else "gaze", points, device=device)
            points = (points[None] if points.dim() == 2 else points).to(device)
            points = points.expand(batch, -1, -1) if points.shape[0] == 1 and points.dim() == 3 else points
            if points.dim() != 3 or points.shape[0] != batch or points.shape[2] != 2:
                argument = "fixations" if name == "fixation_history" else "gaze"
                raise ValueError(f"{argument} must be [B, P, 2] with B = {batch}, or [P, 2], got {list(points.shape)}")
            kept = None if before is None else before.to(points.dtype)
            plane = build(points, height, width, previous=kept, flow=flow, occlusion=occlusion)
            moved = "" if self.field is None else ", moved along the flow"
            self._add((name,), plane[:, None], "points" if before is None else f"points and previous texture{moved}")

    def add_clusters(self, n: int) -> None:
        """Superpixels, or the labels that are given: what is known of each, and the borders that edges support."""
        # given labels are no plane of the channel cluster yet
        names = [name for name in CLUSTERS if name == "cluster" or name not in self.given]
        planes_wanted = not self.wanted.isdisjoint(names)
        if not planes_wanted and not self.lacks("boundary"):
            return
        picture = self.picture.detach()
        if "cluster" in self.given:
            labels, note = self.given["cluster"], "given labels"
            if labels.shape[1:] != picture.shape[2:]:
                raise ValueError(
                    f"given['cluster'] must be labels of every pixel, {list(picture.shape[2:])}, got {list(labels.shape[1:])}"
                )
            labels, n = _as_labels(labels)
        else:
            n = min(n, max(1, picture.shape[2] * picture.shape[3]))
            labels, note = superpixels(picture, n)[0], f"superpixels, n = {n}"
        if planes_wanted:
            planes = superpixel_channels(labels, n)
            if len(names) < len(CLUSTERS):
                planes = torch.stack([planes[:, CLUSTERS.index(name)] for name in names], 1)
            self._add(names, planes, note)
        if not self.lacks("boundary"):
            return
        note = f"{note} and edges"
        if n > 1 << 24:  # float32 does not tell these labels apart
            self._add(("boundary",), boundaries(picture, labels=labels)[:, None], note)
            return
        self.notes["boundary"] = note
        if "cluster" not in self.names:  # the op finds the borders of labels, and has the edges
            self.planes.append(labels[:, None].float())
            self.names.append("cluster")

    def add_text(self) -> None:
        """Where there is writing."""
        if self.lacks("text"):
            self._add(("text",), text_regions(self.picture.detach())[:, None], "picture")

    def add_embedding(self, embedding: Embedding | EmbeddingProvider | None, query: str | Tensor | None) -> Tensor | None:
        """The embedding's axes. Returns the query on them, if there is one."""
        if embedding is not None and not isinstance(embedding, Embedding):
            embedding = Embedding(embedding)
        if embedding is not None and len(embedding.pca.axes) != AXES:
            raise ValueError(f"embedding must have {AXES} axes, one for each of its channels, got {len(embedding.pca.axes)}")
        vector = query if isinstance(query, Tensor) and query.shape == (AXES,) else None
        if query is not None and embedding is not None:
            vector = embedding.query(query)
        if query is not None and vector is None:
            raise ValueError(
                "query needs embedding= (an Embedding or a provider), or to be a vector [16] on the axes of given['embedding']"
            )
        if vector is not None and vector.dim() != 1:
            raise ValueError(
                f"query must be one text or one vector, got {vector.shape[0]}; `relevance` takes several, [Q, {AXES}]"
            )
        if vector is not None and not (vector.isfinite().all() and vector.any()):
            raise ValueError("query must have a direction: a vector that is zero or not finite has none")
        if self.wanted.isdisjoint(EMBEDDING):
            return vector
        if "embedding" in self.given:
            planes, note = self.given["embedding"], "given"
        elif embedding is not None:
            planes, note = embedding.planes(self.picture), embedding.name
        else:
            self.notes |= dict.fromkeys(EMBEDDING, "absent: no embedding given")
            return vector
        size = [min(a, b) for a, b in zip(planes.shape[2:], self.picture.shape[2:], strict=True)]
        self._add(EMBEDDING, planes if list(planes.shape[2:]) == size else F.interpolate(planes, size, mode="area"), note)
        return vector


def _check_given(name: str, plane: Tensor, picture: Tensor) -> None:
    dims = 4 if name == "embedding" else 3
    real_tensor(f"given[{name!r}]", plane)
    if plane.dim() != dims or plane.shape[0] != picture.shape[0] or (dims == 4 and plane.shape[1] != AXES):
        shape = f"[B, {AXES}, h, w]" if dims == 4 else "[B, h, w]"
        raise ValueError(f"given[{name!r}] must be {shape} with B = {picture.shape[0]}, got {list(plane.shape)}")
    if name not in ("embedding", *PREVIOUS) and any(a > b for a, b in zip(plane.shape[1:], picture.shape[2:], strict=True)):
        raise ValueError(
            f"given[{name!r}] must be at most as large as the picture, {list(picture.shape[2:])}, got {list(plane.shape[1:])}"
        )
    if plane.device != picture.device:
        raise ValueError(f"given[{name!r}] must be on {picture.device} as the picture is, got {plane.device}")


def _check_field(field: Field, picture: Tensor) -> None:
    if not isinstance(field, (tuple, list)) or len(field) != 2 or not isinstance(field[0], Tensor):
        raise TypeError(f"flow must be a tensor, (flow, occlusion), 'auto' or None, got {type(field).__name__}")
    flow, occlusion = field
    batch = picture.shape[0]
    if flow.dim() != 4 or flow.shape[:2] != (batch, 2) or not flow.is_floating_point() or flow.device != picture.device:
        raise ValueError(
            f"flow must be floating point [B, 2, h, w] with B = {batch} on {picture.device}, "
            f"got {flow.dtype} {list(flow.shape)} on {flow.device}"
        )
    shape = (batch, *flow.shape[2:])
    if occlusion is not None and (occlusion.shape != shape or occlusion.dtype != torch.bool or occlusion.device != flow.device):
        raise ValueError(
            f"flow's occlusion must be bool {list(shape)} on {flow.device}, "
            f"got {occlusion.dtype} {list(occlusion.shape)} on {occlusion.device}"
        )


def _as_labels(labels: Tensor) -> tuple[Tensor, int]:
    """Labels as int64, and a number that is above them all.

    Neither a GPU nor a compiler can say how large they are: there, any up to the number of pixels count, others are no region.
    """
    pixels = labels.shape[1] * labels.shape[2]
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or not labels.numel():
        return labels.long(), pixels
    whole = labels.long()
    low, high = int(whole.min()), int(whole.max())
    if low < 0 or high >= pixels or (labels.is_floating_point() and not torch.equal(whole.to(labels.dtype), labels)):
        raise ValueError(
            f"given['cluster'] must be whole numbers from 0 to {pixels - 1} (H W - 1; torch.unique(labels, return_inverse=True)[1] makes "
            f"such), got {labels.dtype} from {labels.min().item()} to {labels.max().item()}"
        )
    return whole, high + 1


def _before(previous: ImageLike | Texture, picture: Tensor) -> Tensor:
    """The previous picture, or the one that a texture was made of, to be compared with this one."""
    if not isinstance(previous, Texture):
        return as_previous(previous, picture)
    size, wanted = (previous.data.shape[0], previous.height, previous.width), (picture.shape[0], *picture.shape[2:])
    if size != wanted:
        raise ValueError(
            f"previous must be a texture of {wanted[0]} pictures of {wanted[1]} x {wanted[2]}, got {size[0]} of {size[1]} x {size[2]}"
        )
    if previous.data.device != picture.device:
        raise ValueError(f"previous must be on {picture.device} as the picture is, got {previous.data.device}")
    if not set(COLOURS) <= set(previous.names):
        raise ValueError("previous must be a texture with the channels red, green and blue, or a picture")
    planes = [previous.level(0)[:, previous.index(name)] for name in COLOURS]
    return torch.stack(planes, 1).to(as_float(picture[:0]).dtype)
