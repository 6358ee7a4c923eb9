"""The smallest attention: no mod, no mask, float32. minimal.md explains the printed kernel line by line.

    python examples/minimal.py

Runs B 16, H 12, N 64, D 64 against manual attention, on a GPU if there is one, else in Triton's interpreter
on the CPU, and prints the profiler's table for both and the largest difference.
"""

from __future__ import annotations

import math
import os
import sys

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes a diary to stderr; read when torch is imported

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from flexpress import flex_attention, printed_kernels  # noqa: E402

B, H, N, D = 16, 12, 64, 64
TOLERANCE = 1e-5  # float32 on both sides: a few units in the last place of numbers around 1


def manual_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v with the (N, N) scores in memory; q, k, v and the result (B, H, N, D)."""
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]))
    return torch.softmax(scores, dim=-1) @ v


def printed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same by a printed kernel: the portable one without TMA, so that any device runs the kernel of minimal.md."""
    return flex_attention(q, k, v, kernel_options={"BACKEND": "PORTABLE", "USE_TMA": False})


def profiled(name: str, attention, inputs: tuple, on_gpu: bool) -> torch.Tensor:
    """attention(*inputs), and the profiler's table of one call printed; the call before it is not counted."""
    attention(*inputs)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as prof, record_function(name):
        result = attention(*inputs)
        if on_gpu:
            torch.cuda.synchronize()
    print(f"=== {name} ===")
    order = "device_time_total" if on_gpu else "cpu_time_total"
    print(prof.key_averages().table(sort_by=order, row_limit=8, max_name_column_width=40))
    return result


def main() -> int:
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    inputs = tuple(torch.randn(B, H, N, D, device="cuda" if on_gpu else "cpu") for _ in range(3))
    if not on_gpu:
        print("No GPU: the kernel runs in Triton's interpreter; its time says nothing about its speed.\n")

    manual = profiled("manual attention", manual_attention, inputs, on_gpu)
    ours = profiled("flexpress", printed_attention, inputs, on_gpu)
    error = (ours - manual).abs().max().item()
    print(f"largest difference {error:.1e} (allowed {TOLERANCE:.0e}), the kernel is\n{printed_kernels()[-1]}")
    return 0 if error <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
