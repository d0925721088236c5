"""What features of cells mean: known answers of each term, and a scorer that learns from them."""

from __future__ import annotations

import pytest
import torch

import texvlm


def picture_of(values: torch.Tensor, names: tuple[str, ...] = ("red", "green", "blue")) -> texvlm.Texture:
    """A texture of planes [C, H, W]."""
    return texvlm.Texture(values, names=names)


def halves() -> texvlm.Texture:
    """Cell 0 is black on the left and white on the right, cell 1 grey."""
    image = torch.full((3, 16, 32), 0.5)
    image[:, :, :8], image[:, :, 8:16] = 0.0, 1.0
    return picture_of(image)


CELLS = torch.arange(2)[None]


@pytest.mark.parametrize(
    ("term", "first", "second"),
    [
        ("mean:red", 0.5, 0.5),
        ("max:green", 1.0, 0.5),
        ("min:blue", 0.0, 0.5),
        ("variance:red", 0.25, 0.0),
        ("rms:red", 0.5**0.5, 0.5),
        ("entropy", 0.25, 0.0),  # 1 bit of 4
        ("residual", 0.5**0.5, 0.5),  # the first against nothing, the second against the first
    ],
)
def test_known_answers(term: str, first: float, second: float) -> None:
    got = texvlm.cell_features(halves(), CELLS, [term])[0, :, 0].tolist()
    assert got == pytest.approx([first, second], abs=1e-6)


def test_variance_of_bright_cells_does_not_cancel() -> None:
    image = 1000 + torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 1e-2
    got = texvlm.cell_features(picture_of(image), torch.tensor([[0]]), ["variance:red"], cell=32)
    assert float(got) == pytest.approx(float(image[0, 0].double().var(correction=0)), rel=1e-2)


def test_residual_is_zero_for_what_a_neighbour_predicts() -> None:
    tile = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(1))
    image = tile.repeat(1, 3, 3)
    image[:, 8:16, 8:16] = 0.25
    got = texvlm.cell_features(picture_of(image), torch.arange(9)[None], ["residual"], cell=8)[0, :, 0]
    # the odd one; the last cell's upper left neighbour is the odd one, but the others predict it
    assert (got > 1e-6).nonzero()[:, 0].tolist() == [0, 4]


def test_cosine_is_that_of_the_mean() -> None:
    names = tuple(f"embedding_{i}" for i in range(4))
    vectors = torch.zeros(4, 8, 16)
    vectors[1, :, :8], vectors[2, :, 8:] = 2.0, 0.5
    texture = picture_of(vectors, names)
    query = torch.tensor([0.0, 3.0, 0.0, 0.0])
    got = texvlm.cell_features(texture, CELLS, ["cosine"], cell=8, query=query)[0, :, 0]
    torch.testing.assert_close(got, torch.tensor([1.0, 0.0]))
    assert texvlm.cell_features(texture, CELLS, ["cosine"], cell=8, query=torch.zeros(4)).abs().max() == 0


def test_fewer_samples_are_coarser_levels() -> None:
    image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(2))
    texture = picture_of(image)
    cells = torch.arange(16)[None]
    fine, coarse = (texvlm.cell_features(texture, cells, ["mean:red", "variance:red"], samples=s) for s in (16, 1))
    torch.testing.assert_close(fine[..., 0], coarse[..., 0])  # mips keep the mean
    assert coarse[..., 1].abs().max() == 0
    assert (fine[..., 1] > 0.05).all()


def test_a_scorer_learns_which_cells_hold_the_object() -> None:
    g = torch.Generator().manual_seed(3)
    model = torch.nn.Linear(3, 1)
    torch.manual_seed(0)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    terms = ["mean:red", "variance:green", "max:blue"]
    for _ in range(200):
        image = torch.rand(3, 64, 64, generator=g) * 0.5
        cell = int(torch.randint(16, (1,), generator=g))
        y, x = divmod(cell, 4)
        image[1, 16 * y : 16 * y + 16, 16 * x : 16 * x + 16] *= 2.0
        features = texvlm.cell_features(picture_of(image), torch.arange(16)[None], terms)
        loss = torch.nn.functional.cross_entropy(20 * model(features)[..., 0], torch.tensor([cell]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.1


def test_gradients_reach_the_picture() -> None:
    image = torch.rand(1, 3, 32, 32, requires_grad=True)
    features = texvlm.cell_features(picture_of(image), torch.tensor([[3]]), ["mean:red", "rms:green", "max:blue"])
    features.sum().backward()
    assert image.grad is not None
    inside = image.grad[..., 16:, 16:]
    assert inside[0, 0].eq(1 / 256).all()
    assert int((inside[0, 2] != 0).sum()) == 1
    assert image.grad[..., :16, :].abs().max() == 0


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (["median:red"], "terms must be mean:CHANNEL"),
        (["mean"], "terms must be mean:CHANNEL"),
        (["entropy:red"], "terms must be"),
        (["cosine"], "query must be given for the term cosine"),
    ],
)
def test_bad_terms(terms: list[str], message: str) -> None:
    names = ("red", "green", "blue", "embedding_0")
    with pytest.raises((ValueError, RuntimeError), match=message):
        texvlm.cell_features(picture_of(torch.rand(4, 16, 32), names), CELLS, terms)
    with pytest.raises(KeyError, match="no channel 'text'"):
        texvlm.cell_features(halves(), CELLS, ["mean:text"])
