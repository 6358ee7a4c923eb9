"""Block masks where torch records: their lists under FakeTensorMode and in graphs, masks of a user's lists inside torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flexpress import BlockMask, create_block_mask, flex_attention
from flexpress.codegen.run.status_lists import lists_of_status

LISTS = [f"{kind}_{what}" for kind in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


READS = {
    "lists": lambda mask: [getattr(mask, name) for name in LISTS],
    "as_tuple": lambda mask: list(mask.as_tuple()[2:10]),
    "adjust": lambda mask: [getattr(mask._adjust(100, 130), name) for name in LISTS],
    "shorter": lambda mask: [getattr(shortened(mask), name) for name in LISTS],
    "rows in a tensor": lambda mask: [getattr(mask[:, :, torch.tensor([2, -1])], name) for name in LISTS],
    "slice": lambda mask: [getattr(mask[:, 1:, 1:], name) for name in LISTS],
    "lists of its lists": lambda mask: [BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices).q_indices],
    "dense": lambda mask: [mask.to_dense()],
}


def shortened(mask):
    mask.seq_lengths = (130, 100)
    return mask


@pytest.mark.parametrize("read", READS)
def test_a_mask_without_values(in_cpp, read):
    """Kernels that were launched on its tensors ended the process."""
    expected = READS[read](create_block_mask(causal, 2, 3, 256, 200, "cpu", 32))
    with FakeTensorMode():
        mask = create_block_mask(causal, 2, 3, 256, 200, "cpu", 32)
        found = READS[read](mask)
        assert "causal" in str(mask) and "causal" in repr(mask)
    assert [(type(t), t.shape, t.dtype) for t in found] == [(FakeTensor, t.shape, t.dtype) for t in expected]


@pytest.mark.parametrize("way", ["export", "make_fx"])
def test_lists_of_a_mask_that_a_graph_makes(way):
    class Lists(torch.nn.Module):
        def forward(self, x):
            mask = create_block_mask(causal, None, None, x.shape[2], x.shape[2], "cpu", 32)
            return flex_attention(x, x, x, block_mask=mask), *READS["lists"](mask), *READS["adjust"](mask.adjust(100, 130))

    x = torch.randn(1, 2, 150, 16)
    graph = torch.export.export(Lists(), (x,), strict=False).module() if way == "export" else make_fx(Lists(), tracing_mode="fake")(x)
    for found, expected in zip(graph(x), Lists()(x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("given", [False, True])
def test_a_mask_is_the_same_after_it_was_traced(given):
    """Nothing without values is kept on it."""
    mask, q = create_block_mask(causal, None, None, 100, 100, "cpu", 32), torch.randn(1, 1, 100, 16)
    if given:
        mask = BlockMask.from_kv_blocks(
            *[t.clone() for t in READS["lists"](mask)[:4]], BLOCK_SIZE=32, mask_mod=causal, seq_lengths=(100, 100)
        )
    mask.mask_mod = lambda b, h, q_idx, kv_idx: q_idx == kv_idx
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert all(isinstance(t, FakeTensor) for t in (mask.q_indices, mask.as_lists().kv_indices) if not given)
        assert isinstance(mask.as_transposed_lists().kv_indices, FakeTensor)
    assert type(mask.q_indices) is type(mask.as_lists().kv_indices) is torch.Tensor
    assert flex_attention(q, q, q, block_mask=mask).isfinite().all()


def test_kernels_refuse_tensors_without_memory(in_cpp):
    with FakeTensorMode(), pytest.raises(NotImplementedError, match="a kernel was to get a FakeTensor, which has no memory"):
        lists_of_status(torch.zeros(1, 1, 2, 2, dtype=torch.int8), [2, 2], True)


def from_lists(q, *lists):
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(32, 64), mask_mod=causal, seq_lengths=(q.shape[2], q.shape[2]))
    return flex_attention(q, q, q, block_mask=mask), mask.kv_indices + 1, mask.BLOCK_SIZE, mask.shape


def from_the_class(q, *lists):
    mask = BlockMask((q.shape[2], q.shape[2]), *lists, BLOCK_SIZE=(32, 64), mask_mod=causal)
    return flex_attention(q, q, q, block_mask=mask), mask.q_indices, mask.seq_lengths, mask.numel()


def with_lists_set(q, *lists):
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(32, 64), mask_mod=causal, seq_lengths=(q.shape[2], q.shape[2]))
    mask.kv_num_blocks = lists[0] * 0
    return flex_attention(q, q, q, block_mask=mask), mask.kv_num_blocks


KEPT = create_block_mask(causal, None, None, 150, 150, "cpu", (32, 64))


def read_of_one_outside(q, *lists):
    return q * KEPT.BLOCK_SIZE[0] + KEPT.seq_lengths[1] + KEPT.shape[0], *(getattr(KEPT, name) for name in LISTS)


USERS = BlockMask.from_kv_blocks(*READS["lists"](KEPT)[:4], BLOCK_SIZE=(32, 64), mask_mod=causal, seq_lengths=(150, 150))


def read_of_a_users_outside(q, *lists):
    return flex_attention(q, q, q, block_mask=USERS), USERS.kv_indices + USERS.q_num_blocks.sum(), USERS.q_indices, USERS.BLOCK_SIZE


FUNCTIONS = (from_lists, from_the_class, with_lists_set, read_of_one_outside, read_of_a_users_outside)


@pytest.mark.parametrize(
    "function, dynamic", [*((function, None) for function in FUNCTIONS), (from_the_class, True), (read_of_a_users_outside, True)]
)
def test_masks_of_lists_in_what_is_compiled(function, dynamic):
    """As torch's class: made, read and changed there without a graph break."""
    q, theirs = torch.randn(1, 2, 150, 16), torchs.create_block_mask(causal, None, None, 150, 150, "cpu", (32, 64))
    lists = [getattr(theirs, name) for name in LISTS[:4]]
    USERS.for_kernels()  # which keeps what it has read
    torch._dynamo.reset()
    found = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)(q, *lists)
    for value, expected in zip(found, function(q, *lists), strict=True):
        torch.testing.assert_close(value, expected)


