"""The examples run, and what their pages quote is what is printed."""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flexpress
from support.engines import engine, example

ROOT = Path(__file__).parent.parent


def test_minimal_runs():
    done = subprocess.run([sys.executable, "examples/minimal.py"], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "=== manual attention ===" in done.stdout and "=== flexpress ===" in done.stdout
    assert float(re.search(r"largest difference (\S+)", done.stdout)[1]) < 1e-5
    printed = Path(done.stdout.splitlines()[-1]).read_text(encoding="utf-8")
    committed = (ROOT / "generated" / "forward_plain_d64_fp32.py").read_text(encoding="utf-8")
    assert printed == committed, "examples/minimal.md explains another kernel than the one that ran"


def quoted_lines(page: Path) -> list[str]:
    """The lines of code in a page's python fences."""
    fences = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [line for fence in fences for line in fence.splitlines() if line.strip()]


def code_lines(kernel: str) -> list[str]:
    """The lines of a kernel that are neither blank nor comments nor docstrings."""
    lines = kernel.splitlines()
    for node in ast.walk(ast.parse(kernel)):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def matches(quoted: str, line: str) -> bool:
    """Is `line` what is quoted? A quotation may end in `...`."""
    return line.startswith(quoted[:-3]) if quoted.endswith("...") else line == quoted


@pytest.mark.parametrize("page, kernel", [("minimal.md", "forward_plain_d64_fp32.py")])
def test_page_quotes_the_printed_kernel(page, kernel):
    printed = code_lines((ROOT / "generated" / kernel).read_text(encoding="utf-8"))
    quoted = quoted_lines(ROOT / "examples" / page)
    stale = [q for q in quoted if not any(matches(q, line) for line in printed)]
    if stale:
        text = "\n".join(stale)
        pytest.fail(f"examples/{page} quotes what generated/{kernel} no longer has:\n{text}", pytrace=False)
    missing = [line for line in printed if not any(matches(q, line) for q in quoted)]
    if missing:
        text = "\n".join(missing)
        pytest.fail(f"examples/{page} does not explain what generated/{kernel} has:\n{text}", pytrace=False)


def test_the_engine_makes_the_tokens_of_the_dense_model():
    """In the interpreter, and one token after another; test_engine.py has the rest."""
    parts = engine()
    model = parts.Llama.random(parts.Config(num_attention_heads=2, num_key_value_heads=1), 1)
    draw, attend = random.Random(2), parts.dense_attention(model.config)
    lengths = [(19, 3), (1, 5), (8, 1), (3, 4), (20, 2)]  # pages of 8: the first three fill 5 of 6, the others wait
    requests = [parts.Request([draw.randrange(256) for _ in range(n)], new) for n, new in lengths]
    server = parts.Engine(model, num_pages=6, page_size=8, chunk=6)
    server.run(requests)
    assert server.steps_waited > 0 and server.peak_pages <= 6
    exact = model.to(dtype=torch.float64)
    for r in requests:
        tokens = list(r.prompt)
        for _ in range(r.wanted):
            tokens.append(int(exact.logits(torch.tensor(tokens), torch.tensor([-1]), attend)[0].argmax()))
        assert r.prompt + r.made == tokens and parts.wrong_tokens(model, r) == 0


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, {"rope_theta": 500000.0, "head_dim": 16}),
        ({"head_dim": 32}, {"head_dim": 32}),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 4}),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}},
            {"scaling": flexpress.Llama3Scaling(8.0, 64)},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, {"scaling": flexpress.YarnScaling(4.0, 128), "rope_theta": 500000.0}),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, {"scaling": flexpress.Llama3Scaling(8.0, 128)}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": None}, "original_max_position_embeddings": 32},
            {"scaling": flexpress.YarnScaling(4.0, 32)},
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, None),
        ({"hidden_act": "gelu"}, None),
    ],
)
def test_generate_reads_configs(tmp_path, change, expected):
    given = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": None,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "vocab_size": 100,
        "bos_token_id": 1,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(given | change))
    read = engine().Config.read
    if expected is None:
        with pytest.raises(ValueError, match="this example knows neither"):
            read(str(tmp_path / "config.json"))
    else:
        config = read(str(tmp_path / "config.json"))
        assert config.rms_norm_eps == 1e-6 and {name: getattr(config, name) for name in expected} == expected


