"""`python -m flexpress demo`: ALiBi under a sliding window; a picture, an error, a time, a file to read."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flexpress import mods
from flexpress.attention import flex_attention
from flexpress.inspection import cache_info, printed_kernels
from flexpress.masks.block_mask import BlockMask
from flexpress.masks.mask_creation import create_block_mask
from flexpress.precompile import wait_for_kernels

from ..codegen.device import cpp_compiler

_TOLERANCE = 2.0  # the error may be this many times that of plain attention in the same dtype
_REPEATS = 20


class _Size(NamedTuple):
    B: int
    H: int
    S: int
    D: int
    window: int
    block: int


_SIZES = {"cuda": _Size(4, 16, 4096, 128, 1024, 128), "cpu": _Size(1, 8, 4096, 64, 512, 128), "interpreter": _Size(1, 4, 512, 64, 128, 32)}


def demo(device_type: str | None = None) -> int:
    """Run the demo on "cuda" or "cpu" (default: a GPU if there is one). 0 if the error is small, else 1."""
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    interpreted = device_type == "cpu" and cpp_compiler.refusal()
    size = _SIZES["interpreter" if interpreted else device_type]
    device, dtype = torch.device(device_type), torch.bfloat16 if device_type == "cuda" or interpreted else torch.float32
    where = torch.cuda.get_device_name() if device_type == "cuda" else f"the CPU, in {'the interpreter' if interpreted else 'C++'}"
    print(f"ALiBi under a sliding window of {size.window}: B {size.B}, H {size.H}, S {size.S}, D {size.D}, {_name(dtype)}, on {where}")
    if interpreted:
        print(f"{interpreted}. The interpreter shows that a kernel is right, not how fast it is. A GPU runs the same kernel.")

    torch.manual_seed(0)
    q, k, v = (torch.randn(size.B, size.H, size.S, size.D, dtype=dtype, device=device) for _ in range(3))
    score_mod = mods.alibi(mods.alibi_slopes(size.H, device))
    mask_mod = mods.sliding_window(size.window)

    mask, mask_seconds = _timed(lambda: create_block_mask(mask_mod, None, None, size.S, size.S, device, size.block))
    out, first_seconds = _timed(lambda: flex_attention(q, k, v, score_mod=score_mod, block_mask=mask))
    compiled = cache_info()
    seconds = _repeated(lambda: flex_attention(q, k, v, score_mod=score_mod, block_mask=mask), 1 if interpreted else _REPEATS)
    good, report = _errors(q, k, v, out, score_mod, mask_mod)

    _show_mask(mask)
    print(f"\nerror against float64 (root mean square, relative)\n{report}")
    print(
        f"\ntime\n  block mask, first call  {_duration(mask_seconds)}"
        f"\n  attention, first call   {_duration(first_seconds)}"
        f"\n  attention, repeated     {_duration(seconds)}"
    )
    if device_type == "cpu" and not interpreted:
        _show_peers(_peers(q, k, v, score_mod, mask_mod))
    print(
        f"  {compiled.traces} mods traced, {compiled.prints} kernels printed, {compiled.compiles} "
        f"{'loaded' if interpreted else 'compiled'}; those not printed came from the cache"
    )
    print("\nprinted kernels\n" + "\n".join(f"  {path}" for path in printed_kernels()))
    return 0 if good else 1


def _peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Callable, mask_mod: Callable) -> dict[str, Callable]:
    """What torch has for the same, compiled, and for attention without bias and mask, which is faster than with them."""
    length = q.shape[2]
    mask = torchs.create_block_mask(mask_mod, None, None, length, length, q.device)
    compiled = functools.cache(lambda: torch.compile(torchs.flex_attention))  # imports torch's compiler
    return {"torch's flex_attention": lambda: compiled()(q, k, v, score_mod, mask), "sdpa, of all positions": lambda: sdpa(q, k, v)}


def _show_peers(peers: dict[str, Callable]) -> None:
    for name, run in peers.items():
        try:
            took = _duration(_repeated(run, _REPEATS))
        except Exception as error:  # torch's compiler asks for more of a machine than we do
            took = f"does not run here ({type(error).__name__})"
        print(f"  {name:23} {took}")


def _show_mask(mask: BlockMask) -> None:
    rows = mask.kv_indices.shape[-2]
    picture = mask.to_string(grid_size=min(rows, 32)).splitlines()[1:]
    print(
        f"\nblock mask: {rows} x {rows} blocks of {mask.BLOCK_SIZE[0]}, {mask.sparsity():.1f} % of them empty"
        "\n  ██ full, every key attends   ░░ partial, the mask decides   blank: never visited\n"
    )
    print("\n".join(f"  |{line}|" for line in picture))


def _errors(q, k, v, out, score_mod: Callable, mask_mod: Callable) -> tuple[bool, str]:
    """Is the error small enough, and both errors in words: ours, and plain attention's in the dtype of q."""
    ours = plain = norm = 0.0
    for z in range(q.shape[0]):
        for h in range(q.shape[1]):
            inputs = (q[z, h], k[z, h], v[z, h])
            exact = _dense(*(x.double() for x in inputs), z, h, score_mod, mask_mod)
            ours += (out[z, h].double() - exact).square().sum().item()
            plain += (_dense(*inputs, z, h, score_mod, mask_mod).double() - exact).square().sum().item()
            norm += exact.square().sum().item()
    ours, plain = (ours / norm) ** 0.5, (plain / norm) ** 0.5
    good = ours <= _TOLERANCE * plain  # False for NaN
    verdict = "ok" if good else "TOO LARGE"
    return good, (
        f"  printed kernel                  {ours:.2e}  {verdict}: at most {_TOLERANCE:g} x the next line\n"
        f"  plain attention in {_name(q.dtype):12} {plain:.2e}"
    )


def _dense(q, k, v, z: int, h: int, score_mod: Callable, mask_mod: Callable) -> torch.Tensor:
    """One head by the textbook, (S, D), every step in the dtype of its inputs (a float32 bias promotes)."""
    index = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    where = (*torch.tensor((z, h), dtype=torch.int32, device=q.device), index[:, None], index[None, :])
    scores = score_mod(q @ k.T * q.shape[1] ** -0.5, *where)
    return scores.masked_fill(~mask_mod(*where), float("-inf")).softmax(-1).to(v.dtype) @ v


def _timed(run: Callable) -> tuple:
    start = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def _repeated(run: Callable[[], torch.Tensor], repeats: int) -> float:
    """Seconds of one more call: the least of several, or on a GPU their mean, by its own clock."""
    if repeats > 1:
        wait_for_kernels()
        found = run()
        if found.is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1000 / repeats
    return min(_timed(run)[1] for _ in range(repeats))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
