"""Principal axes: the directions along which features differ most, found batch by batch, and features and texts laid on them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from texvlm._constants import constant
from texvlm._ext import integer, real_tensor

AXES = 16  # channels 18-33
_RANK = 1e-12  # an axis with less variance than this share of the largest is no axis


def unit(vectors: Tensor, dim: int = -1) -> Tensor:
    """Unit length along `dim`; vectors of no length stay zero, with no gradient."""
    squared = vectors.square().sum(dim, keepdim=True, dtype=torch.float64).to(vectors.dtype)  # the order of a sum follows strides
    there = squared > torch.finfo(vectors.dtype).tiny
    return vectors * torch.where(there, squared, torch.ones_like(squared)).rsqrt() * there


def steady_einsum(equation: str, *operands: Tensor) -> Tensor:
    """`torch.einsum`, whose result does not depend on how many threads add it up, nor on what else is in the batch.

    The last bits of products in float32 do on the CPU. There they are added in float64 and rounded once, so that what is left of the order
    lies far below a float's last bit. (A sum within 1e-9 of a rounding boundary could still fall to either side.)
    """
    if any(operand.dtype != torch.float32 or operand.device.type != "cpu" for operand in operands):
        return torch.einsum(equation, *operands)
    return torch.einsum(equation, *(operand.double() for operand in operands)).float()


def as_rows(features: Tensor) -> Tensor:
    """[n, D] or [B, D, h, w] as float64 rows [n, D]."""
    real_tensor("features", features)
    if features.dim() == 4:
        features = features.permute(0, 2, 3, 1).flatten(0, 2)
    if features.dim() != 2 or not features.is_floating_point():
        raise ValueError(f"features must be floating point, [n, D] or [B, D, h, w], got {features.dtype} {list(features.shape)}")
    return features.detach().double()


class Moments:
    """Count, mean and scatter of vectors, in float64: batch by batch, in any order, on many machines (`merge` what each has seen).

    Means and scatters are combined pairwise (Chan, Golub and LeVeque 1983), so a large common mean costs no digits.

    Example:
        >>> import torch, texvlm
        >>> seen = texvlm.pca.Moments()
        >>> for batch in torch.rand(10, 100, 32).unbind():
        ...     _ = seen.update(batch)
        >>> seen.count, texvlm.PCA.from_moments(seen).axes.shape
        (1000, torch.Size([16, 32]))
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.scatter = torch.zeros(0, 0, dtype=torch.float64)  # sum of outer products of differences from the mean

    def update(self, features: Tensor) -> Moments:
        """Adds vectors [n, D] or [B, D, h, w]; those that are not finite are left out."""
        rows = as_rows(features)
        rows = rows[rows.isfinite().all(1)]
        other = Moments()
        other.count = len(rows)
        if other.count:
            mean = rows.mean(0)
            rows = rows - mean
            other.mean, other.scatter = mean.cpu(), (rows.T @ rows).cpu()
        return self.merge(other)

    def merge(self, other: Moments) -> Moments:
        """Adds what `other` has seen."""
        if not other.count:
            return self
        if not self.count:
            self.count, self.mean, self.scatter = other.count, other.mean.clone(), other.scatter.clone()
            return self
        if other.mean.shape != self.mean.shape:
            raise ValueError(f"features must have {len(self.mean)} dimensions like those before, got {len(other.mean)}")
        count = self.count + other.count
        apart = other.mean - self.mean
        self.scatter += other.scatter + torch.outer(apart, apart) * (self.count * other.count / count)
        self.mean += apart * (other.count / count)
        self.count = count
        return self


