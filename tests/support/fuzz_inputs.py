"""What a program of the fuzzer is made of: tensors by seed, in any dtype and layout. Printed at the head of every program that is replayed,
so it imports nothing but torch. All are made on the CPU, so a program has the same values on every device."""

from __future__ import annotations

import torch


def floats(shape, dtype, seed, scale=1.0):
    """Normal numbers."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def integers(shape, dtype, seed, low, high):
    """Numbers from low to high, both included."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def extremes(shape, dtype, seed):
    """The ends of an integer dtype and their neighbours, among small numbers; of int32 what may stand beside an index (docs/mods.md)."""
    low, high = (-(1 << 30), 1 << 30) if dtype is torch.int32 else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    corners = torch.tensor([low, low + 1, high - 1, high, 0, 1, max(low, -1), 2, 3, 7, 100])
    return corners[torch.randint(0, len(corners), shape, generator=torch.Generator().manual_seed(seed))].to(dtype)


def flags(shape, seed, share=0.5):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def ascending(length, count, dtype, seed):
    """Numbers of documents: from 0 to at most count - 1, never falling."""
    return torch.randint(0, count, (length,), generator=torch.Generator().manual_seed(seed)).sort().values.to(dtype)


def among_poison(tensor, step=1):
    """The same tensor as a view of a larger one, which holds NaN, True or 77 wherever the view does not."""
    poison = float("nan") if tensor.is_floating_point() else True if tensor.dtype == torch.bool else 77
    whole = torch.full([n * step + 3 for n in tensor.shape], poison).to(tensor.dtype).to(tensor.device)
    view = whole[tuple(slice(1, 1 + n * step, step) for n in tensor.shape)]
    return view.copy_(tensor)


def turned(tensor):
    """The same tensor with its dimensions in memory in the opposite order."""
    return tensor.permute(*reversed(range(tensor.ndim))).contiguous().permute(*reversed(range(tensor.ndim)))


def laid_out(shape, dtype, device, seed, layout="contiguous", scale=1.0):
    """Normal numbers of shape (B, H, S, D), or (T, H, D), in a layout."""

    def random(*sizes):
        return floats(sizes, dtype, seed, scale).to(device)

    *B, H, S, D = shape
    if layout == "heads last":
        return random(*B, S, H, D).transpose(-3, -2)
    if layout == "sliced":
        return random(*B, H + 1, S + 3, D + 5)[..., 1:, 2 : S + 2, 3 : D + 3]
    if layout == "every other element":
        return random(*B, H, S, 2 * D)[..., ::2]
    if layout == "one batch entry":
        return random(1, H, S, D).expand(shape) if B else random(*shape)
    if layout == "one head":
        return random(*B, 1, S, D).expand(shape)
    if layout == "reversed":
        return turned(random(*shape))
    return random(*shape)


LAYOUTS = ("contiguous", "contiguous", "heads last", "sliced", "every other element", "one batch entry", "one head", "reversed")


def packed(padded, lengths):
    """(total, H, D) from (B, H, S, D): the first positions of every sequence, one after another."""
    return torch.cat([t[:, :n].transpose(0, 1) for t, n in zip(padded, lengths, strict=True)])


def offsets(lengths, device, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=dtype)


def in_cache(padded, lengths, page_size, seed, located=False):
    """(cache, page table or cache_loc or None) of keys or values (B, H, S, D): NaN wherever no sequence has a position."""
    B, H, S, D = padded.shape
    generator = torch.Generator().manual_seed(seed)
    if page_size:
        table = torch.randperm(B * -(-S // page_size), generator=generator).reshape(B, -1)
        cache = torch.full((table.numel(), page_size, H, D), float("nan")).to(padded.dtype)
        for pages, t, n in zip(table.tolist(), padded.cpu(), lengths, strict=True):
            for i in range(n):
                cache[pages[i // page_size], i % page_size] = t[:, i]
        for pages, n in zip(table, lengths, strict=True):
            pages[-(-n // page_size) :] = -1
        return cache.to(padded.device), table.to(padded.device, torch.int32)
    places = torch.randperm(B + 2, generator=generator)[:B] if located else torch.arange(B)
    cache = torch.full((B + 2 * located, S, H, D), float("nan")).to(padded.dtype)
    for place, t, n in zip(places.tolist(), padded.cpu(), lengths, strict=True):
        cache[place, :n] = t[:, :n].transpose(0, 1)
    return cache.to(padded.device), places.to(padded.device, torch.int32) if located else None
