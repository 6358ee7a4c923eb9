"""Ragged queries against a cache that tests draw, and what cached_attention gives against dense attention, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from hypothesis import strategies as st

from flexpress import mods
from support.dense import dense_attention, relative_error

SLOPES = torch.linspace(0.1, 0.9, 4)
TABLE = torch.randn(6000, generator=torch.Generator().manual_seed(5))


def made_mods(device: str = "cpu") -> dict[str, tuple[Callable | None, Callable | None]]:
    """By name: score_mod and mask_mod."""
    slopes, table = SLOPES.to(device), TABLE.to(device)
    return {
        "causal": (None, None),
        "alibi": (mods.alibi(slopes), None),
        "window": (None, mods.sliding_window(150)),
        "softcap, window": (mods.softcap(2.0), mods.sliding_window(300)),
        "all": (None, lambda b, h, q_idx, kv_idx: kv_idx >= 0),
        "per sequence": (
            lambda score, b, h, q_idx, kv_idx: score + b * 0.3 - kv_idx * 0.01,
            lambda b, h, q_idx, kv_idx: (kv_idx + b) % 3 != 0,
        ),
        "per head": (None, lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx >= 100 * h)),
        "by position": (
            lambda score, b, h, q_idx, kv_idx: score + table[q_idx] * table[kv_idx],
            lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        ),
        "by key": (None, lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (table[kv_idx] > -1)),
    }


MODS = sorted(made_mods())


@dataclass
class Batch:
    """A call of cached_attention: sequence b has q_lens[b] new queries and kv_lens[b] keys in the cache.

    `page_size` 0: an entry a sequence; with `located`, anywhere in the cache. `heads`: of queries and of keys. `dims`: head dims of
    keys and of values. `more`: tokens after the last sequence. `mod`: one of MODS. `offsets`: positions of first queries; None: such
    that the last query is at the last key.
    """

    q_lens: list[int]
    kv_lens: list[int]
    _: KW_ONLY
    page_size: int = 0
    located: bool = False
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    more: int = 0
    mod: str = "causal"
    offsets: list[int] | None = None
    seed: int = 0

    def sequences(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each one's q (1, Hq, q_len, D), k (1, Hkv, kv_len, D) and v (1, Hkv, kv_len, Dv)."""
        return self._drawn()[0]

    def arguments(self, device: str = "cpu") -> dict:
        """Tensors and lengths, without mods. What no sequence has is NaN in the cache, and no page in the table."""
        sequences, following, g = self._drawn()
        B, size = len(self.q_lens), self.page_size or max(self.kv_lens) + 3
        pages = -(-(max(self.kv_lens) + 3) // size)
        apart = bool(self.page_size or self.located)
        places = torch.randperm(B * pages + 2, generator=g)[: B * pages].reshape(B, pages)
        places = places if apart else torch.arange(B)[:, None]
        caches = [torch.full((B * pages + 2 * apart, size, self.heads[1], D), float("nan"), dtype=self.dtype) for D in self.dims]
        for b, (_, *kept) in enumerate(sequences):
            for cache, t in zip(caches, kept, strict=True):
                for i, part in enumerate(t[0].transpose(0, 1).split(size)):
                    cache[places[b, i], : len(part)] = part
            places[b, -(-self.kv_lens[b] // size) :] = -(1 << 30) if b % 2 else 1 << 30  # never to be read
        int32 = dict(dtype=torch.int32, device=device)
        found = {
            "query": torch.cat([t[0].transpose(0, 1) for t in (*(q for q, _, _ in sequences), following)]).to(device),
            "k_cache": caches[0].to(device),
            "v_cache": caches[1].to(device),
            "kv_len": torch.tensor(self.kv_lens, **int32),
            "cu_seqlens_q": torch.tensor([0, *torch.tensor(self.q_lens).cumsum(0)], **int32),
            "max_q_len": max(self.q_lens),
        }
        if self.page_size:
            found["page_table"] = places.to(**int32)
        elif self.located:
            found["cache_loc"] = places[:, 0].to(**int32)
        if self.offsets is not None:
            found["q_offset"] = torch.tensor(self.offsets, **int32)
        return found

    def mods(self, device: str = "cpu") -> dict:
        """score_mod and mask_mod."""
        return dict(zip(("score_mod", "mask_mod"), made_mods(device)[self.mod], strict=True))

    def _drawn(self) -> tuple[list[tuple], torch.Tensor, torch.Generator]:
        """The sequences, the tokens after the last one, and the generator they came of."""
        g = torch.Generator().manual_seed(self.seed)
        (Hq, Hkv), (D, Dv) = self.heads, self.dims

        def random(heads: int, n: int, width: int) -> torch.Tensor:
            return torch.randn(1, heads, n, width, generator=g).to(self.dtype)

        parts = [
            [random(H, n, width) for n in lens]
            for H, width, lens in ((Hq, D, self.q_lens), (Hkv, D, self.kv_lens), (Hkv, Dv, self.kv_lens))
        ]
        return list(zip(*parts, strict=True)), random(Hq, self.more, D), g


@st.composite
def batches(draw) -> Batch:
    """For a GPU. One query of every sequence is for decode."""
    q_lens = draw(st.lists(st.sampled_from([0, 1, 60, 128, 300, 777, 1024]), min_size=1, max_size=5).filter(lambda lens: max(lens) > 1))
    Hkv = draw(st.sampled_from([1, 2]))
    head_dims = st.sampled_from([40, 64, 72, 128, 192, 256])
    return Batch(
        q_lens,
        [n + draw(st.sampled_from([0, 1, 100, 900])) for n in q_lens] if draw(st.integers(0, 4)) else [n // 2 for n in q_lens],
        page_size=draw(st.sampled_from([0, 8, 16, 32, 64, 128, 256])),
        located=draw(st.booleans()),
        heads=(Hkv * draw(st.sampled_from([1, 2] if Hkv == 2 else [1, 3, 4])), Hkv),
        dims=(draw(head_dims), draw(head_dims)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        more=draw(st.sampled_from([0, 1, 200])),
        mod=draw(st.sampled_from(MODS)),
        seed=draw(st.integers(0, 99)),
    )


def check(p: Batch, found: tuple[torch.Tensor, torch.Tensor], factor: float = 1.5) -> None:
    """out and lse of a call against dense attention, sequence by sequence, and zeros after the last one."""
    out, lse = found
    device = str(out.device)
    score_mod, mask_mod = p.mods(device).values()
    end = 0
    for b, sequence in enumerate(p.sequences()):
        q, k, v = (t.to(device) for t in sequence)
        start, end = end, end + q.shape[2]
        if q.shape[2] == 0:
            continue
        mine = [t[start:end].transpose(0, 1)[None] for t in (out, lse)]
        if k.shape[2] == 0:
            assert (mine[0] == 0).all() and (mine[1] == float("-inf")).all()
            continue
        first = k.shape[2] - q.shape[2] if p.offsets is None else p.offsets[b]

        def shifted(mod, b=b, first=first):
            return mod and (lambda *a: mod(*a[:-4], torch.full_like(a[-4], b), a[-3], a[-2] + first, a[-1]))

        shift = shifted(score_mod), shifted(mask_mod or mods.causal)
        exact, exact_lse, _ = dense_attention(q, k, v, *shift)
        plain, plain_lse, _ = dense_attention(q, k, v, *shift, precision=q.dtype)
        assert relative_error(mine[0], exact) <= factor * relative_error(plain, exact) + 1e-6
        assert torch.equal(mine[1] == float("-inf"), exact_lse == float("-inf"))
        error, plain_error = ((t - exact_lse).nan_to_num(0.0, 0.0, 0.0).abs().max() for t in (mine[1], plain_lse))
        assert error <= 2 * plain_error + 1e-5
    assert (out[end:] == 0).all() and (lse[end:] == float("-inf")).all()
