"""Exported files called with captured tensors that lie otherwise than the example's: what the library computes, or a refusal in words."""

from __future__ import annotations

import pytest
import torch

from flexpress import flex_attention
from support.dense import relative_error
from support.exported import saved, tensors

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
