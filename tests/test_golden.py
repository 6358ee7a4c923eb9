"""The prints in generated/ are what the templates print today, to the letter."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
import torch

from flexpress.codegen.plan.extras import Extras
from flexpress.codegen.plan.forward import Blocks, Cache
from flexpress.codegen.plan.update_cache import UpdateCase, cpu_update_spec
from flexpress.codegen.run.preview import (
    as_bfloat16_compilation,
    backward_compilations,
    cached_statistics_compilations,
    compilation,
    cpu_specs,
    decode_compilations,
    exchange_compilations,
    hopper_backward_compilations,
    hopper_compilation,
    hopper_decode_compilation,
    merge_parts_compilation,
    preview,
    shared_tables_compilation,
    shared_tiles_compilation,
    statistics_compilations,
    tangent_compilations,
    update_cache_compilation,
    values_by_keys_compilation,
)
from flexpress.codegen.run.preview_masks import (
    block_lists_compilation,
    block_starts_compilation,
    cpu_mask_specs,
    dense_mask_compilation,
    evaluate_compilation,
    mask_compilations,
)
from flexpress.codegen.text.render import render
from flexpress.commands.recipes import make

FOLDER = Path(__file__).parent.parent / "generated"
TEMPLATES = FOLDER.parent / "templates"
LATENT = dict(head_dim=576, head_dim_v=512)
GOLDEN = {  # at most 10: a change of a template is read here, everything else is tested elsewhere
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
    "cpu_forward_alibi_causal_d64_fp32": lambda: cpu_specs(*make("alibi", "causal"), dtype="float32", head_dim=64)["forward"],
    "block_lists_sliding_window": lambda: mask_compilations("sm_90", make("sliding_window")[1])["lists"].spec,
}


@pytest.mark.parametrize("name", GOLDEN)
def test_print_is_unchanged(name, request):
    path = FOLDER / f"{name}.{'cpp' if name.startswith('cpu') else 'py'}"
    text = render(GOLDEN[name]())
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    committed = path.read_text(encoding="utf-8") if path.exists() else ""
    diff = list(difflib.unified_diff(committed.splitlines(), text.splitlines(), f"generated/{path.name}", "printed now", lineterm="", n=1))
    if diff or text != committed:
        pytest.fail(
            "\n".join(["the print has changed. If it should: `make golden`, and read the diff of generated/.", *diff[:60]]), pytrace=False
        )


def test_nothing_else_is_committed():
    assert {f.stem for f in FOLDER.iterdir() if f.suffix in (".py", ".cpp")} == set(GOLDEN)
    assert len(GOLDEN) <= 10


@pytest.mark.parametrize("name", GOLDEN)
def test_print_names_no_machine(name):
    """Comments lead to the user's mod by a path inside the repository."""
    text = render(GOLDEN[name]())
    assert str(FOLDER.parent) not in text
    if "_mod: " in text:
        assert re.search("(#|//) mods/", text)


def added(plain, shifted) -> list[str]:
    """The lines of a kernel with shifts that differ from those without, but for the docstring and what hands arguments on."""
    before, after = (re.sub(r'"""(.|\n)*?"""', "", render(c.spec), count=1).splitlines() for c in (plain, shifted))
    lines = [line[1:].strip() for line in difflib.unified_diff(before, after, lineterm="", n=0) if re.match(r"\+(?!\+\+)", line)]
    return [line for line in lines if not line.endswith(",")]


