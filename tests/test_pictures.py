"""docs/recipes.md: it names every recipe, and its pictures show what printed kernels compute."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

from flexpress import mods

DOCS = Path(__file__).parent.parent / "docs"
SPEC = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
pictures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pictures)

PAGE = (DOCS / "recipes.md").read_text(encoding="utf-8")
HELPERS = {"alibi_slopes", "differential_lambda", "graph_distances", "t5_bucket"}  # that make no mod


def cells(text: str, palette: list[str]) -> torch.Tensor:
    """The number of the colour that a picture has at each position; -1 where it has none."""
    found = torch.full((pictures.SIZE, pictures.SIZE), -1, dtype=torch.int32)
    for colour, path in re.findall(r'<path fill="(#\w+)" d="([^"]*)"/>', text):
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path):
            found[int(y), int(x) : int(x) + int(width)] = palette.index(colour)
    return found


def test_the_page_names_every_recipe():
    assert set(pictures.RECIPES) == set(mods.__all__) - HELPERS
    assert [name for name in mods.__all__ if not re.search(rf"`{name}\b", PAGE)] == []


@pytest.mark.parametrize("name", pictures.RECIPES)
def test_the_page_shows_a_picture_of_the_recipe_beside_its_code(name):
    (row,) = re.findall(rf"^\| !\[{name}\]\(pictures/{name}\.svg\) \| `(.*?)` \|", PAGE, re.MULTILINE)
    assert row == pictures.RECIPES[name].code


def test_there_are_no_other_pictures():
    assert {path.stem for path in (DOCS / "pictures").iterdir()} == set(pictures.RECIPES)


@pytest.mark.parametrize("name", pictures.RECIPES)
def test_a_picture_is_up_to_date(name):
    """Masks to the position; scores but for those between two colours, which another machine may round to the other one."""
    text = (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    xml.etree.ElementTree.fromstring(text)
    recipe = pictures.RECIPES[name]
    colours, palette, caption = pictures.drawn(recipe)
    committed = cells(text, palette)
    difference = (committed - colours).abs()
    assert committed.min() >= 0 and difference.max() <= (recipe.kind == "score"), "make pictures draws it anew"
    assert (difference > 0).float().mean() < 0.05 and f">{caption}</text>" in text
    assert committed.unique().numel() > 2 and len(text) < 10_000


def test_a_picture_is_what_the_recipe_says():
    """Against the mod itself, called with all positions: not by way of a kernel."""
    i = torch.arange(pictures.SIZE)
    where = torch.tensor(0), torch.tensor(0), i[:, None], i[None, :]
    for recipe in pictures.RECIPES.values():
        colours, palette, _ = pictures.drawn(recipe)
        if recipe.kind == "mask":
            assert torch.equal(colours >= 2, pictures.made(recipe.code)(*where)), recipe.code
        elif recipe.kind == "score":
            scores = recipe.slope * (i[None, :] - i[:, None]).float()
            values = pictures.made(recipe.code)(scores, *where)
            exact = values / values.abs().max() * (len(palette) // 2) + len(palette) // 2
            assert (colours - exact).abs().max() < 0.51, recipe.code


def test_the_picture_of_differential_attention_is_the_difference_of_two_softmaxes():
    colours, palette, _ = pictures.drawn(pictures.RECIPES["differential"])
    query, key = pictures.made("query"), pictures.made("key")
    first, second = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)[0]
    values = first - 0.8 * second
    assert (colours - (values / values.abs().max() + 1) * (len(palette) // 2)).abs().max() < 0.51
