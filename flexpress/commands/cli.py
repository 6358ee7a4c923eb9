"""The command line: `python -m flexpress demo`, `render`, `export`, `doctor` and `cache`."""

from __future__ import annotations

import argparse
import os
import sys

from flexpress import __version__
from flexpress.commands.recipes import HEADS, LENGTH, RECIPES, make
from flexpress.exporting.exported_files import LAYOUTS

from ..codegen.mod.tracing.bind import bind
from ..codegen.run.imagined import TARGETS
from ..codegen.run.preview import compilation, cpu_specs, hopper_compilation
from ..codegen.text.render import render

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", **{n: n for n in ("float16", "bfloat16", "float32")}}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Exit codes: 0 all went well, 1 a check failed, 2 wrong arguments."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show the picture still shows the figures
    try:
        return given.run(given, parser)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flexpress",
        description="Attention kernels printed from Python functions.",
        epilog="Printed kernels lie in $FLEXPRESS_CACHE_DIR, by default ~/.cache/flexpress.",
    )
    parser.add_argument("--version", action="version", version=f"flexpress {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="demo | render | export | doctor | cache")

    demo = commands.add_parser(
        "demo",
        help="ALiBi and a sliding window: the mask as a picture, the error, the time",
        description="Runs ALiBi attention under a sliding window, on a GPU if there is one and else "
        "on the CPU. Prints the block mask, the error against float64 beside plain attention's "
        "in the same dtype, the time and the printed kernels. Exit code 1 if the error is too large.",
    )
    demo.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    demo.set_defaults(run=_demo)

    named = "\n".join(f"  {name:15} {recipe.example}" for name, recipe in RECIPES.items())
    show = commands.add_parser(
        "render",
        help="print the forward kernel of a recipe",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Prints the forward kernel that a call with a recipe gets on the target, at 4096 positions,\n"
        "without running it: on sm_90 the kernel for Hopper where it serves, on cpu the one in C++. Several recipes are combined:\n"
        "score mods one after the other, masks by `and`.",
        epilog=f"recipes:\n{named}\n\nexample:\n  python -m flexpress render alibi causal --head-dim 64 --target sm_80",
    )
    _add_problem(show)
    show.add_argument("--target", choices=TARGETS, default="sm_90", metavar="TARGET", help=f"one of {', '.join(TARGETS)}; default sm_90")
    family = show.add_mutually_exclusive_group()
    family.add_argument(
        "--portable",
        action="store_true",
        help="the portable kernel, where calls on sm_90 get the one for Hopper, and on cpu the one in C++",
    )
    family.add_argument("--no-tma", action="store_true", help="the portable kernel that loads K and V by pointers, on sm_90 and sm_100 too")
    family.add_argument("--gluon", action="store_true", help="the kernel for Hopper, or an error where it does not serve")
    show.set_defaults(run=_render)

    _add_export(commands, named)
    doctor = commands.add_parser(
        "doctor",
        help="check what this machine can run",
        description="Checks versions, GPUs, the cache directory, the compilers and the interpreter. "
        "Exit code 1 if something that this machine needs does not work.",
    )
    doctor.set_defaults(run=_doctor)
    _add_cache(commands)
    return parser


def _add_export(commands, named: str) -> None:
    """The command export; `named` lists the recipes."""
    own = commands.add_parser(
        "export",
        help="write the kernels of a recipe as a file that needs torch and triton, or a C++ compiler, alone",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Writes a Python file with the kernels of a recipe, a function that checks its arguments and launches\n"
        "them, and a comparison with dense attention: see flexpress.export.",
        epilog=f"recipes:\n{named}\n\nexample:\n  python -m flexpress export alibi sliding_window --backward -o windowed.py",
    )
    _add_problem(own)
    own.add_argument("--target", choices=TARGETS, default="sm_90", metavar="TARGET", help=f"one of {', '.join(TARGETS)}; default sm_90")
    own.add_argument("--heads", type=_heads, default=(HEADS, HEADS), metavar="H", help=f"heads, or Hq:Hkv as in 32:8; default {HEADS}")
    own.add_argument(
        "--portable",
        action="store_true",
        help="leave the kernels for Hopper out, which a file for sm_90 has, too, if it is not for a cache",
    )
    own.add_argument("--sinks", action="store_true", help="with a learned logit for each query head in the softmax's denominator, float32")
    kind = own.add_mutually_exclusive_group()
    kind.add_argument("--backward", action="store_true", help="with the kernels for gradients, of captured tensors and sinks, too")
    kind.add_argument("--page-size", type=_page_size, metavar="N", help="one query a sequence against a cache in pages of N positions")
    own.add_argument("-o", "--output", required=True, metavar="PATH", help="the file, or with --layout kernels a folder")
    own.add_argument("--layout", choices=LAYOUTS, default="file", help="kernels: the layout of Hugging Face's package kernels")
    own.add_argument("--overwrite", action="store_true", help="replace what is there")
    own.set_defaults(run=_export)


def _add_cache(commands) -> None:
    cache = commands.add_parser(
        "cache",
        help="list, show, clear or measure the folder of kernels",
        description="The folder of printed and compiled kernels: $FLEXPRESS_CACHE_DIR, by default ~/.cache/flexpress. It holds at most "
        "$FLEXPRESS_CACHE_MIB MiB, by default 1024: what was unused longest goes first.",
    )
    actions = cache.add_subparsers(title="actions", required=True, metavar="list | show | clear | size")
    actions.add_parser("list", help="a line for each kernel: what it is, of which mods, how large and old").set_defaults(action="list")
    show = actions.add_parser("show", help="print one")
    show.add_argument("name", metavar="NAME", help="its name in the list, or a part that no other has")
    show.set_defaults(action="show")
    actions.add_parser("clear", help="remove all of them, without a question").set_defaults(action="clear")
    actions.add_parser("size", help="how much the folder holds, and may hold").set_defaults(action="size")
    cache.set_defaults(run=_cache)


def _add_problem(parser: argparse.ArgumentParser) -> None:
    """Recipes, dtype and head dims."""
    parser.add_argument("recipe", nargs="+", choices=tuple(RECIPES), metavar="RECIPE", help="one or more of the names below")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="bf16", metavar="DTYPE", help="bf16 (default), fp16 or fp32")
    parser.add_argument(
        "--head-dim",
        type=_head_dim,
        default=(128, 128),
        metavar="D",
        help="head dim, 1 to 512, or D_QKxD_V as in 192x128, D_QK up to 576; default 128",
    )


