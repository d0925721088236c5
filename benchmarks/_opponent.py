"""What `whole` measures against: the layers of the 40 channels with OpenCV, SciPy and scikit-image.

Each layer is made by the fastest call of those libraries that makes it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import texvlm


def opponent(
    image: torch.Tensor, previous: torch.Tensor, given: dict[str, torch.Tensor], points: torch.Tensor
) -> Callable[[], list[np.ndarray]] | None:
    """The pipeline of the other libraries, of square pictures [1, 3, side, side]; None where one of them is missing.

    given: embedding, attention, previous_attention, previous_relevance and previous_saliency, as `build_channels` takes them; points:
    past fixations [1, n, 2].
    """
    try:
        import cv2
        from skimage.segmentation import find_boundaries, slic
    except ImportError as error:
        print(f"the opponent is left out: {error}")
        return None
    border = cv2.BORDER_REPLICATE
    side = image.shape[-1]
    frame, frame_before = (np.ascontiguousarray(p[0].permute(1, 2, 0).numpy()) for p in (image, previous))
    planes_given = {name: plane[0].numpy() for name, plane in given.items()}
    past_points = points[0].numpy()
    reducers = [row.reducer for row in texvlm.CHANNELS]

    def magnitude(plane: np.ndarray) -> np.ndarray:
        x, y = (cv2.Sobel(plane, cv2.CV_32F, *d, borderType=border) for d in ((1, 0), (0, 1)))
        return cv2.magnitude(x, y)

    def enlarge(plane: np.ndarray) -> np.ndarray:
        return cv2.resize(plane, (side, side), interpolation=cv2.INTER_LINEAR)

    def clusters(picture: np.ndarray) -> np.ndarray:
        if hasattr(cv2, "ximgproc"):
            lab = cv2.cvtColor(cv2.GaussianBlur(picture, (3, 3), 0), cv2.COLOR_RGB2Lab)
            method = cv2.ximgproc.createSuperpixelSLIC(lab, cv2.ximgproc.SLIC, side // 7, 20.0)
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
        plane = np.zeros((side // 4, side // 4), np.float32)
        for i, (u, v) in enumerate(past_points):
            plane[int(v * side // 4), int(u * side // 4)] += 0.8 ** (len(past_points) - 1 - i)
        plane = cv2.GaussianBlur(plane, (0, 0), 0.05 * side / 4)
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
        luma, luma_before = (cv2.cvtColor(p, cv2.COLOR_RGB2GRAY) for p in (frame, frame_before))
        grey, grey_before = ((p * 255).astype(np.uint8) for p in (luma, luma_before))
        flow = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_FAST).calc(grey, grey_before, None)
        y, x = np.mgrid[0:side, 0:side].astype(np.float32)
        to = (x + flow[..., 0], y + flow[..., 1])

        def moved(plane: np.ndarray) -> np.ndarray:
            return cv2.remap(plane, *to, cv2.INTER_LINEAR, borderMode=border)

        edge = magnitude(luma)
        mean = cv2.blur(luma, (9, 9), borderType=border)
        deviation = np.sqrt(np.maximum(cv2.blur(luma * luma, (9, 9), borderType=border) - mean * mean, 0))
        low = cv2.sepFilter2D(luma, cv2.CV_32F, *([np.array([1, 4, 6, 4, 1], np.float32) / 16] * 2), borderType=border)
        labels = clusters(frame)
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
            *cv2.split(frame),
            edge / (4 * 1.25**0.5),
            magnitude((luma - mean) / (deviation + 0.02)),
            luma - low,
            low,
            cv2.absdiff(luma, moved(luma_before)),
            saliency(cv2.cvtColor(frame, cv2.COLOR_RGB2Lab)),
            (x + 0.5) / side,
            (y + 0.5) / side,
            cv2.magnitude(x + 0.5 - side / 2, y + 0.5 - side / 2) / (side / 2**0.5),
            labels.astype(np.float32),
            from_centre,
            (area / side**2)[labels],
            moved(enlarge(planes_given["previous_relevance"])),
            moved(enlarge(planes_given["previous_saliency"])),
            past,
            *(enlarge(plane) for plane in planes_given["embedding"]),
            distance / (side * 2**0.5),
            enlarge(planes_given["previous_attention"]),
            enlarge(planes_given["attention"]),
            past,
            (find_boundaries(labels) & strong).astype(np.float32),
            text(grey),
        ]
        return pyramid(np.stack(planes, -1))

    return run
