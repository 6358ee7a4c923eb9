"""Exported files called with captured tensors that lie otherwise than the example's: what the library computes, or a refusal in words."""

from __future__ import annotations

import inspect
import math
import types

import numpy
import pytest
import torch

from flexpress import cached_attention, export_cached, flex_attention
from flexpress.mods import dilated_window, disentangled, neighborhood, relative_bias, softcap, t5_bias
from support.dense import relative_error
from support.exported import cache, load, saved, tensors

LENGTH, COLUMNS = 24, 32


def mods_of(table):
    """A score_mod reads whole elements and vectors, and a mask_mod reads the same tensor otherwise."""

    def by_query(score, b, h, q_idx, kv_idx):
        return score + table[q_idx, 0] * 0.5

    def by_vectors(score, b, h, q_idx, kv_idx):
        return score + 0.1 * (table[q_idx, :3] * table[kv_idx]).sum(-1)

    def by_pairs(score, b, h, q_idx, kv_idx):
        return score + table[q_idx, kv_idx]

    def pairs(b, h, q_idx, kv_idx):
        return table[q_idx, kv_idx] > -0.5

    def queries(b, h, q_idx, kv_idx):
        return (table[kv_idx, 1] > -1) | (q_idx == kv_idx)

    return {"query": by_query, "vectors": by_vectors, "pairs": by_pairs}, {"pairs": pairs, "queries": queries}


def lying(layout: str, rows: int, columns: int) -> torch.Tensor:
    """Random numbers of a shape, in a layout."""
    numbers = torch.randn(rows, columns + 4, generator=torch.Generator().manual_seed(rows * columns))
    return {
        "contiguous": numbers[:, :columns].contiguous(),
        "wider": numbers[:, :columns],
        "a column more": numbers[:, 1:].contiguous()[:, :columns] if columns % 4 else numbers[:, : columns + 1].contiguous()[:, :columns],
        "transposed": numbers[:, :columns].t().contiguous().t(),
        "one row": numbers[:1, :columns].expand(rows, columns),
    }[layout]


LAYOUTS = "contiguous", "wider", "a column more", "transposed", "one row"


@pytest.mark.parametrize("score, mask", [("query", "pairs"), ("pairs", "queries")])
def test_another_layout(in_cpp, tmp_path, score, mask):
    """A tensor that both mods capture is one argument: what each supposes of its strides is checked."""
    example = lying("contiguous", LENGTH, COLUMNS)
    score_mods, mask_mods = mods_of(example)
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)
    _, module = saved(tmp_path, q, k, v, score_mod=score_mods[score], mask_mod=mask_mods.get(mask), backward=False)
    served = 0
    for layout in LAYOUTS:
        for columns in (COLUMNS, COLUMNS + 1, COLUMNS + 8):
            table = lying(layout, LENGTH + 1, columns)
            score_mods, mask_mods = mods_of(table)
            try:
                found = module.attention(q, k, v, table=table)
            except ValueError as error:
                assert "export" in str(error)
                continue
            served += 1
            assert relative_error(found, flex_attention(q, k, v, score_mods[score], mask_mod=mask_mods.get(mask))) < 1e-6, (layout, columns)
    assert served >= 4


def test_a_vector_of_another_length_is_refused(in_cpp, tmp_path):
    """The kernels have a vector's elements one by one."""
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)
    _, module = saved(tmp_path, q, k, v, score_mod=mods_of(lying("contiguous", LENGTH, 3))[0]["vectors"])
    table = lying("contiguous", LENGTH + 5, 3)
    expected = flex_attention(q, k, v, mods_of(table)[0]["vectors"])
    assert relative_error(module.attention(q, k, v, table=table), expected) < 1e-6
    with pytest.raises(ValueError, match="vectors of 3 elements"):
        module.attention(q, k, v, table=lying("contiguous", LENGTH, 5))


