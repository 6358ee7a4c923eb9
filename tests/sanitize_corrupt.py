"""Every kernel that reads where things are from tensors, with tensors that lie: pages and entries that are not there, offsets that fall or
lead outside, lengths beyond the room, tables shorter than lengths, block lists with counts and indices that are not there.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize_corrupt.py              # on a GPU: no invalid access
    python tests/sanitize_corrupt.py --device cpu caches                                               # in the interpreter

Parts may be named: caches, prefixes (shared ones), prompts (long ones, by the kernel for Hopper where there is one), lists. Calls are
unchecked (check=False). What a call may read and write lies between guards: NaN, or numbers that lead far away, and they must be
there afterwards. Memory that nobody writes is NaN (torch's deterministic mode fills it), so a result without NaN has been written
everywhere. Sequences of which nothing is wrong must get what they get in an honest call. Exit status 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

import torch

from flexpress import BlockMask, SharedPrefix, cached_attention, flex_attention, mods, rope_table, update_cache
from flexpress.caches import shared_attention, shared_prefix

FAR, LOW, HIGH = 1 << 30, -(1 << 31), (1 << 31) - 1
GUARD = 256  # elements on both sides


class Guards:
    """Tensors between guards."""

    def __init__(self, device: str) -> None:
        self.device, self.kept = device, []

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a contiguous tensor on the device, between guards."""
        fill = FAR if not tensor.is_floating_point() else float("nan")
        memory = torch.full((tensor.numel() + 2 * GUARD,), fill, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
        memory = memory.to(self.device, tensor.dtype)
        self.kept.append((memory, fill, tensor.numel()))
        inside = memory[GUARD : GUARD + tensor.numel()].view(tensor.shape)
        return inside.copy_(tensor)

    def intact(self) -> bool:
        """Has nobody written to them?"""
        return all(
            (edge.float().isnan() if edge.is_floating_point() else edge == fill).all()
            for memory, fill, n in self.kept
            for edge in (memory[:GUARD], memory[GUARD + n :])
        )


# what of an honest call is another value, and which sequences that concerns (None: all)
LIES = {
    "honest": ({}, ()),
    "pages that are not there": (dict(page_table={(1, 0): -1, (1, 1): FAR}), (1,)),
    "a page after the last, and the least number": (dict(page_table={(2, 0): "pages", (0, 1): LOW}), (0, 2)),
    "all pages are -1": (dict(page_table=-1), None),
    "a table shorter than lengths": (dict(columns=2), None),
    "entries that are not there": (dict(cache_loc={0: -1, 2: FAR}), (0, 2)),
    "an entry after the last": (dict(cache_loc={1: "pages"}), (1,)),
    "lengths beyond the room": (dict(kv_len={0: HIGH, 2: FAR}), (0, 2)),
    "negative lengths": (dict(kv_len={0: -5, 1: LOW}), (0, 1)),
    "less than there are new ones": (dict(kv_len={1: 1}), (1,)),
    "falling offsets": (dict(cu_seqlens_q={1: "tokens", 2: 1}), None),
    "offsets outside": (dict(cu_seqlens_q={0: LOW, 1: -3, 3: HIGH}), None),
    "offsets that begin late": (dict(cu_seqlens_q={0: 2}), (0,)),
    "offsets that end early": (dict(cu_seqlens_q={3: 3}), (2,)),
    "offsets far away": (dict(cu_seqlens_q=FAR), None),
    "negative offsets": (dict(cu_seqlens_q=-FAR), None),
    "more queries than max_q_len": (dict(max_q_len=1), None),
    "max_q_len 0": (dict(max_q_len=0), None),
    "positions outside": (dict(q_offset={0: LOW, 1: HIGH, 2: -1}), None),
    "positions past the end": (dict(q_offset={0: 40, 1: FAR, 2: 3}), None),
}


def lied(value: torch.Tensor, lie, known: dict) -> torch.Tensor:
    """A tensor with some of its numbers replaced."""
    changes = {...: lie} if not isinstance(lie, dict) else lie
    for at, number in changes.items():
        value[at] = known.get(number, number)
    return value


def calls(device: str, *, lengths, lens, page_size, room, heads, dims, dtype, cache_dtype) -> Iterator[tuple]:
    """Calls that lie: name, sequences that are concerned, guards, new tokens, caches, where sequences are, and where they are in truth."""
    g = torch.Generator().manual_seed(0)
    total, batch, columns = sum(lens), len(lens), -(-room // page_size)
    pages = batch * columns + 1
    for layout in ("pages", "entries", "contiguous"):
        for ragged in (True, False):
            for name, (lie, concerned) in LIES.items():
                kind = {"page_table": "pages", "columns": "pages", "cache_loc": "entries"}
                if any(kind.get(what, layout) != layout or what in ("cu_seqlens_q", "max_q_len") and not ragged for what in lie):
                    continue
                guards = Guards(device)
                most = max(lens)
                shape = (total + 2,) if ragged else (batch,)
                q, k, v = (
                    guards.put(torch.randn(*shape, h, *(() if ragged else (most,)), d, generator=g).to(dtype))
                    for h, d in zip((heads[0], heads[1], heads[1]), (dims[0], *dims), strict=True)
                )
                rows = (pages, page_size) if layout == "pages" else (batch + (layout == "entries"), room)
                caches = [guards.put(torch.randn(*rows, heads[1], d, generator=g).to(cache_dtype)) for d in dims]
                where = {"kv_len": torch.tensor(lengths)}
                if layout == "pages":
                    where["page_table"] = torch.randperm(pages, generator=g)[: batch * columns].view(batch, columns)[
                        :, : lie.get("columns")
                    ]
                elif layout == "entries":
                    where["cache_loc"] = torch.arange(batch).flip(0)
                if ragged:
                    where["cu_seqlens_q"] = torch.tensor([0, *lens]).cumsum(0)
                if "q_offset" in lie:
                    where["q_offset"] = torch.zeros(batch)
                known = {"pages": rows[0], "tokens": total}
                honest = {what: t.to(torch.int32, copy=True).contiguous() for what, t in where.items()}
                where = {what: guards.put(lied(t.clone(), lie.get(what, {}), known)) for what, t in honest.items()}
                honest = {what: t.to(device) for what, t in honest.items()}
                if ragged:
                    where["max_q_len"] = lie.get("max_q_len", most)
                if cache_dtype == torch.float8_e4m3fn:
                    where |= {s: guards.put(torch.full((heads[1],), 0.5)) for s in ("k_scale", "v_scale")}
                yield f"{name}, {layout}{', ragged' if ragged else ''}", concerned, guards, (q, k, v), caches, where, honest


def attend(guards: Guards, query, caches, where: dict, honest: dict, concerned: tuple | None, mask_mods: tuple) -> None:
    """Attend with several mods; nothing may be NaN, and rows of honest sequences are those of the honest call."""
    slopes = guards.put(torch.linspace(0.1, 0.9, query.shape[1]))
    for mask_mod in mask_mods:
        for score_mod in (None, mods.alibi(slopes)):
            found = cached_attention(query, *caches, **where, score_mod=score_mod, mask_mod=mask_mod, return_lse=True, check=False)
            assert not any(t.isnan().any() for t in found), "something was not written, or read outside"
    if concerned is not None:
        starts = honest["cu_seqlens_q"].tolist() if "cu_seqlens_q" in honest else None
        expected = cached_attention(query, *caches, **where | honest, check=False)
        actual = cached_attention(query, *caches, **where, check=False)
        for b in set(range(len(honest["kv_len"]))) - set(concerned):
            rows = b if starts is None else slice(starts[b], starts[b + 1])
            assert torch.allclose(actual[rows].float(), expected[rows].float(), atol=1e-2), f"sequence {b} is another"


def caches(device: str) -> None:
    """update_cache and cached_attention, few queries."""
    for cache_dtype in (torch.float32, torch.float8_e4m3fn):
        settings = dict(lengths=[9, 4, 30], lens=[5, 1, 3], page_size=4, room=32, heads=(4, 2), dims=(16, 24), dtype=torch.float32)
        if cache_dtype != torch.float32:
            settings |= dict(page_size=128, room=256, lengths=[200, 4, 129])
        rope = rope_table(24, 8, device=device)
        for name, concerned, guards, (q, k, v), tensors, where, honest in calls(device, cache_dtype=cache_dtype, **settings):
            with saying(name, cache_dtype):
                before = [t.clone() for t in tensors]
                turned = update_cache(k, v, *tensors, **where, query=q, rope=rope, check=False)
                assert not turned.isnan().any(), "a row of the turned queries was not written"
                if name.startswith("all pages"):
                    assert all(torch.equal(t.float(), b.float()) for t, b in zip(tensors, before, strict=True)), "written without a place"
                attend(guards, turned, tensors, where, honest, concerned, (None, mods.sliding_window(3)))
                assert guards.intact(), "something was written outside"


def prefixes(device: str) -> None:
    """cached_attention that reads once what sequences are said to share."""
    shared_prefix.LEAST_BYTES, shared_attention.LEAST_FILL = 0, 0.0  # however little it is, and however empty tiles are
    kinds = [(4, (16, 24), torch.float32)]
    kinds += [(8, (64, 64), torch.bfloat16)] if device == "cuda" else []  # on Hopper by the kernel in Gluon
    for size, dims, dtype in kinds:
        _prefixes(device, size, dims, dtype)


def _prefixes(device: str, size: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    honest = {"order": [2, 0, 1], "starts": [0, 2], "lengths": [2 * size], "pages": [[3, 1]], "prefix": [size, 0, 2 * size]}
    settings = dict(lengths=[9, 4, 30], lens=[5, 1, 3], page_size=size, room=32, heads=(4, 2), dims=dims, dtype=dtype)
    lies = [(name, number) for name in honest for number in (LOW, -1, 5, FAR, HIGH)]
    for i, (name, _, guards, (q, _, _), tensors, where, _) in enumerate(calls(device, cache_dtype=dtype, **settings)):
        if "page_table" in where:
            for lie, number in (("nothing", 0), *lies[i % 5 :: 5]):
                numbers = {what: torch.tensor(values, dtype=torch.int32) for what, values in honest.items()}
                if lie in numbers:
                    numbers[lie].view(-1)[-1] = number
                shared = SharedPrefix(**{what: guards.put(t) for what, t in numbers.items()}, page_size=size, tokens_saved=1)
                with saying(name, f"{lie} of a shared prefix"):
                    for mask_mod in (None, mods.sliding_window(3)):
                        found = cached_attention(
                            q, *tensors, **where, mask_mod=mask_mod, shared_prefix=shared, return_lse=True, check=False
                        )
                        assert not any(t.isnan().any() for t in found), "something was not written, or read outside"
                    assert guards.intact(), "something was written outside"


def prompts(device: str) -> None:
    """Long prompts, on Hopper by the kernel in Gluon."""
    size = (
        dict(lengths=[600, 900, 700], lens=[600, 513, 650], page_size=64, room=1024)
        if device == "cuda"
        else dict(lengths=[140, 30, 60], lens=[130, 20, 3], page_size=16, room=160)
    )
    for name, concerned, guards, (q, _, _), tensors, where, honest in calls(
        device, heads=(8, 2), dims=(64, 128), dtype=torch.bfloat16, cache_dtype=torch.bfloat16, **size
    ):
        if "ragged" in name:
            with saying(name, "prompts"):
                attend(guards, q, tensors, where, honest, concerned, (None, mods.sliding_window(100)))
                assert guards.intact(), "something was written outside"


def lists(device: str) -> None:
    """Block lists whose counts and indices are not there, forward and backward."""
    length, block = 200, 64
    rows = columns = -(-length // block)
    for name, count, index in (
        ("honest", None, None),
        ("a count too large", FAR, None),
        ("a negative count", -3, None),
        ("index -1", None, -1),
        ("an index after the last", None, columns),
        ("an index far away", None, FAR),
    ):
        guards = Guards(device)
        counts = torch.full((1, 1, rows), columns)
        indices = torch.arange(columns).expand(1, 1, rows, columns).contiguous()
        if count is not None:
            counts[..., 1] = count
        if index is not None:
            indices[..., 2, 1] = index
        counts, indices = (guards.put(t.to(torch.int32)) for t in (counts, indices))
        for dtype, head_dim in ((torch.float32, 32), (torch.bfloat16, 64)):
            q, k, v = (guards.put(torch.randn(1, h, length, head_dim).to(dtype)).requires_grad_() for h in (2, 1, 1))
            with saying(name, f"lists, {dtype}"):
                try:
                    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=block, mask_mod=mods.causal, seq_lengths=(length, length))
                    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
                    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
                except ValueError as refused:  # refused in words is as good
                    print(f"  {name}: {refused}")
                assert guards.intact(), "something was written outside"


class saying:
    """Names the case where something fails in it."""

    def __init__(self, *what) -> None:
        self.what = ", ".join(map(str, what))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, _) -> None:
        if error is not None:
            print(f"failed: {self.what}", file=sys.stderr)


PARTS = {part.__name__: part for part in (caches, prefixes, prompts, lists)}


def main(device: str, *names: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written is NaN
    try:
        for name in names or PARTS:
            PARTS[name](device)
            if device == "cuda":
                torch.cuda.synchronize()
            print(f"{name}: nothing was read or written outside")
    finally:
        torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    os.environ.setdefault("FLEXPRESS_CPU", "interpreter")  # on a CPU this is of kernels in Triton
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    main(arguments.device, *arguments.parts)
