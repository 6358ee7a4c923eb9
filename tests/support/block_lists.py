"""Block lists against brute force."""

from __future__ import annotations

import torch

from flexpress import BlockMask
from flexpress.codegen.mod.expr import MASK_SYMBOLS
from flexpress.codegen.mod.graphs.compute import compute
from flexpress.codegen.mod.graphs.wide import in_wide_integers
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run.masks import automatic_lists
from flexpress.inputs.plain_arguments import resolve_device
from support.dense import positions


def as_kernels_compute(bound, extents):
    """A traced mask on tensors of indices below (B, H, Q_LEN, KV_LEN): what it captures reads zero outside."""
    graph, values = in_wide_integers(bound, extents)
    count = len(graph.tensors)

    def mask_mod(*where):
        symbols = {name: value.to(torch.int32) for name, value in zip(MASK_SYMBOLS, where, strict=True)}
        return compute(graph.result, symbols, values[:count], values[count:])

    return mask_mod


def brute_force(mask_mod, B, H, Q_LEN, KV_LEN, size, device):
    """Status of every block: 0 empty, 1 partial, 2 full. Rows past Q_LEN do not count; a block past KV_LEN is never full."""
    dense = mask_mod(*positions((B, H, Q_LEN, KV_LEN), device)).expand(B, H, Q_LEN, KV_LEN)
    rows, columns = -(-Q_LEN // size[0]), -(-KV_LEN // size[1])
    status = torch.zeros(B, H, rows, columns, dtype=torch.int8)
    for r in range(rows):
        for c in range(columns):
            block = dense[:, :, r * size[0] : (r + 1) * size[0], c * size[1] : (c + 1) * size[1]]
            inside = (c + 1) * size[1] <= KV_LEN
            status[:, :, r, c] = block.any(-1).any(-1).to(torch.int8) + (block.all(-1).all(-1) & inside).to(torch.int8)
    return status


def listed(counts, indices, columns):
    """The dense picture of a list, checking that it ascends."""
    dense = torch.zeros(*counts.shape, columns, dtype=torch.bool)
    for place in [tuple(p) for p in torch.cartesian_prod(*[torch.arange(n) for n in counts.shape]).reshape(-1, counts.dim()).tolist()]:
        entries = indices[place][: counts[place]].tolist()
        assert entries == sorted(set(entries))
        dense[place][entries] = True
    return dense


def check_lists(mask: BlockMask, status: torch.Tensor) -> None:
    """What kernels read, and what users are shown."""
    columns, rows = status.shape[-1], status.shape[-2]
    if mask._partial_where_cut and mask.shape[-2] % mask.BLOCK_SIZE[0]:
        status = torch.cat([status[:, :, :-1], status[:, :, -1:].clamp(max=1)], 2)
    lists, turned = mask.as_lists(), mask.as_transposed_lists()
    partial = (status == 1) if lists.full_kv_indices is not None else (status > 0)
    assert torch.equal(listed(lists.kv_num_blocks.cpu(), lists.kv_indices.cpu(), columns), partial)
    assert torch.equal(listed(turned.kv_num_blocks.cpu(), turned.kv_indices.cpu(), rows), partial.transpose(-1, -2))
    if lists.full_kv_indices is not None:
        assert torch.equal(listed(lists.full_kv_num_blocks.cpu(), lists.full_kv_indices.cpu(), columns), status == 2)
        assert torch.equal(listed(turned.full_kv_num_blocks.cpu(), turned.full_kv_indices.cpu(), rows), (status == 2).transpose(-1, -2))
    assert torch.equal(mask.to_dense().cpu().bool(), status > 0)
    check_shown(mask, status)


def check_shown(mask: BlockMask, status: torch.Tensor) -> None:
    """Shown lists are torch's: permutations, what is listed first, both parts ascending; what Q_LEN cuts may be partial."""
    columns, rows = status.shape[-1], status.shape[-2]
    dense = {}
    for name, width in (("kv", columns), ("full_kv", columns), ("q", rows), ("full_q", rows)):
        counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
        if counts is None:
            continue
        dense[name] = listed(counts.cpu(), indices.cpu(), width)
        assert indices.dtype == torch.int32
        assert torch.equal(indices.cpu().long(), torch.argsort(dense[name].to(torch.int8), dim=-1, descending=True, stable=True))
        if "q" in name:
            assert torch.equal(dense[name], dense[name.replace("q", "kv")].transpose(-1, -2))
    if "full_kv" in dense:
        sure = rows - (mask.seq_lengths[0] % mask.BLOCK_SIZE[0] != 0)
        assert torch.equal(dense["full_kv"][..., :sure, :], (status == 2)[..., :sure, :]) and not (dense["full_kv"] & (status != 2)).any()
        assert torch.equal(dense["full_kv"] | dense["kv"], status > 0) and not (dense["full_kv"] & dense["kv"]).any()


def dense_status(lists, rows, columns, transposed=False):
    """0, 1 or 2 for every block, from lists."""
    extent = rows if transposed else columns
    partial, full = (
        listed(c.cpu(), i.cpu(), extent)
        for c, i in ((lists.kv_num_blocks, lists.kv_indices), (lists.full_kv_num_blocks, lists.full_kv_indices))
    )
    assert not (partial & full).any()
    status = partial.to(torch.int8) + 2 * full.to(torch.int8)
    return status.transpose(-1, -2) if transposed else status


def check_bounds(mask_mod, B, H, Q_LEN, KV_LEN, size, device):
    """Lists by bounds: nothing that attends is missing, nothing is full that is not; the transposed ones say the same."""
    bound = in_wide_integers(bind(mask_mod, "mask"), (B, H, Q_LEN, KV_LEN))
    truth = brute_force(mask_mod, B, H, Q_LEN, KV_LEN, size, device).cpu()
    rows, columns = truth.shape[-2:]
    found = []
    for transposed in (False, True):
        lists = automatic_lists(bound, (B, H, Q_LEN, KV_LEN), resolve_device(device), size, transposed=transposed)
        found.append(dense_status(lists, rows, columns, transposed))
    assert torch.equal(*found)
    assert ((found[0] == 1) | (found[0] == truth)).all()
    return found[0], truth