SCALED = [
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 7.0, "original_max_position_embeddings": 64},
]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        *({"rope_theta": 5.0, "rope_parameters": rope} for rope in SCALED),
        *({"rope_theta": 5.0, "rope_scaling": rope} for rope in SCALED),
        *({"original_max_position_embeddings": 32, "rope_scaling": rope} for rope in SCALED),
        {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_scaling": SCALED[0]},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_configs_are_read_as_transformers_reads_them(change):
    """Angles of RoPE, and all else that a config may leave out."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    given, config = LlamaConfig(**copy.deepcopy(LLAMA | change)), engine().Config.of(LLAMA | change)
    for name in ("head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(given, name), name
    rope, length = LlamaRotaryEmbedding(given), 50
    angles = torch.arange(length)[:, None] * rope.inv_freq
    table = flexpress.rope_table(length, config.head_dim, config.rope_theta, scaling=config.scaling)
    expected = torch.stack([angles.cos(), angles.sin()], -1) * rope.attention_scaling
    assert torch.allclose(table, expected, atol=1e-5)


@pytest.mark.parametrize(
    "change, words",
    [
        *(({name: None}, f"the config's {name} is None") for name in ("num_attention_heads", "hidden_size", "vocab_size")),
        ({"num_attention_heads": 0}, "the config's num_attention_heads is 0; it must be a whole number of at least 1"),
        ({"num_attention_heads": 7}, "hidden_size 64 must be a multiple of its num_attention_heads 7"),
        ({"num_key_value_heads": 3}, "that one of its num_key_value_heads 3"),
        ({"rope_scaling": {"type": "yarn"}}, "the config has no factor for RoPE of type 'yarn'"),
        ({"rope_scaling": SCALED[0], "max_position_embeddings": None}, "the config has no original_max_position_embeddings for RoPE"),
        ({"rope_scaling": SCALED[0], "partial_rotary_factor": 0.5}, "this example knows no partial_rotary_factor of RoPE of type 'yarn'"),
    ],
)
def test_configs_that_lack_something(change, words):
    given = {name: value for name, value in (LLAMA | change).items() if value is not None}
    with pytest.raises(ValueError, match=words):
        engine().Config.of(given)


def test_other_models_are_refused():
    """Granite's weights have a Llama's names and shapes, and what it computes has factors."""
    with pytest.raises(ValueError, match="Llamas alone, and the config's model_type is 'granite'"):
        engine().Config.of({"model_type": "granite", "num_attention_heads": 4, "hidden_size": 64})


def test_generate_runs():
    options = "--requests 2 --systems 1 --system 9 --prompt 9 --new 3 --draft 3 --float8 --page-size 4 --rate 1000"
    command = [sys.executable, "examples/generate.py", *options.split(" ")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("requests lost", "tokens unlike float64, dense"):
        assert re.search(rf"^{name} +0$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("name", ["requests", "new", "prompt", "page-size", "chunk", "pages", "sequences"])
def test_generate_refuses_counts_of_nothing(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate.py", f"--{name}", "0"])
    with pytest.raises(SystemExit, match="2"):
        example("generate").arguments()
    assert f"argument --{name}: '0' is no whole number of at least 1" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["generate.py", f"--{name}", "1", "--systems", "0", "--draft", "0"])
    assert getattr(example("generate").arguments(), name.replace("-", "_")) == 1


def test_generate_reads_weights(tmp_path):
    """Of safetensors files, by Hugging Face's names."""
    from safetensors.torch import save_file

    config = engine().Config(num_hidden_layers=1)
    weights = {name: torch.randn(shape) for name, shape in config.weight_shapes().items()}
    save_file(weights, tmp_path / "model.safetensors")
    model = example("generate").read(config, [tmp_path / "model.safetensors"])
    assert torch.equal(model.layers[0].qkv[64:96], weights["model.layers.0.self_attn.k_proj.weight"])
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match="the weights are not those of the config: .*model.norm.weight"):
        engine().Llama.of(config, weights)


@pytest.mark.parametrize("name", ["generate", "embeddings", "smollm2"])
def test_page_quotes_its_program(name):
    program = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    if name == "generate":
        program += [line for part in (ROOT / "examples" / "engine").glob("*.py") for line in part.read_text(encoding="utf-8").splitlines()]
    stale = [line for line in quoted_lines(ROOT / "examples" / f"{name}.md") if line not in program]
    assert not stale, f"examples/{name}.md quotes what examples/{name}.py no longer has:\n" + "\n".join(stale)