def test_a_gradient_is_written_where_the_tensor_lies(in_cpp, tmp_path):
    """So elements must not share memory."""
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)
    example = lying("contiguous", LENGTH, COLUMNS).requires_grad_()
    _, module = saved(tmp_path, q, k, v, score_mod=mods_of(example)[0]["pairs"])
    refused = 0
    for layout in LAYOUTS:
        table = lying(layout, LENGTH, COLUMNS + 4).detach().requires_grad_()
        found, expected = [], flex_attention(q, k, v, mods_of(table)[0]["pairs"])
        try:
            found = torch.autograd.grad(module.attention(q, k, v, table=table).sin().sum(), table)
        except ValueError as error:
            assert "contiguous" in str(error) or "export" in str(error)
            refused += 1
            continue
        assert relative_error(*found, *torch.autograd.grad(expected.sin().sum(), table)) < 1e-5
    assert 0 < refused < len(LAYOUTS)


def arguments_of(module) -> list[str]:
    """What a file's attention takes of what mods capture."""
    parameters = inspect.signature(module.attention).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("scale", "lists", "return_lse", "max_q_len")]


WINDOW, SETTINGS = 9, {"window": 9, "sink": 2}


def far(distance):
    return distance >= WINDOW


def scaled(factor):
    """A score_mod multiplies by what is made of a captured number: on the host, at every call."""
    return {
        "twice": lambda score, b, h, q_idx, kv_idx: score * (2 * factor) + factor,
        "negative": lambda score, b, h, q_idx, kv_idx: score * -factor,
        "root": lambda score, b, h, q_idx, kv_idx: score * math.sqrt(factor),
        "power": lambda score, b, h, q_idx, kv_idx: score * (-2 * factor) ** 3 - max(factor, 1.5) * abs(-factor),
        "capped": softcap(factor),
    }


BACKENDS = ("PORTABLE", "CPP")  # in turn: what a file computes of its arguments is the same text for both


def in_turn(cases) -> list[tuple[str, str]]:
    return [(case, BACKENDS[number % 2]) for number, case in enumerate(cases)]


@pytest.mark.parametrize("form, backend", in_turn(scaled(1.0)))
def test_what_is_made_of_a_number_follows_it(in_cpp, tmp_path, form, backend):
    """The file takes the user's own capture, and computes what the mod makes of it."""
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)
    _, module = saved(tmp_path, q, k, v, score_mod=scaled(2.25)[form], kernel_options={"BACKEND": backend})
    (name,) = arguments_of(module)
    assert relative_error(module.attention(q, k, v), flex_attention(q, k, v, scaled(2.25)[form])) < 1e-6
    found = module.attention(q, k, v, **{name: 0.75})
    assert relative_error(found, flex_attention(q, k, v, scaled(0.75)[form])) < 1e-6
    assert relative_error(module.reference(q, k, v, **{name: 0.75})[0], found.double()) < 1e-5


def t5(max_distance, weight):
    return {"score_mod": t5_bias(weight, 32, max_distance)}


BUCKETS = {"weight": lying("contiguous", 32, 2)}


def by_distance(table):
    return {"score_mod": relative_bias(table)}


def grid(height, width):  # the file calls something of its own width, and this width_
    return neighborhood((height, width), (3, 2))


def number_and_shape(table):
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: score * (table.shape[1] * 0.125) + table[h, 0] * len(table)}


MADE = {  # what makes a mod, with what, and with what else; what the file takes, if these are not the names of its arguments
    "dilated_window": (dilated_window, {"window": 4, "dilation": 2}, {"window": 3, "dilation": 3}),
    "neighborhood": (grid, {"height": 4, "width": 6}, {"height": 3, "width": 8}, {"height": "height", "width": "width_"}),
    "neighborhood, window": (lambda window: neighborhood((4, 2, 3), (window, 1, 2), (1, 2, 1)), {"window": 3}, {"window": 2}),
    "t5_bias": (t5, {"max_distance": 12, **BUCKETS}, {"max_distance": 20, **BUCKETS}, {"max_distance": "farthest", "weight": "weight"}),
    "relative_bias": (by_distance, {"table": lying("contiguous", 2, 47)}, {"table": lying("contiguous", 2, 63)}),
    "a tensor's sizes": (number_and_shape, {"table": lying("contiguous", 2, 8)}, {"table": lying("contiguous", 2, 12)}),
    "half a window": (lambda window: lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) <= window // 2, {"window": 8}, {"window": 12}),
}


