"""docs/ten_minutes.py: it is what the page says, and runs where Flexpress has been installed, outside of the clone."""

from __future__ import annotations

import os
import re
import sys

import pytest

from support.devices import DEVICES
from support.package import ROOT, built_once, done, third_party, wheel_in

PAGE = (ROOT / "docs" / "ten_minutes.md").read_text(encoding="utf-8")
SCRIPT = (ROOT / "docs" / "ten_minutes.py").read_text(encoding="utf-8")


def test_the_script_is_the_page():
    """Step by step: the script has the page's code, below the page's headings."""
    steps = re.split(r"^## (\d+\. .+)$", PAGE, flags=re.MULTILINE)
    code = [
        f"# {title}\n\n" + "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
        for title, text in zip(steps[1::2], steps[2::2], strict=True)
    ]
    assert SCRIPT.partition('"""\n\n')[2] == "\n".join(code)
    assert [title.partition(".")[0] for title in steps[1::2]] == [str(n + 1) for n in range(len(code))]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> str:
    """A folder into which pip has installed the wheel."""
    folder = tmp_path_factory.mktemp("ten_minutes")
    wheel, site = wheel_in(built_once(tmp_path_factory)), folder / "site"
    done(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site), str(wheel))
    return str(site)


@pytest.mark.parametrize("device", DEVICES)
def test_the_script_runs_where_flexpress_is_installed(site, device, tmp_path):
    script = tmp_path / "ten_minutes.py"
    script.write_text(SCRIPT + "\nprint(flexpress.__file__)\n", encoding="utf-8")
    paths = os.pathsep.join([site, *third_party()])
    there = {"PYTHONPATH": paths, "FLEXPRESS_CACHE_DIR": str(tmp_path / "kernels"), "HF_HUB_OFFLINE": "1"}
    said = done(sys.executable, "-S", str(script), cwd=tmp_path, **there, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}))
    for words in (
        "██░░",
        "gradient of the slopes",
        "forward   ",
        "has the line: ",
        "refused: score_mod: torch.randn draws random",
        "generated: [",
    ):
        assert words in said
    assert said.splitlines()[-1].startswith(site) and (tmp_path / "mask.png").stat().st_size > 5000
    assert "def attention(" in (tmp_path / "nearby.py").read_text(encoding="utf-8")