def test_blocks_elsewhere_cost_two_numbers():
    """ALiBi in blocks that lie in a longer sequence is ALiBi, beside a number for the tile and one for each block that it visits."""
    mods = make("alibi", "causal")
    found = added(hopper_compilation("sm_90", *mods), hopper_compilation("sm_90", *mods, shifted=True))
    assert found[:2] == ["NUMBERS = gl.constexpr(6)", "SHIFT = gl.constexpr(5)"]
    assert found[2:11] == [
        "shift = gl.load(q_shifts + q_block * BLOCK_M // 128) * 128",
        "hand_out(shared.tiles, turn, SHIFT, shift)",
        "hand_out(shared.tiles, turn, SHIFT, shift)",  # of a tile that visits nothing
        "shift = handed_out(shared.tiles, turn, SHIFT)",
        "first_m = q_block * BLOCK_M + shift",
        "end_m = Q_LEN + shift",
        "offs_m = first_m + CONSUMER * 64 + gl.arange(0, 64, layout=QUERIES)",
        "rows = gl.minimum(offs_m, end_m - 1)  # [64]; padding rows repeat the last one and are not stored",
        "upper_m = gl.minimum(first_m + CONSUMER * 64 + upper // 8 * 16 + upper % 8, end_m - 1)",
    ]
    block = [
        "kv_shift = gl.load(kv_shifts + block)  # in blocks; used late, so that nothing waits",
        "first_n = start_n + kv_shift * 128",
        "end_n = KV_LEN + kv_shift * 128",
    ]
    assert found[11:] == 3 * block  # of the partial blocks, the one that fills the pipeline, and the full ones
    assert added(compilation("sm_90", *mods), compilation("sm_90", *mods, shifted=True)) == [
        "n = (offs_n + kv_shift)[None, :]",
        "end_n = KV_LEN + kv_shift",
        "kv_shift = tl.load(kv_shifts + block) * 128",
        "kv_shift = tl.load(kv_shifts + block) * 128  # the next block's",
        "q_shift = tl.load(q_shifts + q_block * BLOCK_M // 128) * 128",
        "# [BLOCK_M, 1]; padding rows repeat the last one and are not stored",
        "m = (tl.minimum(offs_m, Q_LEN - 1) + q_shift)[:, None]",
    ]