def test_a_mask_that_compiled_code_returns():
    q, theirs = torch.randn(1, 2, 150, 16), torchs.create_block_mask(causal, None, None, 150, 150, "cpu", 64)
    lists = [getattr(theirs, name).clone() for name in LISTS[:4]]
    torch._dynamo.reset()
    made = torch.compile(
        lambda *lists: BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, mask_mod=causal, seq_lengths=(150, 150)),
        backend="aot_eager",
        fullgraph=True,
    )(*lists)
    torch.testing.assert_close(flex_attention(q, q, q, block_mask=made), flex_attention(q, q, q, mask_mod=causal))
    lists[0].zero_()
    assert not flex_attention(q, q, q, block_mask=made)[:, :, :64].any()


def test_what_is_wrong_with_lists_is_said_by_the_compiled_call():
    counts, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)

    def attend(q, counts, indices):
        return flex_attention(q, q, q, block_mask=BlockMask.from_kv_blocks(counts, indices))

    with pytest.raises(Exception, match=r"kv_num_blocks has shape \(1, 1, 3\), but kv_indices \(1, 1, 2, 2\) needs"):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(torch.randn(1, 1, 256, 16), counts, indices)


def decoded(function, create, q, k, v):
    """gpt-fast's decoding: the row of blocks of a position in a tensor, with a mask_mod that is told how far on it is."""
    whole = create(causal, 1, 1, k.shape[2], k.shape[2], "cpu", 32)

    def step(q, k, v, position, whole):
        mask = whole[:, :, position // whole.BLOCK_SIZE[0]]
        mask.mask_mod, mask.seq_lengths = whole.mask_mod, (1, k.shape[2])

        def moved(b, h, q_idx, kv_idx, mask_mod=mask.mask_mod):
            return mask_mod(b, h, q_idx + position[0], kv_idx)

        mask.mask_mod = moved
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    return torch.cat([function(step)(q[:, :, i : i + 1], k, v, torch.tensor([i]), whole) for i in range(q.shape[2])], 2)


@pytest.mark.parametrize("create", [create_block_mask, torchs.create_block_mask], ids=["ours", "torch's"])
def test_decoding_by_slices_in_what_is_compiled(create):
    q, k = torch.randn(1, 4, 70, 16), torch.randn(1, 2, 70, 16)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = {}

    def once(step):
        if not compiled:
            compiled[0] = torch.compile(step, backend="aot_eager", fullgraph=True)
        return compiled[0]

    found = decoded(once, create, q, k, k)
    torch.testing.assert_close(found, flex_attention(q, k, k, mask_mod=causal, enable_gqa=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


ROWS = torch.tensor([2, -4])
PARTS = {
    "numbers": lambda mask: mask[1, 0],
    "slices": lambda mask: mask[:, 1:3, 1:3],
    "a list of heads": lambda mask: mask[:, [2, 0]],
    "a list of rows": lambda mask: mask[..., [3, 1]],
    "steps": lambda mask: mask[:, ::2, ::2],
    "rows in a tensor": lambda mask: mask[:, :, ROWS],
    "rows in a tensor of rows": lambda mask: mask[:, :, 1:][:, :, ROWS[:1]],
    "rows of rows in a tensor": lambda mask: mask[:, :, ROWS][:, :, 1:],
    "heads in a tensor": lambda mask: mask[:, torch.tensor([2, 0], dtype=torch.int32)],
    "one head in a tensor": lambda mask: mask[:, torch.tensor([-1])],
    "adjusted": lambda mask: mask._adjust(100, 90),
    "adjusted slices": lambda mask: mask[:1, :, ROWS].adjust(40, 70),
    "moved": lambda mask: mask[:, 1:].to("cpu"),
    "copied": lambda mask: mask[:, :, ROWS].__copy__(),  # torch 2.11's compiler does not trace copy.copy
    "as a tuple": lambda mask: BlockMask(mask.seq_lengths, *mask.as_tuple()[2:6], BLOCK_SIZE=32, mask_mod=mask.mask_mod),
    "shorter slices": lambda mask: shortened(mask[:, :, torch.tensor([3, 2, 1, 0, 1])]),
}


def by_batch_and_head(b, h, q_idx, kv_idx):
    return (kv_idx + 13 * h + 29 * b <= q_idx) & (q_idx - kv_idx < 80 + h)


MADE = ("outside", "inside", "of lists")
TAKEN = [(part, MADE[i % 3], None) for i, part in enumerate(PARTS)]  # all of them were tried; a few of each do
TAKEN += [("rows in a tensor", "outside", True), ("rows in a tensor", "inside", None), ("slices", "of lists", True)]


@pytest.mark.parametrize(("part", "made", "dynamic"), TAKEN)
def test_parts_of_masks_in_what_is_compiled(part, made, dynamic):
    """As eager: what attends, and the lists that are shown."""
    outside = create_block_mask(by_batch_and_head, 2, 3, 128, 128, "cpu", 32)
    lists = [getattr(outside, name).clone() for name in LISTS[:4]]

    def attend(q):
        if made == "outside":
            mask = outside
        elif made == "inside":
            mask = create_block_mask(by_batch_and_head, 2, 3, 128, 128, "cpu", 32)
        else:
            mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=32, mask_mod=by_batch_and_head, seq_lengths=(128, 128))
        taken = PARTS[part](mask)
        B, H, Q_LEN, KV_LEN = taken.shape
        q, k = q[:B, :H, :Q_LEN], q[:B, :H, :KV_LEN]
        return flex_attention(q, k, k, block_mask=taken), taken.to_dense(), *(getattr(taken, name) for name in LISTS)

    q = torch.randn(2, 3, 160, 16)
    torch._dynamo.reset()
    found = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)(q)
    for value, expected in zip(found, attend(q), strict=True):
        torch.testing.assert_close(value, expected)
