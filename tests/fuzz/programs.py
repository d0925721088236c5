"""What is called: an expression for each public function, and for each op those that its contract cases make.

An expression has «holes», each with what usually stands there. The names in it are those of `sizes`, one choice of which fits all its
holes.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from cases import FLOATS, Case, all_cases
from torch.utils._python_dispatch import TorchDispatchMode

import texvlm

HOLE = re.compile("«(.*?)»")
NAMES: dict[str, Any] = {"torch": torch, "texvlm": texvlm, "inf": float("inf"), "nan": float("nan")}


@dataclass(frozen=True)
class Program:
    """An expression with holes."""

    name: str  # of what it calls, which is left out once it has crashed too often
    text: str
    dtypes: tuple[torch.dtype, ...] = FLOATS
    rare: bool = False  # slow, or with a file or a driver behind it
    infinite: bool = False  # results that are not finite belong to it

    @property
    def holes(self) -> list[str]:
        return HOLE.findall(self.text)

    def filled(self, holes: list[str]) -> str:
        """With these in its holes."""
        parts = iter(holes)
        return HOLE.sub(lambda _: next(parts), self.text)


def sizes(rng: random.Random, dtypes: tuple[torch.dtype, ...] = FLOATS) -> dict[str, Any]:
    """What the names in a program stand for: sizes, the dtype of texels (D), and of what lies beside them (E)."""
    dtype = rng.choice(dtypes)
    return {
        "B": rng.choice((1, 1, 2, 3)),
        "C": rng.choice((1, 2, 3, 4, 5, 13)),
        "H": rng.choice((1, 2, 5, 8, 16, 17, 33, 48)),
        "W": rng.choice((1, 3, 4, 8, 16, 19, 31, 64)),
        "N": rng.choice((1, 2, 5, 9)),
        "K": rng.choice((1, 2, 4, 8)),
        "D": dtype,
        "E": torch.float64 if dtype == torch.float64 else torch.float32,
    }


PICTURE, PLANE, UV = "«torch.rand(B, 3, H, W, dtype=D)»", "«torch.rand(B, H, W, dtype=E)»", "«torch.rand(B, N, 2, dtype=E)»"
TEXTURE = "texvlm.Texture(«torch.rand(B, C, H, W, dtype=D)», «'mean'»)"
SCORES, MASK = "«torch.randn(B, N, dtype=E)»", "«torch.rand(B, H, W) < .3»"
FLOW, HIDDEN = "«torch.randn(B, 2, H, W)»", "«torch.rand(B, H, W) < .1»"
TILES = "«torch.rand(B, -(-H // 8), -(-W // 8)) < .5»"
FRAME = "«torch.rand(3, H, W)»"
VECTORS = "«torch.rand(N, 20)»"
FEATURES = "«torch.rand(B, N, K)»"

PROGRAMS = f"""
texvlm.Texture({PICTURE}, «'mean'», «None», «None»)
texvlm.Texture({PICTURE}, «['max', 'min', 'mode']», levels=«1», names=«['r', 'g', 'b']»)
texvlm.Texture(«torch.rand(B, 12, C, dtype=D)», layout=«'spatial'», grid=«(3, 4)»)
texvlm.Texture(«torch.randint(0, 256, (H, W, 3), dtype=torch.uint8).numpy()», dtype=«torch.float16»)
texvlm.Texture.from_data(«torch.rand(B, 21, C, dtype=D)», «4», «4», «3», «'mean'», «None»)
texvlm.Texture.stack([{TEXTURE}, {TEXTURE}])
{TEXTURE}.level(«0»)
texvlm.Texture({PICTURE}, names=['r', 'g', 'b']).index(«'g'»)
{TEXTURE}.to(«torch.float32»)
texvlm.Texture.from_data(«torch.rand(B, 21, C)», 4, 4, 3).replace(«torch.rand(B, 21, C)»)
{TEXTURE}.detach().cpu().half().float()
{TEXTURE}.sample({UV}, «.5», «'trilinear'», «'clamp'», «None»)
{TEXTURE}.sample({UV}, «torch.rand(B, N, dtype=E) * 3», «'nearest'», «'wrap'»)
{TEXTURE}.sample_footprint({UV}, {UV}, {UV}, «16», «'mirror'»)
{TEXTURE}.patches({UV}, «1.», «16», «None», «'border'»)
{TEXTURE}.patches({UV}, «torch.rand(B, N)», «3», «torch.rand(B, N, 2, 2, dtype=E)»)
texvlm.TextureBuffer({TEXTURE}).forward({UV}, «0.»)
texvlm.TextureBuffer({TEXTURE}).set_extra_state(«torch.tensor([H, W, texvlm.level_count(H, W)])»)
texvlm.TextureBuffer({TEXTURE}).get_extra_state()
texvlm.sample_lod({TEXTURE}, {UV}, «0.», «'bilinear'», «'clamp'»)
texvlm.sample_lod_hardware({TEXTURE}, {UV}, «0.», «'trilinear'», «'clamp'»)
texvlm.sample_grad({TEXTURE}, {UV}, {UV}, {UV}, «4», «'clamp'»)
texvlm.sample_grad_hardware({TEXTURE}, {UV}, {UV}, {UV}, «4», «'clamp'»)
texvlm.extract_patches({TEXTURE}, {UV}, «0.», «4», «None», «'clamp'»)
texvlm.generate_mipmaps({PICTURE}, «'mean'», «None», «'auto'», «None»)
texvlm.update_mipmaps({TEXTURE}, «[(0, 0, 1, 1)]»)
texvlm.update_mipmaps({TEXTURE}, «None», {TILES}, «8»)
texvlm.laplacian_decompose({TEXTURE})
texvlm.laplacian_reconstruct({TEXTURE})
texvlm.level_count(«7», «5»)
texvlm.FoveaLayout(«16», «(8, 9)», «16», «80.», «None»).offsets
texvlm.FoveaLayout(«4», «(3,)», «2», «torch.tensor(8.)», «4.»).place(«torch.float32», «torch.device('cpu')»)
texvlm.sample_foveated({TEXTURE}, {UV}, texvlm.FoveaLayout(4, (3,), 2), «'clamp'», «None»)
texvlm.fixate({PLANE}, 2, «.1»)
texvlm.line_axes(«torch.rand(B, N, 2, dtype=E)», «4.»)
texvlm.distance_transform({MASK}, «'exact'»)
texvlm.distance_transform({MASK}, «'jfa'»)
texvlm.saliency({PICTURE}, «None»)
texvlm.saliency({PICTURE}, {PICTURE})
texvlm.update_saliency({PICTURE}, *texvlm.saliency_state({PICTURE}), {TILES}, {TILES}, «8», first=«True»)
texvlm.text_regions({PICTURE}, «None»)
texvlm.optical_flow({PICTURE}, {PICTURE}, finest=«None», initial=«None»)
texvlm.optical_flow({PICTURE}, {PICTURE}, finest=«1», initial={FLOW})
texvlm.warp({PICTURE}, {FLOW}, {HIDDEN}, «0.»)
texvlm.motion(previous={PICTURE}, current={PICTURE}, flow={FLOW}, occlusion={HIDDEN})
texvlm.gaussian_splat({UV}, «torch.rand(B, N, dtype=E)», «.1», «H», «W», base=«None», keep=«1.»)
texvlm.fixation_history({UV}, «H», «W», decay=«.9», sigma=«.05», previous={PLANE}, flow={FLOW}, occlusion={HIDDEN})
texvlm.gaze_history({UV}, «H», «W», decay=«.9», sigma=«.05», previous=«None»)
texvlm.attention_map({PLANE}, «H», «W»)
texvlm.superpixels({PICTURE}, «9»)
texvlm.superpixel_channels(«torch.randint(0, 9, (B, H, W))», «9»)
texvlm.boundaries({PICTURE}, «9», «torch.randint(0, 9, (B, H, W))»)
texvlm.edges({PICTURE})
texvlm.contrast_edges({PICTURE})
texvlm.channel_planes({PICTURE})
texvlm.dirty_tiles({PICTURE}, {PICTURE}, «8», «.1», «'largest'»)
texvlm.dirty_tiles(«torch.randint(0, 256, (B, 3, H, W), dtype=torch.uint8)», «torch.zeros(B, 3, H, W, dtype=torch.uint8)», «8», «0.», «'mean'»)
texvlm.cell_features(texvlm.Texture({PICTURE}, names=['red', 'green', 'blue']), «torch.zeros(B, 1, dtype=torch.long)», «['entropy', 'residual']», «8», «4», «None», «[1.0, 0.5]»)
texvlm.relevance(«torch.rand(B, 16, H, W)», «torch.rand(16)», «0»)
texvlm.quadtree_cut([«torch.rand(B, 3, 5)», «torch.rand(B, 2, 3)»], «4»)
texvlm.predict_cells({PICTURE}, «8», «.1»)
texvlm.pack_cells({PICTURE}, «torch.zeros(B, 1, dtype=torch.long)», «(16, 8)», patch=«4», merge=«2», temporal=«2», mean=«(.5, .5, .5)», std=«(.5, .5, .5)», rescale=«None»)
texvlm.pack_cells({PICTURE}, «torch.zeros(B, 2, 3, dtype=torch.long)», «(16, 16)», patch=«4»)
texvlm.soft_topk({SCORES}, «1», «1.», «'logistic'», «None»)
texvlm.noisy_topk({SCORES}, «1», «1.», {SCORES}, «'gumbel'»)
texvlm.noise_gate(«torch.randn(B, N, C)», «torch.rand(B, N)»)
texvlm.sample_exact(«torch.full((B, 4), .5)», «2»)
texvlm.straight_through(«torch.zeros(B, 1, dtype=torch.long)», «torch.rand(B, N)»)
texvlm.perturbed_topk({SCORES}, «1», «5», «.05», «0»)
texvlm.topk({SCORES}, «1»)
torch.ops.texvlm.perturbed_topk_backward(«torch.rand(B, 5, 1)», {SCORES}, «5», «.05», «0»)
texvlm.compact(«torch.rand(B, N) < .5»)
texvlm.PCA(«torch.zeros(20)», «torch.rand(4, 20)», «torch.rand(4)», «1.», «torch.zeros(20)», «9»).transform({VECTORS})
texvlm.PCA.fit({VECTORS}, «None», «2», «True»)
texvlm.PCA.fit(«torch.rand(30, 20)», {VECTORS}, «4»).transform({VECTORS})
texvlm.PCA.fit(«torch.rand(30, 20)», axes=4).transform_text({VECTORS})
texvlm.PCA.from_arrays(texvlm.PCA.fit(«torch.rand(30, 20)», axes=4).arrays()).explained
texvlm.PCA.from_moments(texvlm.pca.Moments().update({VECTORS}), «None», «2», «True»)
texvlm.Information(«K», «'linear'», «4»).forward({FEATURES})
texvlm.Perspective(«K», «'mlp'», «4»).forward({FEATURES})
texvlm.Participation(«K», «K», «'linear'», «4»).forward({FEATURES}, {FEATURES}, «torch.rand(B, K)»)
texvlm.TensionBalancer(«K», «3»).forward({FEATURES})
texvlm.CascadeConfig(«{{'rms:edge': 1.}}», schedule=«'auto'», footprint=«'cell'», scale=«'one'», levels=«4», budget=«'fixed'», memory=«0.», bound=«None»)
texvlm.CascadeConfig.preset(«'salience'»).weighed(«{{'edge': 1.}}»)
"""
"""One to a line, each often called."""

INFINITE = f"""
texvlm.carry(*[«torch.rand(B, C, H, W)»] * 3, «torch.zeros(B, 2, H, W)», {MASK}, {FLOW}, {HIDDEN}, floor=«.01», quiet=«.02», occluded=«.5»)
texvlm.log_soft_topk({SCORES}, «1», «1.», «'logistic'», «None»)
texvlm.gumbel_noise({SCORES}, «None»)
texvlm.gumbel_topk({SCORES}, «1», «1.», «None»)
"""
"""Results that are not finite belong to them."""

ATTENTION = "«torch.randn(B, 2, N, 4)», «torch.randn(B, 2, 12, 4)», «torch.randn(B, 2, 12, 4)», «(3, 4)», «.5»"
STREAM = "s := texvlm.VideoStream(«['red', 'motion', 'saliency']», k=«4», cell=«8», tile=«8», threshold=«0.», keyframe=«3», levels=«None»)"
RARE = f"""
texvlm.build_channels({PICTURE}, «None», «None», «['red', 'edge', 'text', 'saliency']», fixation=«None», levels=«None», dtype=«None»)
texvlm.build_channels({PICTURE}, {PICTURE}, channels=«'minimal'», flow=«'auto'», given=«{{'text': torch.rand(B, H, W)}}», n_superpixels=«5»)
texvlm.update_channels(texvlm.build_channels({PICTURE}, channels=«['red', 'edge', 'motion']»), texvlm.channel_planes({PICTURE}), {PICTURE}, {TILES}, {TILES}, «8»)
texvlm.select({PICTURE}, «4», «8», «'salience'», «None», weights=«None», previous=«None»)
texvlm.select({PICTURE}, «4», «8», «'multiscale'»).tokens(texvlm.Texture({PICTURE}), «1»)
texvlm.select({PICTURE}, «4», «8», «'adaptive'», memory=«None», scorer=«None»).boxes()
texvlm.select({PICTURE}, «4», «8», «'predictive'»).mask()
texvlm.select({PICTURE}, «4», «8», «'soft'»).centres()
texvlm.Selection(«torch.zeros(B, 2, dtype=torch.long)», «torch.ones(B, dtype=torch.long)», «(2, 3)», «8», *[«torch.rand(B, 2)»] * 2, «None», «torch.zeros(B, 2)», «None», «(16, 24)»).boxes()
texvlm.embedding_planes({PICTURE}, texvlm.DigitsEmbedding(), «None»)
texvlm.DigitsEmbedding().encode_image({PICTURE})
texvlm.DigitsEmbedding().encode_text(«['seven']»)
texvlm.Embedding.fit(texvlm.DigitsEmbedding(), {PICTURE}, «None», «2», «False»)
texvlm.Embedding(texvlm.DigitsEmbedding()).planes({PICTURE})
texvlm.Embedding(texvlm.DigitsEmbedding()).relevance({PICTURE}, «'seven'»)
texvlm.Embedding(texvlm.DigitsEmbedding()).query(«torch.rand(16)»)
texvlm.Allocator(«'linear'», hidden=«4», cell=«8», normalisation=«'standard'», levels=«1», participation=«()»)
texvlm.Allocator('mlp', participation=()).forward(«torch.rand(B, N, 10)», «None»)
texvlm.Allocator(participation=()).fit_normalisation(«torch.rand(B, N, 10)»)
texvlm.Allocator(participation=()).parts(«torch.rand(B, N, 10)», «None»)
texvlm.hierarchical_attention({ATTENTION}, stages=«'auto'», scale=«None», weight=«None», bias=«None», mask=«None»)
texvlm.hierarchical_attention({ATTENTION}, exact=«True», queries=«'auto'», importance=«'spread'», choice=«None», return_lse=«True»)
[{STREAM}, s.update({FRAME}), s.update({FRAME}), s.select(), s.tokens(«1»), s.texture, s.reference]
[{STREAM}, s.update({FRAME}, fixation=«torch.rand(1, 2)»), s.sample_foveated(«torch.rand(1, 1, 2)»), s.update_mipmaps(), s.reset()]
[{STREAM}, s.update({FRAME}), s.load_state_dict(s.state_dict()), s.update({FRAME}, «True», gaze=«torch.rand(1, 1, 2)»)]
[s := texvlm.VideoStream(path='query', query=«'seven'», embedding=texvlm.DigitsEmbedding(), k=4), s.update({FRAME}), s.relevance()]
texvlm.data.collate([texvlm.data.Select(«4», «8»)(«torch.rand(3, 64, 48)»)] * 2)
texvlm.data.decode(«files.mutated('jpeg', 0)», «'auto'», «None»)
texvlm.data.decode(«files.mutated('png', 0)», «'pillow'», «64»)
texvlm.Texture.open(«files.path('jpeg', 0)»)
[f for f in texvlm.video.frames(«files.path('film', 0)», every=«1», size=«None»)]
texvlm.Allocator.from_pretrained(«files.folder(0)»)
texvlm.PCA.load(«files.path('pca', 0)»)
"""
"""One to a line, each seldom called: slow, or with files behind them."""

INFINITE_OPS = {"soft_topk", "carry"}
"""Their results may be infinite: a threshold below which nothing is, how much what is lost differs."""

OVERFLOWING = {"hierarchical_attention_backward"}
"""Gradients that may leave float16's range: the logsumexp that a forward saves makes weights of at most 1, one drawn at random does not."""

