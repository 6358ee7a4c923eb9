"""The prints in generated/ are what the templates print today, to the letter."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from flexpress.codegen.run.preview import (
    backward_compilations,
    decode_compilations,
    hopper_backward_compilations,
    hopper_compilation,
    preview,
)
from flexpress.codegen.run.preview_masks import mask_compilations
from flexpress.codegen.text.render import render
from flexpress.recipes import make

FOLDER = Path(__file__).parent.parent / "generated"
GOLDEN = {  # at most 9: a change of a template is read here, everything else is tested elsewhere
    "forward_plain_d64_fp32": lambda: preview(dtype="float32", head_dim=64, use_tma=False),  # examples/minimal.md
    "forward_causal_d128_bf16_tma": lambda: preview(*make("causal")),
    "decode_alibi_paged_d128_bf16": lambda: (
        decode_compilations("sm_90", *make("alibi"), page_size=16, lengths=True, balanced=True)["decode"].spec
    ),
    "backward_dkv_softcap_causal_d128_bf16": lambda: backward_compilations("sm_90", *make("softcap", "causal"))["dkv"].spec,
    "backward_dq_relative_bias_d64_fp32": lambda: (
        backward_compilations("sm_90", *make("relative_bias"), dtype="float32", head_dim=64, captured=True)["dq"].spec
    ),
    "hopper_forward_causal_d128_bf16": lambda: hopper_compilation("sm_90", *make("causal")).spec,
    "hopper_backward_alibi_causal_d128_bf16": lambda: hopper_backward_compilations(*make("alibi", "causal"))["fused"].spec,
    "block_status_document": lambda: mask_compilations("sm_90", make("document")[1])["status"].spec,
    "block_lists_sliding_window": lambda: mask_compilations("sm_90", make("sliding_window")[1])["lists"].spec,
}


@pytest.mark.parametrize("name", GOLDEN)
def test_print_is_unchanged(name, request):
    path = FOLDER / f"{name}.py"
    text = render(GOLDEN[name]())
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    committed = path.read_text(encoding="utf-8") if path.exists() else ""
    diff = list(difflib.unified_diff(committed.splitlines(), text.splitlines(), f"generated/{name}.py", "printed now", lineterm="", n=1))
    if diff or text != committed:
        pytest.fail(
            "\n".join(["the print has changed. If it should: `make golden`, and read the diff of generated/.", *diff[:60]]), pytrace=False
        )


def test_nothing_else_is_committed():
    assert {f.stem for f in FOLDER.glob("*.py")} == set(GOLDEN)
    assert len(GOLDEN) <= 9


@pytest.mark.parametrize("name", GOLDEN)
def test_print_names_no_machine(name):
    """Comments lead to the user's mod by a path inside the repository."""
    text = render(GOLDEN[name]())
    assert str(FOLDER.parent) not in text
    if "_mod: " in text:
        assert "# mods/" in text
