"""Dense image-text features from a transformers CLIP or SigLIP model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MIXINGS = ("self", "value", "full")


class ClipEmbedding:
    """Dense features of a contrastive image-text model of transformers, as an `EmbeddingProvider`.

    The pooled output of such a model describes the whole picture, and the last block's patch tokens of a CLIP say little about their
    places: they were never trained to. `mixing` says what becomes of the last block:

    - "self": each patch attends to the patches whose *queries* are like its own, and neither residual nor feed-forward follow
      (ClearCLIP, Lan et al. 2024, arXiv 2407.12442; after SCLIP, Wang et al. 2023). Default for CLIP.
    - "value": each patch keeps its own value (MaskCLIP, Zhou et al. 2022, arXiv 2112.01071).
    - "full": the block as it was trained. Default for SigLIP, whose pooling head reads all patches, so that they are trained.

    Then the model's own way into the joint space: CLIP's last norm and projection; in SigLIP the pooling head, along the path that a
    patch's value takes through it when the head attends to that patch alone. Features are of unit length.

    Args:
        model: a CLIPModel, a SiglipModel (SigLIP 2 of fixed resolution is one), or one built like them, in any floating dtype, on any
            device.
        processor: the model's processor; its image mean and deviation and its tokenizer are used.
        size: pixels of the longer side of what the tower sees; the aspect is kept up to the patch. By default twice the model's own
            size, with position embeddings interpolated; the model's own size, squeezed to its square, where it cannot do that.
        windows: look through windows of the model's own size instead, half a window apart, and average where they overlap. Positions
            are then those of training, at two to four times the cost.
        mixing: see above.
        templates: texts are embedded as the mean over these, "{}" being the query; for instance ("a photo of a {}.",).

    Gradients flow to a picture that requires them; else the tower runs without.

    Example:
        >>> from transformers import AutoModel, AutoProcessor                              # doctest: +SKIP
        >>> model = AutoModel.from_pretrained("openai/clip-vit-base-patch16").eval()       # doctest: +SKIP
        >>> clip = ClipEmbedding(model, AutoProcessor.from_pretrained(model.name_or_path)) # doctest: +SKIP
        >>> embedding = texvlm.Embedding.fit(clip, pictures, texts=["a cat", "a road"])    # doctest: +SKIP
        >>> embedding.relevance(picture, "a red car").shape                                # doctest: +SKIP
        torch.Size([1, 28, 28])
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        size: int | None = None,
        windows: bool = False,
        mixing: str | None = None,
        templates: Sequence[str] = ("{}",),
    ) -> None:
        vision = getattr(model, "vision_model", None)
        embeddings: Any = getattr(vision, "embeddings", None)
        self._clip = hasattr(model, "visual_projection")
        if (
            not hasattr(embeddings, "patch_size")
            or not (self._clip or hasattr(vision, "head"))
            or not hasattr(model, "get_text_features")
        ):
            raise TypeError(
                f"model must be a CLIPModel or a SiglipModel of transformers, or built like one, got {type(model).__name__}"
            )
        if not hasattr(embeddings, "image_size"):
            raise TypeError(f"model must have a fixed resolution; {type(model).__name__} takes packed patches of any size")
        if mixing not in (None, *MIXINGS):
            raise ValueError(f"mixing must be one of {', '.join(MIXINGS)}, got {mixing!r}")
        if not templates or any("{}" not in template for template in templates):
            raise ValueError(f"templates must each hold {{}}, got {templates}")
        pixels = getattr(processor, "image_processor", processor)
        if getattr(pixels, "image_mean", None) is None or getattr(pixels, "image_std", None) is None:
            raise TypeError(f"processor must know image_mean and image_std, got {type(processor).__name__}")
        self.model, self.tokenizer = model, getattr(processor, "tokenizer", processor)
        self.mean, self.std = list(pixels.image_mean), list(pixels.image_std)
        self.patch, self.native = int(embeddings.patch_size), int(embeddings.image_size)
        self.size, self.windows, self.templates = size or 2 * self.native, windows, tuple(templates)
        self.mixing = mixing or ("self" if self._clip else "full")
        self._any_grid = hasattr(embeddings, "interpolate_pos_encoding")
        checkpoint = getattr(model.config, "_name_or_path", "") or "of random weights"
        self.name = f"{type(model).__name__} {checkpoint}"

    def encode_image(self, pictures: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in [0, 1] on the model's device -> unit features [B, D, h, w], float32."""
        weight = self.model.vision_model.embeddings.patch_embedding.weight
        if pictures.device != weight.device:
            raise ValueError(f"the pictures are on {pictures.device}, the model on {weight.device}")
        rows, columns = self._grid(*pictures.shape[2:])
        with torch.set_grad_enabled(torch.is_grad_enabled() and pictures.requires_grad):
            pictures = F.interpolate(
                pictures.float(), (rows * self.patch, columns * self.patch), mode="bicubic", antialias=True, align_corners=False
            )
            mean, std = (torch.tensor(x, device=pictures.device).view(-1, 1, 1) for x in (self.mean, self.std))
            pixels = ((pictures.clamp(0, 1) - mean) / std).to(weight.dtype)
            features = self._windowed(pixels) if self.windows else self._dense(pixels)
            return F.normalize(features.float(), dim=1)

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Texts -> unit features [Q, D], float32, on the model's device."""
        weight = self.model.vision_model.embeddings.patch_embedding.weight
        total: Tensor | float = 0.0
        for template in self.templates:
            tokens = self.tokenizer(
                [template.format(text) for text in texts],
                padding=True if self._clip else "max_length",  # SigLIP was trained so, and pools the last position
                truncation=True,
                max_length=self.model.config.text_config.max_position_embeddings,
                return_tensors="pt",
            )
            given = {
                k: v.to(weight.device) for k, v in tokens.items() if k == "input_ids" or (k == "attention_mask" and self._clip)
            }
            with torch.no_grad():
                out = self.model.get_text_features(**given)
            total = total + F.normalize(getattr(out, "pooler_output", out).float(), dim=-1)
        assert isinstance(total, Tensor)
        return F.normalize(total, dim=-1)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Patches down and across."""
        native = self.native // self.patch
        if not self._any_grid and not self.windows:
            return native, native
        scale = self.size / max(height, width) / self.patch
        least = native if self.windows else 1
        return max(least, round(height * scale)), max(least, round(width * scale))

    def _windowed(self, pixels: Tensor) -> Tensor:
        native = self.native // self.patch
        rows, columns = (n // self.patch for n in pixels.shape[2:])

        def starts(length: int) -> list[int]:
            return sorted({*range(0, length - native, max(1, native // 2)), length - native})

        places = [(y, x) for y in starts(rows) for x in starts(columns)]
        side, p = self.native // self.patch * self.patch, self.patch
        total: Tensor | None = None
        times = pixels.new_zeros(1, 1, rows, columns)
        for y, x in places:
            seen = F.normalize(self._dense(pixels[:, :, y * p : y * p + side, x * p : x * p + side]), dim=1)
            pad = (x, columns - native - x, y, rows - native - y)
            total = F.pad(seen, pad) if total is None else total + F.pad(seen, pad)
            times += F.pad(torch.ones_like(times[:, :, :native, :native]), pad)
        assert total is not None
        return total / times

    def _dense(self, pixels: Tensor) -> Tensor:
        """Normalised pixels, whole patches -> features of the joint space [B, D, h, w]."""
        vision = self.model.vision_model
        rows, columns = (n // self.patch for n in pixels.shape[2:])
        more = {"interpolate_pos_encoding": True} if self._any_grid else {}
        out = vision(pixel_values=pixels, output_hidden_states=True, return_dict=True, **more)
        if self.mixing == "full":
            tokens = out.hidden_states[-1]
        else:
            block = vision.encoder.layers[-1]
            tokens = self._attend(block.self_attn, block.layer_norm1(out.hidden_states[-2]))
        patches = self._joint(vision.post_layernorm(tokens[:, -rows * columns :]))
        return patches.transpose(1, 2).unflatten(2, (rows, columns))

    def _attend(self, attention: Any, tokens: Tensor) -> Tensor:
        """The last block's attention without its mixing: of queries with queries, or of each token with itself alone."""
        values = attention.v_proj(tokens)
        if self.mixing == "self":
            heads = attention.num_heads
            queries, split = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (attention.q_proj(tokens), values))
            values = F.scaled_dot_product_attention(queries, queries, split).transpose(1, 2).flatten(-2)
        return attention.out_proj(values)

    def _joint(self, tokens: Tensor) -> Tensor:
        """Normed tokens [B, n, width] in the joint space [B, n, D]."""
        if self._clip:
            return self.model.visual_projection(tokens)
        head = self.model.vision_model.head
        width = tokens.shape[-1]
        bias = head.attention.in_proj_bias
        values = F.linear(tokens, head.attention.in_proj_weight[2 * width :], None if bias is None else bias[2 * width :])
        pooled = head.attention.out_proj(values)
        return pooled + head.mlp(head.layernorm(pooled))