NOT_CALLED = {
    "ClipEmbedding": "a model of transformers",
    "EmbeddingProvider": "a protocol",
    "cuda": "needs a card",
    "pin_memory": "needs a card",
    "build_info": "takes nothing",
    "cached_bytes": "takes nothing",
    "empty_cache": "takes nothing",
    "empty_texture_cache": "takes nothing",
    "texture_cache_stats": "takes nothing",
    "save": "writes where it is told",
    "extra_repr": "of torch's printing",
}
"""Public names without a program, and why."""


def written() -> list[Program]:
    """The programs of this file."""
    out = []
    for text, how in ((PROGRAMS, {}), (INFINITE, {"infinite": True}), (RARE, {"rare": True})):
        for line in text.strip().splitlines():
            name = "VideoStream" if "VideoStream" in line else re.match(r"\[?[\w. ]*?texvlm\.([\w.]+)", line)[1]
            out.append(Program(name, line, **how))
    return out


class BackwardCalls(TorchDispatchMode):
    """Notes with what the `*_backward` ops are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func._schema.name.removeprefix("texvlm::")
        if name.endswith("_backward") and hasattr(torch.ops.texvlm, name):
            self.calls.append((name, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def op_calls(case: Case, dtype: torch.dtype) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The op's call of a case, and those of the backward ops that its gradients take."""
    args = case.make(dtype, torch.Generator().manual_seed(0))
    calls = [(case.op, args, {})]
    if case.grads and not case.op.endswith("_gl"):
        leaves = [a.detach().clone().requires_grad_() if i in case.grads else a for i, a in enumerate(args)]
        with BackwardCalls() as noted:
            result = getattr(torch.ops.texvlm, case.op)(*leaves)
            outputs = [o for o in ([result] if isinstance(result, torch.Tensor) else result) if o.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
        calls += noted.calls
    return calls


def as_code(values: list[Any], dtypes: tuple[torch.dtype, ...]) -> str:
    """An argument as text, from what it is beside texels of each of these dtypes: values like it, of its shape."""
    value = values[0]
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return f"[{', '.join(as_code([v[i] for v in values], dtypes) for i in range(len(value)))}]"
    if isinstance(value, torch.dtype):
        return "D" if value == dtypes[0] else str(value)
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape = tuple(value.shape)
    if value.dtype == torch.bool:
        return f"torch.rand({shape}) < {value.double().mean().nan_to_num().item():.2g}"
    if not value.is_floating_point():
        if value.numel() <= 24:
            return f"torch.tensor({value.tolist()}, dtype={value.dtype}).reshape({shape})"
        return f"torch.randint({value.min()}, {int(value.max()) + 1}, {shape}, dtype={value.dtype})"
    beside = [v.dtype for v in values]
    dtype = "D" if beside == list(dtypes) else "E" if torch.float64 in beside and len(set(beside)) > 1 else str(value.dtype)
    finite = value.double()[value.isfinite()]
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)
    text = f"torch.rand({shape}, dtype={dtype})"
    return text if low >= 0 and 0.5 < high <= 1 else f"{text} * {high - low:.4g} + {low:.4g}"


