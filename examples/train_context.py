"""A small Llama trained on rows of documents that are split over ranks, by FSDP2 and a context plan, beside the same training on one rank.

    torchrun --nproc-per-node 2 examples/train_context.py
    torchrun --nproc-per-node 4 examples/train_context.py --length 131072 --dim 1024 --layers 8 --steps 40 --lr 1e-3

Every step has other documents, so another mask and another plan. A document draws its tokens from a few of its own, which a model finds
out by attending to the document's beginning, and to nothing of the others. Scores have a bias by distance, which is learned. The defaults
are for the interpreter on CPUs (gloo); on GPUs (NCCL) the model computes in bfloat16. Exit status 1 if the losses of ranks together and of
one rank differ by more than rounding makes of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from flexpress import varlen_attention
from flexpress.distributed import ContextPlan
from flexpress.mods import alibi, causal

VOCABULARY, OWN = 64, 4  # tokens that there are, and of one document
ALLOWED = {"cpu": 1e-4, "cuda": 2e-2}  # between two losses of a step

Attend = Callable[..., Tensor]


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of (tokens, heads, D)."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() * 10000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = (t[:, None].to(x.dtype) for t in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.before_attention, self.before_mlp = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.query, self.output = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(dim, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * dim, dim, bias=False)
        self.slopes = nn.Parameter(0.01 * torch.rand(heads))

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        normed = self.before_attention(x)
        q, k, v = (project(normed).unflatten(-1, (-1, self.head_dim)) for project in (self.query, self.key, self.value))
        attended = attend(rotated(q, positions), rotated(k, positions), v, score_mod=alibi(self.slopes))
        x = x + self.output(attended.flatten(1))
        normed = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, dim: int, layers: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        return self.head(self.norm(x))


class Row:
    """A row of documents, of a step.

    cu_seqlens   int32 (documents + 1,): where documents begin, and the end
    tokens       (length,)
    targets      (length,): the token that follows in the document; -100 for the last one
    """

    def __init__(self, step: int, length: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(step)
        cuts = torch.randperm(length - 1, generator=generator)[:11] + 1
        self.cu_seqlens = torch.cat((torch.tensor([0, length]), cuts)).sort().values.int().to(device)
        own = torch.randint(VOCABULARY, (12, OWN), generator=generator).to(device)
        drawn = torch.randint(OWN, (length,), generator=generator).to(device)
        ends = self.cu_seqlens[1:].long()
        self.tokens = own[torch.searchsorted(ends, torch.arange(length, device=device), right=True), drawn]
        self.targets = self.tokens.roll(-1).index_fill(0, ends - 1, -100)


def whole_row(row: Row) -> tuple[Tensor, Tensor, Attend]:
    """Of one process: which tokens it has, their positions in documents, and attention."""
    held = torch.arange(len(row.tokens), device=row.tokens.device)
    document = torch.searchsorted(row.cu_seqlens[1:], held, right=True)
    return held, held - row.cu_seqlens[document], partial(varlen_attention, cu_seqlens_q=row.cu_seqlens, mask_mod=causal)


def part_of_row(mesh: DeviceMesh, row: Row) -> tuple[Tensor, Tensor, Attend]:
    """The same of a rank."""
    plan = ContextPlan.packed(row.cu_seqlens, mask_mod=causal, group=mesh, device=row.tokens.device, sum_gradients=False)  # FSDP does
    return plan.position_ids, plan.positions_in_sequence, partial(varlen_attention, context=plan)


def train(model: nn.Module, asked: argparse.Namespace, device: torch.device, held_of: Callable, ranks: int) -> list[float]:
    """The loss of each step, averaged over the tokens of all ranks."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=asked.lr), []
    for step in range(asked.steps):
        row = Row(step, asked.length, device)
        held, positions, attend = held_of(row)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(row.tokens[held], positions, attend)
        loss = F.cross_entropy(logits.float(), row.targets[held], reduction="sum") / (row.targets >= 0).sum()
        (loss * ranks).backward()  # FSDP averages gradients over ranks
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("length", 640), ("steps", 20), ("dim", 64), ("layers", 2), ("heads", 4), ("kv-heads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-2)
    asked = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun, which says who is which rank: torchrun --nproc-per-node 2 examples/train_context.py")
    on_gpus, rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("context",))

    def made() -> Llama:
        torch.manual_seed(0)
        return Llama(asked.dim, asked.layers, asked.heads, asked.kv_heads).to(device)

    model = made()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    together = train(model, asked, device, partial(part_of_row, mesh), mesh.size())
    del model
    dist.destroy_process_group()
    # every rank trains alone, too: one that ended here could abort, as gloo's threads let go of tensors after a collective is over
    alone = train(made(), asked, device, whole_row, 1)
    if rank:
        return
    print(f"step  {mesh.size()} ranks  one rank")
    for step, (ours, theirs) in enumerate(zip(together, alone, strict=True)):
        print(f"{step:4d}  {ours:7.4f}  {theirs:8.4f}")
    largest = max(abs(a - b) for a, b in zip(together, alone, strict=True))
    print(f"largest difference {largest:.1e}, allowed {ALLOWED[device.type]:.0e}")
    sys.exit(not largest <= ALLOWED[device.type])


if __name__ == "__main__":
    main()
