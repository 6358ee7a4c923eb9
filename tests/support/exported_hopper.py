"""The part for Hopper of an exported file on a CPU: its own launches, of its own text, in a stand-in for Gluon."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import torch

from support import fake_gluon


def gluon_text(path: Path) -> str:
    """What the file defines in Gluon."""
    text = path.read_text(encoding="utf-8")
    (block,) = (node for node in ast.parse(text).body if isinstance(node, ast.Try))
    lines = text.split("\n")[block.body[0].lineno - 1 : block.body[-1].end_lineno]
    return textwrap.dedent("\n".join(lines))


class StandIn:
    """In place of a HopperLaunch. `refused`: it is not to be used."""

    def __init__(self, launch, text: str, refused: bool = False) -> None:
        self.launch, self.text, self.refused, self.count = launch, text, refused, 0

    def __call__(self, grid: tuple[int, ...], *arguments) -> bool:
        if self.refused:
            return False
        self.count += 1
        found = [_plain(argument) for argument in arguments]
        fake_gluon.run(self.text, self.launch.kernel.__name__, tuple(found), grid[:1])
        return True


def _plain(argument):
    """An argument as the stand-in takes it."""
    if isinstance(argument, torch.Tensor):
        return argument.detach()
    if hasattr(argument, "block_shape"):
        return fake_gluon.Descriptor(argument.base.detach(), *argument.block_shape[2:])
    return argument


def pass_for_hopper(module, path: Path, multiprocessors: int = 3, refused: tuple[str, ...] = ()) -> dict[str, StandIn]:
    """Have a file's functions take the CPU for a Hopper GPU. Returns its kernels' stand-ins by name."""
    text, found = gluon_text(path), {}
    module.is_hopper, module.multiprocessors, module.FEW_KEYS = lambda _: True, lambda _: multiprocessors, 0
    for name in ("HOPPER_FORWARD", "HOPPER_FORWARD_WITH_ROWS", "HOPPER_BACKWARD", "HOPPER_BACKWARD_SCALED"):
        launch = getattr(module, name, None)
        if launch is not None:
            found[name] = StandIn(launch, text, name in refused)
            setattr(module, name, found[name])
    return found


def poisoned(monkeypatch) -> None:
    """Memory that a file takes without filling it is full of NaN."""
    for name in ("empty", "empty_strided"):
        plain = getattr(torch, name)

        def filled(*args, plain=plain, **options):
            made = plain(*args, **options)
            return made.fill_(float("nan") if made.is_floating_point() else -77)

        monkeypatch.setattr(torch, name, filled)
