"""Which places a question is about, asked of the model itself: where its decoder looks in a coarse picture."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from texvlm.cascade import topk
from texvlm.qwen import attention
from texvlm.qwen.families import family_of, rope_index, sizes_of
from texvlm.qwen.geometry import Geometry
from texvlm.qwen.pictures import pack_groups


class CoarseAttention:
    """A selector that runs the model on a coarse picture first, and keeps the places that the end of the prompt attends to there.

    One short pass without gradients: the coarse picture has at most `groups` groups. The attention of the last token of the prompt is
    summed over heads and layers, what every picture's first tokens draw is damped by the mean over the prompt's other tokens of text
    after the picture, and the map is laid over the full grid.

    Args:
        model: the adapter's.
        groups: of the coarse picture, at most.
        layers: the decoder's layers that count, as shares of its depth; the first ones attend to everything alike. Linear layers have no
            attention to look at.

    Example:
        >>> from texvlm.qwen import CoarseAttention, QwenVLAdapter, tiny_batch, tiny_model
        >>> model = tiny_model("qwen3_vl")
        >>> adapter = QwenVLAdapter(model, CoarseAttention(model, groups=6), k=4)
        >>> adapter.prepare(tiny_batch(model, [(48, 48)]))["texvlm_cells"].shape
        torch.Size([4, 4])
    """

    needs_prompt = True

    def __init__(self, model: Any, groups: int = 64, layers: tuple[float, float] = (0.25, 0.9)) -> None:
        if groups < 1:
            raise ValueError(f"groups must be at least 1, got {groups}")
        if not 0 <= layers[0] < layers[1] <= 1:
            raise ValueError(f"layers must be two shares of the depth, rising, from 0 to 1, got {layers}")
        self.model, self.groups, self.layers = model, groups, layers
        self.sizes, self.family = sizes_of(model), family_of(model.config)

    def __call__(self, image: Tensor, grid: tuple[int, int], k: int, prompt: tuple[Tensor, Tensor]) -> Tensor:
        """Indices [k], best first.

        Args:
            image: [3, H, W].
            grid: rows and columns of groups.
            k: how many.
            prompt: ids before and after the picture's tokens.
        """
        heat = self.heat(image, grid, prompt)
        return topk(heat.flatten()[None], k)[1][0].to(image.device)

    @torch.no_grad()
    def heat(self, image: Tensor, grid: tuple[int, int], prompt: tuple[Tensor, Tensor]) -> Tensor:
        """How much the end of the prompt looks at each group, [rows, columns]; 1 is as much as its other words do."""
        model, sizes, family = self.model, self.sizes, self.family
        device = model.model.visual.patch_embed.proj.weight.device
        scale = min(1.0, (self.groups / (grid[0] * grid[1])) ** 0.5)
        rows, columns = max(1, int(grid[0] * scale)), max(1, int(grid[1] * scale))
        count = rows * columns
        before, after = (part.cpu() for part in prompt)
        token = int(model.config.image_token_id)
        ids = torch.cat([before, before.new_full((count,), token), after])[None]
        pixels = pack_groups(image, torch.arange(count), (rows * sizes.cell, columns * sizes.cell), sizes, family).to(device)
        thw = torch.tensor([[1, rows * sizes.merge, columns * sizes.merge]])
        geometry = Geometry.whole(rows, columns, sizes)
        where = rope_index(
            type(model.model),
            model.config,
            input_ids=ids,
            mm_token_type_ids=(ids == token).int(),
            image_grid_thw=thw,
            video_grid_thw=None,
            attention_mask=torch.ones_like(ids),
        )[0]
        positions = torch.cat([torch.arange(ids.shape[1])[None, None], where]).to(device)
        ids = ids.to(device)
        watch = attention.Watch(queries=max(1, len(after)))
        with attention.used_by(model.model.language_model):
            model.model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=positions,
                pixel_values=pixels,
                image_grid_thw=thw.to(device),
                use_cache=False,
                **{f"image_{name}": value.to(device) for name, value in geometry.keywords().items()},
                **{attention.WATCH: watch},
            )
        if not watch.seen:
            raise ValueError(f"{model.config.model_type} has no layer of full attention to look at")
        first, last = (round(share * len(watch.seen)) for share in self.layers)
        seen = torch.stack(watch.seen[first : max(last, first + 1)]).sum(0)[:, len(before) : len(before) + count]
        heat = seen[-1] / seen.mean(0).clamp(min=1e-12)
        return F.interpolate(heat.view(1, 1, rows, columns), grid, mode="bilinear", align_corners=False)[0, 0]