@dataclass(frozen=True)
class PCA:
    """The axes along which features differ most, and how features and texts are laid on them.

    Fitted exactly: mean and D x D scatter in float64, one eigendecomposition; the result does not depend on the batches. The sign of
    each axis is such that its largest entry is positive, as in scikit-learn.

    A feature f becomes unit(axes (f - mean)), a text q unit(axes (q - text_mean)). The text_mean is the mean of the *texts* that the axes
    were fitted with (texts and pictures fill different parts of the joint space: the modality gap), else that of the features; with
    `centre=False` both means are zero, which keeps most of the result at full width (benchmarks/embedding.py measures all ways).

    Attributes:
        mean: [D] float64.
        axes: [16, D] float64, orthonormal rows, largest variance first; rows of zeros where the features have fewer dimensions.
        variance: [16] float64, of the features along each axis.
        total: variance of the features in all directions.
        text_mean: [D] float64.
        count: features seen.

    Example:
        >>> import torch, texvlm
        >>> pca = texvlm.PCA.fit(torch.rand(1000, 64))
        >>> pca.transform(torch.rand(2, 64, 5, 7)).shape, bool(pca.explained < 1)
        (torch.Size([2, 16, 5, 7]), True)
    """

    mean: Tensor
    axes: Tensor
    variance: Tensor
    total: float
    text_mean: Tensor
    count: int

    def __post_init__(self) -> None:
        if real_tensor("axes", self.axes).dim() != 2:
            raise ValueError(f"axes must be [16, D], got {list(self.axes.shape)}")
        kept, width = self.axes.shape
        for name, wanted in (("mean", width), ("variance", kept), ("text_mean", width)):
            if real_tensor(name, getattr(self, name)).shape != (wanted,):
                raise ValueError(f"{name} must be [{wanted}] beside axes {[kept, width]}, got {list(getattr(self, name).shape)}")

    @classmethod
    def fit(cls, features: Tensor | Iterable[Tensor], texts: Tensor | None = None, axes: int = AXES, centre: bool = True) -> PCA:
        """Fits the axes.

        Args:
            features: [n, D] or [B, D, h, w], or batches of them (a generator will do: each batch is seen once).
            texts: [Q, D], texts like the queries to come. The axes then follow the sum of both covariances, each scaled to the same
                total, so that directions are kept along which queries differ.
            axes: how many.
            centre: features and texts each about their own mean, as principal components are defined. False leaves the means in (the
                axes are then those of the second moments): unit vectors on the axes are then compared almost as unit vectors at full
                width are, since no common part is missing from their lengths, and order places alike.

        Raises:
            ValueError: fewer than two finite features, or batches of different widths.
        """
        if not isinstance(features, Iterable) or (hasattr(features, "ndim") and not isinstance(features, Tensor)):
            raise TypeError(f"features must be a tensor, or batches of them, got {type(features).__name__}")
        seen = Moments()
        for batch in (features,) if isinstance(features, Tensor) else features:
            seen.update(batch)
        return cls.from_moments(seen, None if texts is None else Moments().update(texts), axes, centre)

    @classmethod
    def from_moments(cls, features: Moments, texts: Moments | None = None, axes: int = AXES, centre: bool = True) -> PCA:
        """The same from what has been accumulated."""
        axes = integer("axes", axes, 1)
        for argument, moments in (("features", features), ("texts", texts)):
            if not isinstance(moments, Moments) and (moments is not None or argument == "features"):
                raise TypeError(f"{argument} must be Moments, got {type(moments).__name__}")
        if features.count < 2:
            raise ValueError(f"principal axes need at least two finite features, got {features.count}")
        width = len(features.mean)
        if not width:
            raise ValueError("features must have dimensions, got none")
        mean = features.mean if centre else torch.zeros_like(features.mean)
        covariance = features.scatter / (features.count - 1)
        if not centre:
            covariance = covariance + torch.outer(features.mean, features.mean) * (features.count / (features.count - 1))
        total = float(covariance.trace())
        wanted, text_mean = covariance, mean
        if texts is not None and texts.count:
            if texts.mean.shape != features.mean.shape:
                raise ValueError(f"texts must have {width} dimensions like the features, got {len(texts.mean)}")
            spread = texts.scatter if centre else texts.scatter + texts.count * torch.outer(texts.mean, texts.mean)
            wanted = covariance / max(total, 1e-300) + spread / spread.trace().clamp(min=1e-300)
            text_mean = texts.mean if centre else text_mean
        strength, vectors = torch.linalg.eigh(wanted)
        kept = min(axes, width)
        strength, found = strength.flip(0)[:kept], vectors.T.flip(0)[:kept]
        found = found * found.gather(1, found.abs().argmax(1, keepdim=True)).sign()
        found = found * (strength > _RANK * strength[0].clamp(min=0))[:, None]
        rows = torch.zeros(axes, width, dtype=torch.float64)
        rows[:kept] = found
        return cls(mean, rows, ((rows @ covariance) * rows).sum(1), total, text_mean, features.count)

    @property
    def explained(self) -> float:
        """The share of the features' variance that lies along the axes."""
        return float(self.variance.sum()) / self.total if self.total > 0 else 1.0

    def transform(self, features: Tensor) -> Tensor:
        """Features [n, D] or [B, D, h, w] on the axes, [n, 16] or [B, 16, h, w], unit length; zero where they are not finite.

        In float32 (float64 for float64 features). Differentiable.
        """
        return self._lay("features", features, self._mean_laid)

    def transform_text(self, texts: Tensor) -> Tensor:
        """Texts [D] or [Q, D] on the same axes, [16] or [Q, 16], unit length. Differentiable."""
        return self._lay("texts", texts, self._text_mean_laid)

    @cached_property
    def _mean_laid(self) -> Tensor:
        return self.axes @ self.mean

    @cached_property
    def _text_mean_laid(self) -> Tensor:
        return self.axes @ self.text_mean

    def _lay(self, argument: str, vectors: Tensor, offset: Tensor) -> Tensor:
        dense = real_tensor(argument, vectors).dim() == 4
        if not vectors.dim() or vectors.shape[1 if dense else -1] != self.axes.shape[1]:
            raise ValueError(
                f"{argument} must be [n, D] or [B, D, h, w] with D = {self.axes.shape[1]} dimensions like the axes, "
                f"got {list(vectors.shape)}"
            )
        work = torch.float64 if vectors.dtype == torch.float64 else torch.float32
        axes, offset = (constant(t, work, vectors.device) for t in (self.axes, offset))
        vectors = vectors.to(work)
        if dense:
            laid = steady_einsum("kd,bdhw->bkhw", axes, vectors) - offset[:, None, None]
        else:
            laid = steady_einsum("kd,...d->...k", axes, vectors) - offset
        dim = 1 if dense else -1
        finite = laid.isfinite().all(dim, keepdim=True)
        return unit(torch.where(finite, laid, torch.zeros_like(laid)), dim)

    def arrays(self) -> dict[str, Any]:
        """All of it as NumPy arrays, for `numpy.savez`."""
        import numpy as np

        return {
            "mean": self.mean.numpy(),
            "axes": self.axes.numpy(),
            "variance": self.variance.numpy(),
            "total": np.float64(self.total),
            "text_mean": self.text_mean.numpy(),
            "count": np.int64(self.count),
        }

    @classmethod
    def from_arrays(cls, arrays: Any) -> PCA:
        """The inverse of `arrays`."""
        tensors = {name: torch.from_numpy(arrays[name]).double() for name in ("mean", "axes", "variance", "text_mean")}
        return cls(total=float(arrays["total"]), count=int(arrays["count"]), **tensors)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an .npz file (no pickle in it)."""
        import numpy as np

        with open(path, "wb") as file:
            np.savez(file, **self.arrays())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PCA:
        """Reads what `save` wrote, bit for bit.

        Raises:
            ValueError: the file is broken, or holds something else.
        """
        import numpy as np

        with open(path, "rb") as file:
            try:
                with np.load(file, allow_pickle=False) as arrays:
                    return cls.from_arrays(arrays)
            except Exception as error:  # of NumPy, of its archive, of what compresses it
                raise ValueError(
                    f"{path} does not hold the axes that PCA.save wrote: {str(error) or type(error).__name__}"
                ) from None


torch.serialization.add_safe_globals([PCA])  # torch.load as it is by default