@pytest.mark.parametrize("case, backend", in_turn(MADE))
def test_a_file_is_called_as_the_mod_is_made(in_cpp, tmp_path, case, backend):
    """With other arguments it computes what the mod computes that is made of these."""
    make, example, other, *names = MADE[case]
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)
    _, module = saved(tmp_path, q, k, v, **as_mods(make(**example)), kernel_options={"BACKEND": backend})
    given = {names[0][name] if names else name: value for name, value in other.items()}
    assert set(given) <= set(arguments_of(module))
    right = flex_attention(q, k, v, **as_mods(make(**other)))
    assert relative_error(right, flex_attention(q, k, v, **as_mods(make(**example)))) > 1e-3
    assert relative_error(module.attention(q, k, v, **given), right) < 1e-6
    assert relative_error(module.reference(q, k, v, **given)[0], right.double()) < 1e-5
    if hasattr(module, "create_block_lists"):
        lists = module.create_block_lists(q, k, **given)
        assert relative_error(module.attention(q, k, v, **given, lists=lists), right) < 1e-6


def as_mods(made):
    return made if isinstance(made, dict) else {"mask_mod": made}


def test_disentangled_follows_its_tables(in_cpp, tmp_path):
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)
    tables, others = (torch.randn(2, 1, 2, LENGTH, columns, generator=torch.Generator().manual_seed(1)) for columns in (16, 32))
    _, module = saved(tmp_path, q, k, v, score_mod=disentangled(*tables))
    found = module.attention(q, k, v, c2p=others[0], p2c=others[1])
    assert relative_error(found, flex_attention(q, k, v, disentangled(*others))) < 1e-6


def test_what_python_has_decided_is_checked(in_cpp, tmp_path):
    """A branch is part of the kernels: an argument that would take the other one is refused."""
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)

    def near(window):
        return lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < window if window > 5 else q_idx - kv_idx < 2 * window

    _, module = saved(tmp_path, q, k, v, mask_mod=near(8))
    assert relative_error(module.attention(q, k, v, window=6), flex_attention(q, k, v, mask_mod=near(6))) < 1e-6
    with pytest.raises(ValueError, match=r"\(window > 5\) is False; these kernels were made where it is True"):
        module.attention(q, k, v, window=5)
    with pytest.raises(ValueError, match="window > 5"):
        module.create_block_lists(q, k, window=5)
    _, module = saved(tmp_path, q, k, v, mask_mod=dilated_window(4, 1), overwrite=True)
    assert relative_error(module.attention(q, k, v, dilation=2), flex_attention(q, k, v, mask_mod=dilated_window(4, 2))) < 1e-6
    _, module = saved(tmp_path, q, k, v, mask_mod=neighborhood(LENGTH, 5), overwrite=True)
    with pytest.raises(ValueError, match="dilation == 1"):
        module.attention(q, k, v, dilation=2)


@pytest.mark.parametrize("decides", ["score", "mask"])
def test_what_one_mod_has_decided_by_a_variable_of_the_other_is_checked(decides, in_cpp, tmp_path):
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)

    def made(n):
        if decides == "score":
            mods = lambda s, b, h, i, j: s * 2 if n > 4 else s * 0, lambda b, h, i, j: abs(i - j) < n
        else:
            mods = lambda s, b, h, i, j: s * n, lambda b, h, i, j: abs(i - j) < (9 if n > 4 else 3)
        return {"score_mod": mods[0], "mask_mod": mods[1]}

    _, module = saved(tmp_path, q, k, v, **made(8))
    assert relative_error(module.attention(q, k, v, n=6), flex_attention(q, k, v, **made(6))) < 1e-6
    with pytest.raises(ValueError, match=r"\(n > 4\) is False; these kernels were made where it is True"):
        module.attention(q, k, v, n=3)