_MOST = 1 << 16  # heads, and positions of a page: the tensors of the example are made


def _heads(text: str) -> tuple[int, int]:
    """ "16" or "32:8" as (Hq, Hkv)."""
    parts = [int(part) for part in text.split(":") if part.isdecimal() and int(part)]
    if len(parts) != text.count(":") + 1 or len(parts) > 2 or parts[0] % parts[-1] or parts[0] > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} are no heads: write a number, or Hq:Hkv of which the first is a multiple of the second")
    return parts[0], parts[-1]


def _page_size(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of a page: write a whole number from 1 to {_MOST}")
    return int(text)


def _head_dim(text: str) -> tuple[int, int]:
    """ "128" or "192x128" as (D_QK, D_V)."""
    from flexpress.inputs.checks import MAX_HEAD_DIM, MAX_HEAD_DIM_QK

    parts = text.split("x")
    dims = tuple(int(p) for p in parts if p.isdecimal())
    if len(dims) != len(parts) or len(dims) not in (1, 2) or not (1 <= dims[0] <= MAX_HEAD_DIM_QK and 1 <= dims[-1] <= MAX_HEAD_DIM):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a head dim: write 1 to {MAX_HEAD_DIM}, or two of them as in 192x128, of which the first is at most "
            f"{MAX_HEAD_DIM_QK}"
        )
    return dims[0], dims[-1]


def _demo(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import torch

    from flexpress.commands.demo import demo

    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; leave the option out to run on the CPU")
    return demo(given.device)


def _render(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    problem = (given.target, *make(*given.recipe), _DTYPES[given.dtype], *given.head_dim)
    kernel = None
    if given.gluon or (given.target == "sm_90" and not given.portable and not given.no_tma):
        try:
            kernel = hopper_compilation(*problem)
        except ValueError as error:
            if given.gluon:
                parser.error(f"--gluon: {error}")
    spec = kernel and kernel.spec
    if given.target == "cpu" and not given.portable and not given.no_tma:
        spec = cpu_specs(*problem[1:])["forward"]
    spec = spec or compilation(*problem, use_tma=False if given.no_tma else None).spec
    sys.stdout.write(render(spec))
    sys.stdout.flush()
    return 0


def _cache(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from flexpress.commands import cache_command

    if given.action == "show":
        return cache_command.show(given.name)
    return {"list": cache_command.list_kernels, "clear": cache_command.clear, "size": cache_command.size}[given.action]()


def _export(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import torch

    from flexpress.exporting.export import export
    from flexpress.exporting.export_cached import export_cached

    if given.portable and given.target == "cpu":
        parser.error("--portable leaves kernels for Hopper out, and a file for --target cpu has none; leave --portable out")
    score_mod, mask_mod = make(*given.recipe, heads=given.heads[0])
    (Hq, Hkv), (d_qk, d_v), dtype = given.heads, given.head_dim, getattr(torch, _DTYPES[given.dtype])
    details = {"target": given.target, "path": given.output, "layout": given.layout, "overwrite": given.overwrite}
    try:
        if given.page_size is not None:
            q, (pages, n) = torch.empty(2, Hq, 1, d_qk, dtype=dtype), (8, 4)
            k, v = (torch.empty(pages, given.page_size, Hkv, d, dtype=dtype) for d in (d_qk, d_v))
            table, kv_len = torch.zeros(2, n, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
            details["sinks"] = torch.zeros(Hq) if given.sinks else None
            export_cached(q, k, v, kv_len, page_table=table, score_mod=score_mod, mask_mod=mask_mod, **details)
        else:
            shapes = ((2, Hq, LENGTH, d_qk), (2, Hkv, LENGTH, d_qk), (2, Hkv, LENGTH, d_v))
            q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
            if given.backward and score_mod is not None:
                for tensor in (t for t in bind(score_mod, "score")[1] if isinstance(t, torch.Tensor) and t.is_floating_point()):
                    tensor.requires_grad_()
            details["sinks"] = torch.zeros(Hq, device="meta", requires_grad=given.backward) if given.sinks else None
            details["kernel_options"] = {"BACKEND": "PORTABLE"} if given.portable else None
            export(q, k, v, score_mod, enable_gqa=Hq != Hkv, mask_mod=mask_mod, backward=given.backward, **details)
    except FileExistsError as error:
        parser.error(str(error).replace("overwrite=True", "--overwrite"))
    except (ValueError, NotImplementedError, OSError) as error:
        parser.error(str(error).replace("pass backward=False", "leave --backward out"))
    print(given.output)
    return 0


def _doctor(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from flexpress.commands.doctor import doctor

    return doctor()