MLA = dict(head_dim=192, head_dim_v=128)
STARTS = Blocks(True, 128, 128, starts=True)
SHIFTED = Blocks(True, 128, 128, shifted=True)
OTHERS = {  # branches of the templates that the prints in generated/ do not have
    "forward, packed": lambda: compilation("sm_90", *make("alibi", "document"), head_dim=80, starts=True, output_rows=True),
    "forward, blocks elsewhere": lambda: compilation("sm_90", *make("alibi", "document"), shifted=True),
    "forward, any strides": lambda: compilation("sm_90", *make("softcap"), transposed=True, output_max=True),
    "combine": lambda: decode_compilations("sm_90", *make("softcap"), head_dim=80)["combine"],
    "decode, lists": lambda: decode_compilations("sm_90", *make("softcap", "causal"), kv_dtype="float8_e4m3fn", ragged=True)["decode"],
    "copy_blocks": lambda: exchange_compilations("sm_90", d_v=80)["copy_blocks"],
    "add_blocks": lambda: exchange_compilations("sm_90", d_v=80)["add_blocks"],
    "delta": lambda: backward_compilations("sm_90", *make("causal"))["delta"],
    "dkv": lambda: backward_compilations("sm_90", *make("alibi", "document"), captured=True, starts=True)["dkv"],
    "dq": lambda: backward_compilations("sm_90", *make("relative_bias", "causal"), interior=False, whole=False)["dq"],
    "hopper decode, pages": lambda: hopper_decode_compilation(*make("alibi"), **LATENT, page_size=64, lengths=True, balanced=True),
    "hopper decode, lists": lambda: hopper_decode_compilation(
        *make("softcap", "causal"), **LATENT, page_size=16, lengths=True, ragged=True
    ),
    "hopper decode, one part": lambda: hopper_decode_compilation(
        *make("causal"), head_dim=320, head_dim_v=256, split=False, output_max=True
    ),
    "hopper, distances": lambda: hopper_compilation("sm_90", *make("t5_bias", "document"), output_rows=True),
    "hopper, three consumers": lambda: hopper_compilation("sm_90", head_dim=64, dtype="float16"),
    "hopper, slices": lambda: hopper_compilation("sm_90", *make("softcap", "causal"), **MLA),
    "hopper, packed": lambda: hopper_compilation("sm_90", *make("alibi", "document"), starts=True, output_max=True),
    "hopper, blocks elsewhere": lambda: hopper_compilation("sm_90", *make("t5_bias", "document"), shifted=True),
    "hopper, pages": lambda: hopper_compilation("sm_90", *make("alibi", "causal"), starts=True, cache=Cache(64, offsets=True)),
    "hopper, entries": lambda: hopper_compilation("sm_90", *make("causal"), **MLA, starts=True, cache=Cache(located=True)),
    "hopper backward": lambda: hopper_backward_compilations(*make("softcap", "document"), head_dim=64)["fused"],
    "hopper backward, captured": lambda: hopper_backward_compilations(*make("relative_bias"), head_dim=64, captured=True)["fused"],
    "hopper backward, packed": lambda: hopper_backward_compilations(*make("alibi", "document"), captured=True, blocks=STARTS)["fused"],
    "dkv, blocks elsewhere": lambda: backward_compilations("sm_90", *make("alibi", "document"), captured=True, shifted=True)["dkv"],
    "dq, blocks elsewhere": lambda: backward_compilations("sm_90", *make("softcap", "document"), whole=False, shifted=True)["dq"],
    "hopper backward, blocks elsewhere": lambda: hopper_backward_compilations(*make("alibi", "document"), blocks=SHIFTED)["fused"],
    "hopper backward, slices": lambda: hopper_backward_compilations(*make("softcap", "causal"), **MLA, blocks=STARTS)["fused"],
    "hopper backward, twice": lambda: hopper_backward_compilations(*make("softcap", "causal"), head_dim=160, blocks=STARTS)["fused"],
    "hopper backward, wide": lambda: hopper_backward_compilations(*make("softcap", "causal"), head_dim=256)["fused"],
    "hopper backward, delta": lambda: hopper_backward_compilations(*make("causal"))["delta"],
    "tangent": lambda: tangent_compilations("sm_90", *make("softcap", "document"), starts=True)["tangent"],
    "tangent, dkv": lambda: tangent_compilations("sm_90", *make("alibi", "causal"), captured=True, shifted=True)["dkv"],
    "tangent, dq": lambda: tangent_compilations("sm_90", *make("relative_bias", "document"), captured=True, starts=True)["dq"],
    "status": lambda: mask_compilations("sm_90", make("causal")[1], (48, 80), starts=True)["status"],
    "lists": lambda: mask_compilations("sm_90", make("document")[1], starts=True)["transposed_lists"],
    "zones": lambda: mask_compilations("sm_90", make("document")[1], starts=True)["zones"],
    "lists of a status": lambda: block_lists_compilation("sm_90", starts=True),
    "starts": lambda: block_starts_compilation("sm_90", sequences=True),
    "dense mask": lambda: dense_mask_compilation("sm_90", make("document")[1]),
    "evaluate": lambda: evaluate_compilation("sm_90", make("softcap")[0]),
    "rows over a cache": lambda: cached_statistics_compilations(
        "sm_90", *make("alibi", "causal"), ragged=True, by_tokens=True, page_size=64, kv_dtype="float8_e4m3fn"
    )["rows"],
    "columns over a cache": lambda: cached_statistics_compilations("sm_90", *make("alibi", "causal"), ragged=True, located=True)["columns"],
    "row statistics": lambda: statistics_compilations("sm_90", *make("alibi", "document"), head_dim=80)["rows"],
    "column sums": lambda: statistics_compilations("sm_90", *make("relative_bias", "causal"), transposed=True)["columns"],
    "as bfloat16": lambda: as_bfloat16_compilation("sm_90"),
    "values by keys": lambda: values_by_keys_compilation("sm_90", 80),
    "merge parts": lambda: merge_parts_compilation("sm_90", d_v=80),
    "shared tiles": lambda: shared_tiles_compilation("sm_90"),
    "shared tables": lambda: shared_tables_compilation("sm_90", ragged=True, offsets=True),
    "update cache": lambda: update_cache_compilation("sm_90", cache_dtype="float8_e4m3fn"),
}