@pytest.mark.parametrize("kind", [dict, types.SimpleNamespace])
def test_what_one_mod_has_decided_by_a_value_of_an_object_is_checked(kind, in_cpp, tmp_path):
    """The other mod has an argument for it."""
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)

    def made(n):
        cfg = kind(n=n)
        if kind is dict:
            mods = lambda s, b, h, i, j: s * 2 if cfg["n"] > 4 else s * 0, lambda b, h, i, j: abs(i - j) < cfg["n"]
        else:
            mods = lambda s, b, h, i, j: s * 2 if cfg.n > 4 else s * 0, lambda b, h, i, j: abs(i - j) < cfg.n
        return {"score_mod": mods[0], "mask_mod": mods[1]}

    _, module = saved(tmp_path, q, k, v, **made(8))
    name = "cfg_n" if kind is dict else "n"
    assert relative_error(module.attention(q, k, v, **{name: 6}), flex_attention(q, k, v, **made(6))) < 1e-6
    with pytest.raises(ValueError, match=rf"\({name} > 4\) is False; these kernels were made where it is True"):
        module.attention(q, k, v, **{name: 3})


def test_names_of_what_no_formula_makes(in_cpp, tmp_path):
    """They are not those of captures. What is read twice is one argument."""
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)
    slopes, table = torch.rand(2), torch.rand(2, LENGTH)

    def score(score, b, h, q_idx, kv_idx):
        return score * numpy.sqrt(SETTINGS["window"]) + slopes.exp()[h] * WINDOW + table[0][q_idx] + table[1][kv_idx]

    def mask(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < WINDOW) & ~far(q_idx - kv_idx) | (kv_idx < SETTINGS["sink"]) | (kv_idx == SETTINGS["sink"])

    _, module = saved(tmp_path, q, k, v, score_mod=score, mask_mod=mask)
    assert set(arguments_of(module)) == {"settings_window_sqrt", "slopes_exp", "table_0", "table_1", "window", "settings_sink"}
    found = module.attention(q, k, v, slopes_exp=slopes.exp(), table_0=table[0], table_1=table[1])
    assert relative_error(found, flex_attention(q, k, v, score, mask_mod=mask)) < 1e-6


def test_what_must_be_passed_together_is_said(in_cpp, tmp_path):
    """A tensor that is made of one which is an argument, too: the file cannot know how."""
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)
    slopes = torch.rand(2)
    _, module = saved(tmp_path, q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score * slopes.exp()[h] + slopes[h])
    assert "slopes_exp  float32 (2,) in the example, captured: made of slopes, so pass both" in module.attention.__doc__


def test_numbers_that_do_not_fit_are_refused(in_cpp, tmp_path):
    """The library takes such for literals of 64 bits, which a file's kernels cannot."""
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=LENGTH, KV_LEN=LENGTH, D=16)
    _, module = saved(tmp_path, q, k, v, mask_mod=dilated_window(4, 2))
    with pytest.raises(ValueError, match=r"\(window \* dilation\) is 4294967296; kernels take numbers of 32 bits"):
        module.attention(q, k, v, window=1 << 16, dilation=1 << 16)


def test_a_cache_follows_what_is_captured(in_cpp, tmp_path):
    q, k_cache, v_cache, kv_len, _ = cache("cpu", pages=0, S=40, N=3)
    slopes = torch.rand(8)

    def mod(slopes):
        return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (q_idx - kv_idx) * (slopes.shape[0] * 3)

    path = tmp_path / "cached.py"
    export_cached(q, k_cache, v_cache, kv_len, score_mod=mod(slopes), path=path)
    module = load(path)
    assert "slopes" in arguments_of(module)
    assert "slopes_shape" not in str(arguments_of(module))
    longer = torch.rand(11)
    right = cached_attention(q, k_cache, v_cache, kv_len, score_mod=mod(longer))
    assert relative_error(module.attention(q, k_cache, v_cache, kv_len, slopes=longer), right) < 1e-6
