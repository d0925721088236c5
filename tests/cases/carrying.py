import torch

from cases import Bad, Case, rand

ONE = (torch.float32,)


def cells(rows, columns, batch=2, channels=3, flow=(9, 14), speed=1.5, occlusion=True, strided=False, holes=False):
    """Appearance that changes a little, values that lie beside their cells, a random flow."""

    def make(_, g):
        now = rand(g, batch, channels, rows, columns)
        before, held = (now + 0.2 * (rand(g, *now.shape) - 0.5) for _ in range(2))
        before[..., : columns // 4] = now[..., : columns // 4]
        offset = 0.9 * (rand(g, batch, 2, rows, columns) - 0.5)
        still = rand(g, batch, rows, columns) < 0.2
        if flow is None:
            return now, before, held, offset, still
        field = speed * flow[1] / columns * (2 * rand(g, batch, 2, *flow) - 1)
        if holes:
            field[0, 1, 2, 3], field[0, 0, 5, 5] = float("nan"), float("inf")
        hidden = rand(g, batch, *flow) < 0.4 if occlusion else None
        if strided:
            now, field = now.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), field.repeat_interleave(2, 3)[..., ::2]
        return now, before, held, offset, still, field, hidden

    return make


CASES = [
    Case("carry", "5x7", cells(5, 7), dtypes=ONE, atol=1e-5, inductor=True),
    Case("carry", "6x4-same-grid", cells(6, 4, flow=(6, 4), speed=0.7), dtypes=ONE, atol=1e-5),
    Case("carry", "4x9-coarse-flow", cells(4, 9, flow=(3, 2), channels=1), dtypes=ONE, atol=1e-5),
    Case("carry", "no-occlusion", cells(3, 5, occlusion=False), dtypes=ONE, atol=1e-5),
    Case("carry", "no-flow", cells(3, 5, flow=None), dtypes=ONE, atol=1e-5),
    Case("carry", "strided", cells(4, 6, strided=True), dtypes=ONE, atol=1e-5),
    Case("carry", "not-finite", cells(5, 6, holes=True), dtypes=ONE, atol=1e-5),
    Case("carry", "far", cells(5, 6, speed=40.0), dtypes=ONE, atol=1e-5),
    Case("carry", "one-cell", cells(1, 1, flow=(2, 2)), dtypes=ONE, atol=1e-5),
    Case("carry", "empty-batch", cells(3, 4, batch=0), dtypes=ONE, atol=1e-5),
]


def given(**other):
    named = {
        "now": torch.zeros(1, 3, 4, 5),
        "before": torch.zeros(1, 3, 4, 5),
        "held": torch.zeros(1, 3, 4, 5),
        "offset": torch.zeros(1, 2, 4, 5),
        "still": torch.zeros(1, 4, 5, dtype=torch.bool),
        "flow": torch.zeros(1, 2, 8, 10),
        "occlusion": torch.zeros(1, 8, 10, dtype=torch.bool),
    }
    return lambda: tuple((named | other).values())


BAD = [
    Bad("carry", "now", given(now=torch.zeros(1, 3, 4)), r"now must be \[B, A, rows, columns\]"),
    Bad("carry", "dtype", given(now=torch.zeros(1, 3, 4, 5, dtype=torch.float64)), "now must be Float"),
    Bad("carry", "before", given(before=torch.zeros(1, 3, 4, 6)), "before must be"),
    Bad("carry", "held", given(held=torch.zeros(1, 2, 4, 5)), "held must be"),
    Bad("carry", "offset", given(offset=torch.zeros(1, 3, 4, 5)), r"offset must be \[B, 2, rows, columns\]"),
    Bad("carry", "still", given(still=torch.zeros(1, 4, 5)), "still must be Bool"),
    Bad("carry", "flow", given(flow=torch.zeros(1, 3, 8, 10)), r"flow must be \[B, 2, h, w\]"),
    Bad("carry", "occlusion", given(occlusion=torch.zeros(1, 8, 9, dtype=torch.bool)), r"occlusion must be \[B, h, w\]"),
    Bad("carry", "no-flow", given(flow=None), "occlusion must be given together with flow"),
]