UPDATE = UpdateCase(torch.bfloat16, 128, 128, ragged=True, page_size=16, kv_dtype=torch.float8_e4m3fn, scales=True, rope_dim=64)
IN_CPP = {
    **cpu_specs(*make("alibi", "document"), dtype="float16", starts=True, captured=True, output_max=True, output_rows=True),
    "plain": cpu_specs(dtype="float32", head_dim=64)["decode"],
    **{f"{name} with extras": spec for name, spec in cpu_specs(extras=Extras("float32", "packed"), captured=True).items()},
    **{f"{name} of a mask": spec for name, spec in cpu_mask_specs(make("document")[1], starts=True).items()},
    "update": cpu_update_spec(UPDATE),
}


@pytest.mark.parametrize("name", IN_CPP)
def test_print_in_cpp_reads_well(name):
    """No line has a blank end, or is longer than others, but for the user's; no two blank lines follow one another, or begin a function."""
    lines = render(IN_CPP[name]).splitlines()
    users = re.compile(r" *(// |const auto )")
    assert [line for line in lines if line != line.rstrip() or (len(line) > 150 and not users.match(line))] == []
    assert not [
        one
        for one, other in zip(lines, lines[1:], strict=False)
        if not one and not other or one.endswith("{") and not other and one[0] == " "
    ]


def blemishes(text: str) -> list[str]:
    """What a reader of a kernel should not meet, line by line. A statement of the user's may be long."""
    found = []
    for line in text.splitlines():
        comment = re.search(r"(^|  ) *# ", line)
        copied = re.fullmatch(r" *(\w+) = (\w+)_\d+", line)
        users = re.match(r" *(# \S+\.py:\d+: |(score|mask|verdict|distance)(_\d+)? = )", line)
        is_long = len(line) > (120 if comment else 140) and not users
        if line != line.rstrip() or is_long or (copied and copied[1] == copied[2]):
            found.append(line)
    found += re.findall(r"\n{4,}(.*)", text)  # more than two blank lines,
    found += re.findall(r"\n{3}( .*)", text)  # or two inside a function,
    found += re.findall(r"(?<!\n\n)\n(@.*)", text)  # or fewer before one
    return found


@pytest.mark.parametrize("name", [*(name for name in GOLDEN if not name.startswith("cpu")), *OTHERS])
def test_print_reads_well(name):
    assert blemishes(render(GOLDEN[name]() if name in GOLDEN else OTHERS[name]().spec)) == []


@pytest.mark.parametrize("name", [*GOLDEN, *OTHERS, *IN_CPP])
def test_a_kernel_has_one_name_in_all_processes(name):
    """That of the note that leads to its print is made of what the spec says, and a set says it in another order each time."""
    spec = GOLDEN[name]() if name in GOLDEN else IN_CPP[name] if name in IN_CPP else OTHERS[name]().spec
    assert not re.search(r"set\(\{|[^r\"]\{'| at 0x", repr(spec))


def test_every_template_is_read():
    printed = {(GOLDEN[name]() if name in GOLDEN else OTHERS[name]().spec).template for name in [*GOLDEN, *OTHERS]}
    printed |= {spec.template for spec in IN_CPP.values()}
    assert printed == {path.name.split(".")[0] for path in TEMPLATES.iterdir() if path.name.endswith((".py.jinja", ".cpp.jinja"))}


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.name)
def test_template_reads_well(path):
    """It is short, opens with its kernel and not with definitions, and puts code together from names, not from pieces of text."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 450
    opening = re.split(r"^(?!\{|\s|$)", text, maxsplit=1, flags=re.M)[0]
    assert opening.count("{% set ") <= 15
    code = re.findall(r"\{[{%].*?[}%]\}", text, re.S)
    assert not [piece for piece in code if re.search(r"replace|\[-?\d*:|\[:", re.sub(r'"[^"]*"|\'[^\']*\'', "", piece))]
