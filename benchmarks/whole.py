"""How much faster are all 40 channels of 1024 x 1024 than the best pipeline of OpenCV, SciPy and scikit-image that makes the same layers?

Both get the picture, the previous one, 16 embedding planes at patch pitch, token grids and past fixations, and both end with a
channels-last pyramid of 40 channels with the reducers of the table. The opponent's layers are of the same kind, each by the fastest call
of those libraries that makes it (several were tried where there is a choice); numbers differ where the methods do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch

import texvlm
from benchmarks._harness import US, Bench, Call, measure, median, peak_memory
from benchmarks.distance import textured

SIDE = 1024
PATCH = 16
TEXELS = texvlm.pyramid.texel_count(SIDE, SIDE, texvlm.level_count(SIDE, SIDE))
GROUPS = {
    "0-2 picture": [0, 1, 2],
    "3 edge": [3],
    "4 contrast_edge": [4],
    "5-6 passes": [5, 6],
    "7 motion": [7],
    "8 saliency": [8],
    "9-11 positions": [9, 10, 11],
    "12-14 clusters": [12, 13, 14],
    "15-16 previous": [15, 16],
    "17, 37 histories": [17, 37],
    "18-33 embedding": list(range(18, 34)),
    "34 edge_distance": [34],
    "35-36 attention": [35, 36],
    "38 boundary (with its clusters)": [38],
    "39 text": [39],
}


class Inputs:
    """One frame and what comes with it, the same for both sides."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.image = textured(SIDE)
        self.previous = self.image.roll((2, 3), dims=(2, 3))
        grid = SIDE // PATCH
        unit = torch.nn.functional.normalize(torch.randn(1, 16, grid, grid, generator=generator), dim=1)
        self.given = {
            "embedding": unit,
            "attention": torch.rand(1, grid, grid, generator=generator),
            "previous_attention": torch.rand(1, grid, grid, generator=generator),
            "previous_relevance": torch.rand(1, grid, grid, generator=generator),
            "previous_saliency": torch.rand(1, SIDE // 4, SIDE // 4, generator=generator),
        }
        self.points = torch.rand(1, 5, 2, generator=generator)

    def build(self, channels: list[int] | None = None, dtype: torch.dtype | None = None) -> Call:
        def call() -> texvlm.Texture:
            with torch.no_grad():
                return texvlm.build_channels(
                    self.image,
                    self.previous,
                    channels=channels,
                    given=self.given,
                    fixations=self.points,
                    gaze=self.points,
                    dtype=dtype,
                )

        return call


def opponent(inputs: Inputs) -> Callable[[], list[np.ndarray]] | None:
    """The pipeline of the other libraries; None where one of them is missing."""
    try:
        import cv2
        from skimage.segmentation import find_boundaries, slic
    except ImportError as error:
        print(f"the opponent is left out: {error}")
        return None
    border = cv2.BORDER_REPLICATE
    image, previous = (np.ascontiguousarray(p[0].permute(1, 2, 0).numpy()) for p in (inputs.image, inputs.previous))
    given = {name: plane[0].numpy() for name, plane in inputs.given.items()}
    points = inputs.points[0].numpy()
    reducers = [row.reducer for row in texvlm.CHANNELS]

    def magnitude(plane: np.ndarray) -> np.ndarray:
        x, y = (cv2.Sobel(plane, cv2.CV_32F, *d, borderType=border) for d in ((1, 0), (0, 1)))
        return cv2.magnitude(x, y)

    def enlarge(plane: np.ndarray) -> np.ndarray:
        return cv2.resize(plane, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)

    def clusters(picture: np.ndarray) -> np.ndarray:
        if hasattr(cv2, "ximgproc"):
            lab = cv2.cvtColor(cv2.GaussianBlur(picture, (3, 3), 0), cv2.COLOR_RGB2Lab)
            method = cv2.ximgproc.createSuperpixelSLIC(lab, cv2.ximgproc.SLIC, SIDE // 7, 20.0)
            method.iterate(10)
            method.enforceLabelConnectivity(25)
            return method.getLabels()
        return slic(picture, 50, compactness=20, sigma=1, start_label=0)

    def saliency(lab: np.ndarray) -> np.ndarray:
        levels = [lab]
        for _ in range(8):
            levels.append(cv2.pyrDown(levels[-1]))
        total = np.zeros(levels[2].shape[:2], np.float32)
        for centre in (2, 3, 4):
            for apart in (3, 4):
                around = cv2.resize(levels[centre + apart], levels[centre].shape[1::-1])
                difference = cv2.resize(np.abs(levels[centre] - around).sum(-1), total.shape[::-1])
                total += difference * (difference.max() - difference.mean()) ** 2
        return enlarge(total / max(float(total.max()), 1e-6))

    def text(grey: np.ndarray) -> np.ndarray:
        gradient = cv2.morphologyEx(grey, cv2.MORPH_GRADIENT, np.ones((3, 3), np.uint8))
        _, mask = cv2.threshold(gradient, 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
        mask = cv2.morphologyEx(mask, cv2.MORPH_CLOSE, np.ones((3, 9), np.uint8))
        count, labels, stats, _ = cv2.connectedComponentsWithStats(mask)
        width, height, area = stats[:, cv2.CC_STAT_WIDTH], stats[:, cv2.CC_STAT_HEIGHT], stats[:, cv2.CC_STAT_AREA]
        keep = (height > 6) & (height < 80) & (width > height) & (area > 0.3 * width * height)
        keep[0] = False
        return keep[labels].astype(np.float32) if count else mask.astype(np.float32)

    def history() -> np.ndarray:
        plane = np.zeros((SIDE // 4, SIDE // 4), np.float32)
        for i, (u, v) in enumerate(points):
            plane[int(v * SIDE // 4), int(u * SIDE // 4)] += 0.8 ** (len(points) - 1 - i)
        plane = cv2.GaussianBlur(plane, (0, 0), 0.05 * SIDE / 4)
        return enlarge(plane / plane.max())

    def pyramid(level: np.ndarray) -> list[np.ndarray]:
        out = [level]
        extreme = {name: [i for i, r in enumerate(reducers) if r == name] for name in ("max", "min", "mode")}
        while min(out[-1].shape[:2]) > 1:
            large = out[-1]
            groups = [
                cv2.resize(large[..., c : c + 4], (large.shape[1] // 2, large.shape[0] // 2), interpolation=cv2.INTER_AREA)
                for c in range(0, 40, 4)
            ]
            small = np.concatenate([g.reshape(large.shape[0] // 2, large.shape[1] // 2, -1) for g in groups], -1)
            corners = [large[y::2, x::2] for y in (0, 1) for x in (0, 1)]
            for name, reduce in (("max", np.maximum), ("min", np.minimum)):
                c = extreme[name]
                small[..., c] = reduce(
                    reduce(corners[0][..., c], corners[1][..., c]), reduce(corners[2][..., c], corners[3][..., c])
                )
            small[..., extreme["mode"]] = corners[0][..., extreme["mode"]]
            out.append(small)
        return out

    def run() -> list[np.ndarray]:
        luma, luma_before = (cv2.cvtColor(p, cv2.COLOR_RGB2GRAY) for p in (image, previous))
        grey, grey_before = ((p * 255).astype(np.uint8) for p in (luma, luma_before))
        flow = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_FAST).calc(grey, grey_before, None)
        y, x = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32)
        to = (x + flow[..., 0], y + flow[..., 1])

        def moved(plane: np.ndarray) -> np.ndarray:
            return cv2.remap(plane, *to, cv2.INTER_LINEAR, borderMode=border)

        edge = magnitude(luma)
        mean = cv2.blur(luma, (9, 9), borderType=border)
        deviation = np.sqrt(np.maximum(cv2.blur(luma * luma, (9, 9), borderType=border) - mean * mean, 0))
        low = cv2.sepFilter2D(luma, cv2.CV_32F, *([np.array([1, 4, 6, 4, 1], np.float32) / 16] * 2), borderType=border)
        labels = clusters(image)
        count = int(labels.max()) + 1
        area = np.bincount(labels.ravel(), minlength=count).astype(np.float32)
        centre_y, centre_x = (np.bincount(labels.ravel(), p.ravel(), count) / np.maximum(area, 1) for p in (y, x))
        radius = np.sqrt(area / np.pi)
        from_centre = (
            cv2.magnitude(x - centre_x[labels].astype(np.float32), y - centre_y[labels].astype(np.float32)) / radius[labels]
        )
        strong = edge > 2 * edge.mean()
        distance = cv2.distanceTransform((~strong).astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
        past = history()
        planes = [
            *cv2.split(image),
            edge / (4 * 1.25**0.5),
            magnitude((luma - mean) / (deviation + 0.02)),
            luma - low,
            low,
            cv2.absdiff(luma, moved(luma_before)),
            saliency(cv2.cvtColor(image, cv2.COLOR_RGB2Lab)),
            (x + 0.5) / SIDE,
            (y + 0.5) / SIDE,
            cv2.magnitude(x + 0.5 - SIDE / 2, y + 0.5 - SIDE / 2) / (SIDE / 2**0.5),
            labels.astype(np.float32),
            from_centre,
            (area / SIDE**2)[labels],
            moved(enlarge(given["previous_relevance"])),
            moved(enlarge(given["previous_saliency"])),
            past,
            *(enlarge(plane) for plane in given["embedding"]),
            distance / (SIDE * 2**0.5),
            enlarge(given["previous_attention"]),
            enlarge(given["attention"]),
            past,
            (find_boundaries(labels) & strong).astype(np.float32),
            text(grey),
        ]
        return pyramid(np.stack(planes, -1))

    return run


def main() -> int:
    bench = Bench(__doc__)
    inputs = Inputs()
    whole = inputs.build()
    calls: dict[str, Call] = {US: whole, "texvlm, half": inputs.build(dtype=torch.float16)}
    if peer := opponent(inputs):
        calls["OpenCV + SciPy + scikit-image"] = peer
    texture = whole()
    assert not [note for note in texture.meta.values() if str(note).startswith("absent")]
    size = texture.data.nbytes
    times = bench.compare("all 40 channels, all levels", calls, moves=3 * 4 * SIDE**2 * 2 + size)
    if peer:
        bench.gate("faster than the best pipeline of the others", times.ratio("OpenCV + SciPy + scikit-image"), at_least=5)
    peak = peak_memory(whole)
    if peak is not None:
        bench.gate("peak memory over the texture's", peak / size, at_most=1.5)
    half = inputs.build(dtype=torch.float16)().data.nbytes
    bench.gate("half storage over single", half / size, at_most=0.5)
    samples = measure({name: inputs.build(channels) for name, channels in GROUPS.items()}, seconds=4)
    table = {name: 1e3 * median(taken) for name, taken in samples.items()}
    print("\nmilliseconds by channel, each group by itself, with its mips and what it alone needs (flow for 7 is made in 15-16):")
    for name, ms in table.items():
        print(f"  {name:34}{ms:8.2f}")
    answer = f"{1e3 * times.median():.0f} ms for 40 channels and all levels of 1024 x 1024"
    if peer:
        answer += f", {times.ratio('OpenCV + SciPy + scikit-image'):.1f} times as fast as the others' best pipeline"
    return bench.finish(answer + (f"; peak memory {peak / size:.2f} of the texture" if peak is not None else ""))


if __name__ == "__main__":
    sys.exit(main())