def of_ops(limit: int = 4096) -> Iterator[Program]:
    """A program for each case of each op that is not large, and for the backward ops that it calls."""
    cases = all_cases()
    small: dict[str, list[Case]] = {}
    for case in cases:
        args = case.make(case.dtypes[0], torch.Generator().manual_seed(0))
        if sum(a.numel() for a in args if isinstance(a, torch.Tensor)) <= limit:
            small.setdefault(case.op, []).append(case)
    small |= {case.op: [case] for case in cases if case.op not in small}
    seen: set[str] = set()
    for case in (case for name in sorted(small) for case in small[name]):
        made = [op_calls(case, dtype) for dtype in case.dtypes]
        same = all([c[0] for c in calls] == [c[0] for c in made[0]] for calls in made)
        for i, (name, args, kwargs) in enumerate(made[0]):
            beside = [calls[i] for calls in made] if same else [made[0][i]]
            holes = [f"«{as_code([b[1][j] for b in beside], case.dtypes)}»" for j in range(len(args))]
            holes += [f"{key}=«{as_code([b[2][key] for b in beside], case.dtypes)}»" for key in kwargs]
            program = Program(
                name, f"torch.ops.texvlm.{name}({', '.join(holes)})", case.dtypes, name.endswith("_gl"), name in INFINITE_OPS
            )
            if program.text not in seen:
                seen.add(program.text)
                yield program


def all_programs() -> list[Program]:
    return [*written(), *of_ops()]


def public_names() -> set[str]:
    """Functions, classes and methods that people call: of texvlm, and its ops."""
    names = set(torch.ops.texvlm)
    for name in (name for name in dir(texvlm) if name[0] != "_"):
        thing = getattr(texvlm, name)
        if inspect.isclass(thing) and not issubclass(thing, tuple):
            names |= {
                m
                for m, f in vars(thing).items()
                if not m.startswith("_") and not isinstance(f, property) and callable(getattr(thing, m))
            }
        if callable(thing) and not (inspect.isclass(thing) and issubclass(thing, tuple)):
            names.add(name)
    return names


def without_program(programs: list[Program]) -> set[str]:
    """Public names that no program calls."""
    called = set(re.findall(r"\.(\w+)\(", "\n".join(p.text for p in programs)))
    return public_names() - called - set(NOT_CALLED)
