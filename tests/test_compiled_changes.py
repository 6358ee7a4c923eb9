"""What a program writes to its objects around calls that torch's compiler traces, and what else it knows of them: as in eager mode."""

from __future__ import annotations

import pytest
import torch
import torch.utils._pytree as pytree

from flexpress import BlockMask, create_block_mask, flex_attention
from flexpress.mods import causal

pytest.importorskip("torch._dynamo")
pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Counter:
    def __init__(self) -> None:
        self.seen = 0


def behind_a_mask(q):
    counter = Counter()
    mask = create_block_mask(causal, None, None, q.shape[2], q.shape[2], device=q.device)
    counter.seen = 5
    return flex_attention(q, q, q, block_mask=mask) * counter.seen


def behind_two_calls(q):
    counter = Counter()
    counter.seen += 1
    out = flex_attention(q, q, q, lambda score, *_: score * 2)
    counter.seen += 1
    out = flex_attention(out, q, q, lambda score, *_: score * counter.seen, mask_mod=causal)
    counter.seen += 1
    return out * counter.seen


class Steps(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, q):
        self.started = True
        out = flex_attention(q, q, q, lambda score, *_: score * 2)
        self.steps += 1
        return out * self.steps


@pytest.mark.parametrize("run", [behind_a_mask, behind_two_calls])
def test_an_object_is_written_to_around_calls(run):
    q = torch.randn(1, 2, 20, 8, requires_grad=True)
    found, wanted = (attend(q) for attend in (torch.compile(run, backend="aot_eager", fullgraph=True), run))
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(out.sum(), q)[0] for out in (found, wanted)))


def test_a_module_counts_its_calls():
    module, eager, q = Steps(), Steps(), torch.randn(1, 2, 20, 8)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(q), eager(q))
    assert module.steps == 3 and module.started


def test_a_strict_export_writes_to_an_object():
    class Model(torch.nn.Module):
        def forward(self, q):
            return behind_two_calls(q)

    q = torch.randn(1, 2, 20, 8)
    assert torch.equal(torch.export.export(Model(), (q,), strict=True).module()(q), behind_two_calls(q))


@pytest.mark.parametrize("strict", [False, True])
def test_a_block_mask_as_an_argument_of_an_exported_model(strict):
    """Its class is made a node of pytrees, as torch's export asks."""

    class Model(torch.nn.Module):
        def forward(self, q, mask):
            return flex_attention(q, q, q, block_mask=mask)

    named = {"serialized_type_name": "flexpress.BlockMask", "flatten_with_keys_fn": BlockMask._flatten_with_keys}
    q, mask = torch.randn(1, 2, 40, 8), create_block_mask(causal, None, None, 40, 40, device="cpu")
    pytree.register_pytree_node(BlockMask, BlockMask._flatten, BlockMask._unflatten, **named)
    try:
        exported = torch.export.export(Model(), (q, mask), strict=strict).module()
        assert torch.equal(exported(q, mask), flex_attention(q, q, q, mask_mod=causal))
    finally:
        pytree._deregister_pytree_node(BlockMask)  # other tests are of masks that are none


def test_a_batch_that_the_compiler_does_not_know():
    marked = pytest.importorskip("torch._dynamo.decorators").mark_unbacked
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, mask_mod=causal), backend="aot_eager", fullgraph=True)
    for batch in (2, 1, 3):
        x = [torch.randn(batch, 2, 10, 8) for _ in range(3)]
        if batch == 2:
            try:
                for t in x:
                    marked(t, 0, shape_id="batch")
            except TypeError:
                pytest.skip("this torch has no shape_id")
        assert torch.equal(compiled(*x), flex_attention(*x, mask_mod=causal))
