"""The examples run, and what their pages quote is what is printed."""

from __future__ import annotations

import ast
import importlib.util
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


def generate():
    """examples/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "examples" / "generate.py")
    module = sys.modules["generate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def served(example, config, lengths, dtype, **limits):
    """A random model, its Generator after all requests of `lengths` (prompt, new), and these."""
    model = example.make_model(config, [], 1, "cuda" if torch.cuda.is_available() else "cpu", dtype)
    draw = random.Random(2)
    requests = [example.Request([draw.randrange(config.vocab_size) for _ in range(n)], new) for n, new in lengths]
    generator = example.Generator(model, **limits)
    generator.run(requests)
    assert [len(r.made) for r in requests] == [new for _, new in lengths]
    assert generator.pool.free_pages == generator.pool.num_pages
    return model, generator, requests


def test_generate_makes_the_tokens_of_the_dense_model():
    example = generate()
    config = example.Config(num_attention_heads=2, num_key_value_heads=1)
    lengths = [(19, 3), (1, 5), (8, 1), (3, 4), (20, 2)]  # pages of 8: the first three fill 5 of 6, the others wait
    model, generator, requests = served(example, config, lengths, torch.float32, num_pages=6, page_size=8, chunk=6)
    assert generator.steps_waited > 0 and generator.peak_pages <= 6

    attend = example.dense_attention(config)
    exact = example.Llama(config, {name: weight.double() for name, weight in model.weights.items()})
    for r in requests:
        tokens = list(r.prompt)
        for _ in range(r.wanted):
            tokens.append(int(exact.logits(tokens, [-1], attend)[0].argmax()))
        assert r.prompt + r.made == tokens and example.wrong_tokens(model, r) == 0
    requests[1].made[2] = (requests[1].made[2] + 1) % config.vocab_size
    assert example.wrong_tokens(model, requests[1]) >= 1, "the check must see a wrong token"


def test_generate_refuses_a_request_that_never_fits():
    example = generate()
    model = example.make_model(example.Config(), [], 0, "cpu", torch.float32)
    with pytest.raises(flexpress.OutOfPages, match="3 pages are needed but 2 of 2 are free"):
        example.Generator(model, num_pages=2, page_size=4, chunk=4).run([example.Request([1, 2, 3], 6)])


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, {"rope_theta": 500000.0, "head_dim": 16}),
        ({"head_dim": 32}, {"head_dim": 32}),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 4}),
        ({"rope_scaling": {"rope_type": "llama3"}}, None),
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
    }
    (tmp_path / "config.json").write_text(json.dumps(given | change))
    read = generate().Config.read
    if expected is None:
        with pytest.raises(ValueError, match="this example knows neither"):
            read(str(tmp_path / "config.json"))
    else:
        config = read(str(tmp_path / "config.json"))
        assert config.rms_norm_eps == 1e-6 and {name: getattr(config, name) for name in expected} == expected


def test_generate_runs():
    done = subprocess.run(
        [sys.executable, "examples/generate.py", "--requests", "2", "--prompt", "9", "--new", "3", "--page-size", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^tokens unlike float64, dense +0$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generate_a_larger_model(dtype):
    example = generate()
    config = example.Config(4000, 512, 1024, 6, 8, 2, 64, tie_word_embeddings=True)
    lengths = [(1 + 97 * i % 700, 8 + 5 * i % 40) for i in range(24)]
    model, generator, requests = served(example, config, lengths, dtype, num_pages=40, page_size=64, chunk=256)
    assert generator.steps_waited > 0
    assert [example.wrong_tokens(model, r) for r in requests] == [0] * len(requests)


@pytest.mark.parametrize("name", ["generate", "embeddings", "smollm2"])
def test_page_quotes_its_program(name):
    program = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    stale = [line for line in quoted_lines(ROOT / "examples" / f"{name}.md") if line not in program]
    assert not stale, f"examples/{name}.md quotes what examples/{name}.py no longer has:\n" + "\n".join(stale)
