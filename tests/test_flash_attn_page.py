"""docs/flash_attn.md lists every argument of every function, and the functions have flash_attn 2.8's signatures."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from flexpress import flash_attn
from flexpress.flash_attn import bert_padding, flash_attn_interface

PAGE = (Path(__file__).parent.parent / "docs" / "flash_attn.md").read_text(encoding="utf-8")
COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False"
)
SIGNATURES = {  # of flash_attn 2.8.3
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_varlen_func": f"q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {COMMON}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {COMMON}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    "unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    "pad_input": "hidden_states, indices, batch, seqlen",
    "index_first_axis": "input, indices",
}
SECTIONS = re.findall(r"^## [^\n]+\n\n(`[^\n]+)\n\n(\|.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)


def function(name: str):
    return getattr(flash_attn if name.startswith("flash_attn") else bert_padding, name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attn(name):
    parameters = [p for p in inspect.signature(function(name)).parameters.values() if p.kind is not p.KEYWORD_ONLY]  # sinks
    assert ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    if name.startswith("flash_attn"):
        assert name in flash_attn.__all__ and getattr(flash_attn_interface, name) is function(name)


def test_the_page_lists_every_function_once():
    assert sorted(re.findall(r"`(\w+)`", " ".join(names for names, _ in SECTIONS))) == sorted(SIGNATURES)


@pytest.mark.parametrize("names, table", SECTIONS, ids=[names for names, _ in SECTIONS])
def test_a_table_lists_every_argument_with_its_default_and_a_verdict(names, table):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    listed = {argument.strip("`"): default.strip("`") for argument, default, *_ in rows}
    assert len(listed) == len(rows)
    taken = {}
    for name in re.findall(r"`(\w+)`", names):
        for p in inspect.signature(function(name)).parameters.values():
            taken[p.name] = "" if p.default is p.empty else repr(p.default)
    assert listed == taken
    for argument, _, verdict, words in rows:
        assert verdict in ("same", "differs", "refused"), argument
        assert words or verdict == "same", argument
