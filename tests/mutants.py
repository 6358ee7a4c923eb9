"""Mutants: would the tests notice? Each one is an error planted by hand in a copy of the tree; the tests beside it must fail.

    python tests/mutants.py                  all of them, some ten minutes on one core
    python tests/mutants.py --only 3 17      some, by number
    python tests/mutants.py --list           what there is

A mutant replaces a text that occurs once in its file. It is killed if pytest says that a test failed; an import that fails, no test, or a
process that ends otherwise are no proof, unless the mutant says so. First the same tests must pass on the copy as it is (--skip-base leaves
that out). Exit status 1 if a mutant survives or is not what it should be.
"""

# ruff: noqa: E501 (the texts that are replaced)

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 180  # of a mutant's tests, at most


class Mutant(NamedTuple):
    """An error: `old`, once in `file`, becomes `new`; `tests` (pytest's arguments) must fail; `breaks` says what is wrong then.

    ends   "crash" or "time-out" count as noticed, too
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    breaks: str
    ends: str = ""


def named(file: str, words: str = "") -> tuple[str, ...]:
    """Tests of a file, by words of their names."""
    return (f"tests/test_{file}.py", *(("-k", words) if words else ()))


CAPTURES = [
    Mutant(
        "codegen/mod/captured/program.py",
        "        self.guard(place, same_number(value) if isinstance(value, NUMBERS) else equal_to(value))\n",
        "",
        named("captures", "numbers_that_python_consumes"),
        "a number that Python used is not compared",
    ),
    Mutant(
        "codegen/mod/captured/program.py",
        'self.add(lambda values: values[place] is values[first], True, bool, f"{describe} is one tensor")',
        "pass",
        named("captures", "the_same_tensor_twice"),
        "two names of one tensor may become two tensors",
    ),
    Mutant(
        "codegen/mod/captured/program.py",
        "type(value) is int and -2147483648 <= value <= 2147483647",
        "type(value) is int",
        named("captures", "large_numbers"),
        "an argument of 32 bits gets a larger number",
    ),
    Mutant(
        "codegen/mod/captured/program.py",
        " and (kind is not float or math.copysign(1.0, value) == sign)",
        "",
        named("mutations", "percent"),
        "0.0 and -0.0 are the same",
    ),
    Mutant(
        "codegen/mod/captured/program.py",
        "return lambda value: value is member",
        "return lambda value: value == member",
        named("mutations", "enum"),
        "an IntEnum is the same as its number",
    ),
    Mutant(
        "codegen/mod/captured/program.py",
        "        and t.requires_grad == needs_grad\n",
        "",
        named("mutations", "requires or changed_value or tensors_are or training") + ("tests/test_captures.py", "tests/test_trace.py"),
        "whether a tensor wants a gradient is not compared",
    ),
    Mutant(
        "codegen/mod/captured/program.py",
        " and (not attributes or attributes.isdisjoint(t.__dict__)))",
        ")",
        named("mutations", "tensor_attribute or parameter_attribute"),
        "an attribute put on a tensor later is not seen",
    ),
    Mutant(
        "codegen/mod/captured/program.py",
        "and t.dtype is dtype and t.ndim == ndim",
        "and t.ndim == ndim",
        named("captures", "tensor") + ("tests/test_mutations.py",),
        "a tensor of another dtype finds the trace",
    ),
    Mutant(
        "codegen/mod/tracing/calls.py",
        "bool(module._forward_hooks or module._forward_pre_hooks or",
        "bool(module._forward_hooks or",
        named("mutations", "hooks"),
        "pre-hooks of a module are skipped",
    ),
    Mutant(
        "codegen/mod/tracing/capture.py",
        "(f.__code__ is code or f.__code__ == code)",
        "True",
        named("trace", "changed_code or another_function"),
        "a function with other code finds the trace",
    ),
    Mutant(
        "codegen/mod/tracing/capture.py",
        "all(name not in names and builtins.get",
        "all(builtins.get",
        named("trace", "builtin"),
        "a global that hides a builtin is not seen",
    ),
    Mutant(
        "codegen/mod/tracing/capture.py",
        'lambda values: values[place].__self__ is values[at], True, bool, f"{name} is its own method"',
        'lambda values: True, True, bool, f"{name} is its own method"',
        named("mutations", "method"),
        "a method of another object is called on this one",
    ),
    Mutant(
        "codegen/mod/tracing/capture.py",
        "expected, lambda found: found == expected,",
        "expected, lambda found: True,",
        named("mutations", "dict or keys"),
        "another set of keys finds the trace",
    ),
    Mutant(
        "codegen/mod/tracing/calls.py",
        "lambda values: function(values[left], values[right])",
        "lambda values: function(values[right], values[left])",
        named("captures", "arithmetic_on_captured"),
        "host arithmetic with its operands exchanged",
    ),
    Mutant(
        "codegen/mod/captured/audit.py",
        'return before is not None and before.opname == "LOAD_CONST" and before.argval is None',
        "return before is not None",
        named("mutations", "identity or is_of or type"),
        "`is` passes on stand-ins",
    ),
    Mutant(
        "codegen/mod/captured/audit.py",
        "refused = refused or inner.refused",
        "refused = refused or ''",
        named("mutations", "inside"),
        "functions inside a mod are not looked at",
    ),
    Mutant(
        "codegen/mod/captured/audit.py",
        "return instruction.argval not in code.co_freevars",
        "return True",
        named("mutations", "outer_function"),
        "nonlocal passes",
    ),
    Mutant(
        "codegen/mod/captured/audit.py",
        '(attributes & {"__class__", "__dict__", "__torch_function__"})',
        '(attributes & {"__dict__", "__torch_function__"})',
        named("mutations", "class_by_dunder or class_exchanged or name_of_the_class or (name and class)"),
        "__class__ is the stand-in's",
    ),
    Mutant(
        "codegen/mod/tracing/runs.py",
        "any(id(t) in written or t._version != version for t, version in foreign)",
        "any(id(t) in written for t, version in foreign)",
        named("captures", "may_not_change"),
        "writes that no name tells are not seen",
    ),
    Mutant(
        "codegen/mod/tracing/runs.py",
        "given = {_storage_of(a) for a in tensors_in((args, kwargs))} - set(self._own)",
        "given = set()",
        named("captures", "may_not_change"),
        "a view of a captured tensor counts as the mod's own",
    ),
    Mutant(
        "codegen/mod/tracing/runs.py",
        "return self.with_grad and not torch.is_grad_enabled()",
        "return False",
        named("trace", "without_grad"),
        "no_grad inside a mod is ignored",
    ),
    Mutant(
        "codegen/mod/current.py",
        "class _Thread(threading.local):",
        "class _Thread:",
        named("threads", "trace_side_by_side"),
        "threads share one trace",
    ),
    Mutant(
        "codegen/mod/tracing/runs.py",
        "if frame.f_code is _APPLY:",
        "if False:",
        named("mod_errors", "with_a_function or scores"),
        "an autograd.Function loses its backward silently",
    ),
    Mutant(
        "codegen/mod/tracing/runs.py",
        "in audited(f.f_code).numbers",
        "is not None",
        named("trace") + ("tests/test_mutations.py",),
        "at every call, each value of a number is a kernel",
    ),
    Mutant(
        "codegen/mod/graphs/known.py",
        "n.dtype, repr(n.attr), n.weak",
        "n.dtype, n.attr, n.weak",
        named("mutations", "both_signs"),
        "graphs with 0.0 and -0.0 are one",
    ),
    Mutant(
        "codegen/mod/tracing/bind.py",
        "else _code_of(mod), torch.get_default_dtype())\n    bucket",
        "else _code_of(mod))\n    bucket",
        named("mutations", "default_dtype"),
        "the default dtype is not compared",
    ),
    Mutant(
        "codegen/mod/tracing/bind.py",
        "    key = (kind, mod.__code__ if",
        "    key = (mod.__code__ if",
        named("trace", "two_kinds"),
        "a score_mod and a mask_mod of one function are one",
    ),
    Mutant(
        "codegen/mod/tracing/bind.py",
        "(traced, *bucket.traces[: _PER_BUCKET - 1])",
        "(traced,)",
        named("captures") + ("tests/test_trace.py", "tests/test_cache.py"),
        "two mods of one code take turns to be traced",
    ),
]

INTERVALS = [
    Mutant(
        "codegen/mod/table/ranges.py",
        "return (0, b[1] - 1) if b[0] > 0 else",
        "return (0, b[1] - 2) if b[0] > 0 else",
        named("ranges", "ranges_of_integers"),
        "the greatest remainder is left out",
    ),
    Mutant(
        "codegen/mod/table/rows_logic.py",
        "decided=lambda a, b, c, d: (b < c, a >= d),",
        "decided=lambda a, b, c, d: (b <= c, a >= d),",
        named("ranges", "ranges_of_integers"),
        "n < n is decided",
    ),
    Mutant(
        "codegen/mod/table/ranges.py",
        "if b[0] > 0 else (-most, most)",
        "if b[0] > 0 else (a[0], most)",
        named("ranges", "ranges_of_integers"),
        "quotients by -1 are left out",
    ),
    Mutant(
        "codegen/mod/graphs/bounds.py",
        "            return None  # anything may come of a division by 0",
        "            return ranges[0]",
        named("interval_rules", "divide or remainder or value_ranges or row") + ("tests/test_ranges.py",),
        "a division by 0 has bounds",
    ),
    Mutant(
        "codegen/mod/graphs/bounds.py",
        "return None  # it may be NaN",
        "pass",
        named("intervals", "roundings_and_narrow"),
        "a comparison with what may be NaN is decided",
    ),
    Mutant(
        "codegen/mod/graphs/intervals.py",
        "inside = (lo >= least) & (hi <= greatest)",
        "inside = lo >= least",
        named("interval_rules", "8_bits and (add or mul)"),
        "wrap-around at the upper end is not seen",
    ),
    Mutant(
        "codegen/mod/graphs/intervals.py",
        "return not axes[id(node)] and id(node) not in rounds",
        "return not axes[id(node)]",
        named("intervals", "other_roundings"),
        "what another kernel rounds otherwise is a point",
    ),
    Mutant(
        "codegen/mod/graphs/intervals.py",
        "(not floating or narrows or row_of",
        "(not floating or row_of",
        named("intervals", "zone or rounding"),
        "a zone ends in half precision, which jumps",
    ),
    Mutant(
        "codegen/mod/graphs/intervals.py",
        "        if rounds:\n",
        "        if False:\n",
        named("intervals", "other_roundings"),
        "a measured zone leaves no room for roundings",
    ),
    Mutant(
        "codegen/mod/table/interval_rules.py",
        "torch.where(x.lo >= 0, torch.where(y.lo >= 0, torch.minimum(x.hi, y.hi), x.hi), y.hi)",
        "torch.minimum(x.hi, y.hi)",
        named("interval_rules", "8_bits and and_"),
        "x & y is bounded by a negative y",
    ),
    Mutant(
        "codegen/mod/table/interval_rules.py",
        "(x.hi & ~y.lo) | (~x.lo & y.hi)\n    hi =",
        "(x.hi & ~y.lo)\n    hi =",
        named("interval_rules", "xor"),
        "a ^ b is thought false where only b is true",
    ),
    Mutant(
        "codegen/mod/table/interval_rules.py",
        "torch.where(x.hi <= 0, squares[1], zero)",
        "squares[1]",
        named("intervals", "squares"),
        "the square of an interval around 0 leaves out 0",
    ),
    Mutant(
        "codegen/mod/table/interval_rules.py",
        "lo = torch.where(x.lo >= 0, x.lo >> y.hi, x.lo >> y.lo)",
        "lo = x.lo >> y.lo",
        named("interval_rules", "rshift"),
        "x >> y for a y that varies",
    ),
    Mutant(
        "codegen/mod/table/interval_rules.py",
        "outward(*_turned(y.lo >= 0, x.lo * y.lo, x.hi * y.lo))",
        "outward(x.lo * y.lo, x.hi * y.lo)",
        named("interval_rules", "8_bits and mul"),
        "a product with a negative number turns the bounds around",
    ),
    Mutant(
        "codegen/mod/table/interval_rules.py",
        "return _finite(*unsure) if unsure else True",
        "return True",
        named("interval_rules", "row"),
        "NaN is not thought of",
    ),
    Mutant(
        "codegen/mod/table/interval_rules.py",
        "        must = must if one.is_point else must & (one.lo == one.hi)",
        "        must = must",
        named("interval_rules", "eq or ne"),
        "x == y where only their least values are equal",
    ),
]

CACHE = [
    Mutant(
        "codegen/device/folder.py",
        'os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)',
        "os.O_RDONLY",
        named("folder", "others_may_have_written"),
        "links are followed",
    ),
    Mutant(
        "codegen/device/folder.py",
        "or info.st_mode & _OTHERS_WRITE or info.st_uid",
        "or info.st_uid",
        named("folder", "others_may_have_written"),
        "files that others may write to are read",
    ),
    Mutant(
        "codegen/device/folder.py",
        " or info.st_uid != _user():\n                return None",
        ":\n                return None",
        named("folder", "others_may_have_written"),
        "files of others are read",
    ),
    Mutant(
        "codegen/device/folder.py",
        "if info.st_uid != _user() and not (shared and info.st_uid in (0, _UNMAPPED)):",
        "if False:",
        named("folder", "another_user"),
        "a folder of another user is used",
    ),
    Mutant(
        "codegen/device/folder.py",
        "not (shared and info.st_mode & stat.S_ISVTX)",
        "not shared",
        named("folder", "others_could_put"),
        "a folder below one that anybody may rename in is used",
    ),
    Mutant(
        "codegen/device/folder.py",
        "key=lambda group: max(file.used for file in group))",
        "key=lambda group: -max(file.used for file in group))",
        named("folder", "holds_so_much"),
        "what was used last goes first",
    ),
    Mutant("codegen/device/cache.py", '(versions + "\\n" + text)', "text", named("folder", "another_version"), "the key has no versions"),
    Mutant(
        "codegen/device/cache.py",
        'if place and hashlib.sha256(content).hexdigest() == note["sha256"]:',
        "if place:",
        named("folder", "edited"),
        "a file that was edited is used",
    ),
    Mutant(
        "codegen/device/cache.py",
        "if key_of(found, _backend(spec)) != key:",
        "if not found:",
        named("cache", "damaged"),
        "a damaged file is not printed again",
    ),
    Mutant(
        "codegen/device/cache.py",
        "{spec!r} {_templates_digest()} {triton",
        "{spec!r} {triton",
        named("folder", "other_templates"),
        "kernels of templates that have changed since are used",
    ),
    Mutant(
        "codegen/device/stages.py",
        "griddepcontrol.wait;\\n\\tgriddepcontrol.launch_dependents;",
        "griddepcontrol.launch_dependents;\\n\\tgriddepcontrol.wait;",
        named("offline", "begin_early"),
        "a kernel lets the next one begin before the one before has ended",
    ),
    Mutant(
        "codegen/device/stages.py",
        "linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)",
        "pass",
        named("folder", "what_was_compared"),
        "Triton reads the file once more",
    ),
    Mutant(
        "codegen/device/binary.py",
        "!= [metadata_hash, code_hash]:",
        "[:1] != [metadata_hash]:",
        named("folder", "not killed"),
        "damaged code is loaded",
    ),
    Mutant(
        "codegen/device/binary.py",
        "constants,\n                sorted(options.items()), target",
        "constants,\n                target",
        named("folder", "variants"),
        "a variant with other warps finds the binary of this one",
    ),
    Mutant(
        "codegen/device/arguments.py",
        'layout.append("i32" if -_WIDE <= arg < _WIDE',
        'layout.append("i32" if -_WIDE <= arg <= _WIDE',
        named("folder", "variants"),
        "2**31 is passed in 32 bits",
    ),
    Mutant(
        "codegen/text/lines.py", "if not text.isprintable():", 'if "\\n" in text:', named("injection", "one_line"), "U+2028 ends a comment"
    ),
    Mutant(
        "codegen/text/render.py", " or not same", "", named("injection", "refused"), "a text of the user's that becomes code is not noticed"
    ),
    Mutant(
        "codegen/registry.py",
        "while len(self) >= self.limit and key not in self:",
        "while False:",
        named("registry", "holds_so_much or bounded"),
        "caches grow without bound",
    ),
]

PAGES = [
    Mutant(
        "templates/update_cache.py.jinja",
        "inside &= (page >= 0) & (page < ENTRIES)",
        "inside &= page < ENTRIES",
        named("cache_arguments", "lies_read"),
        "page -1, the allocator's padding, is written before the pool",
        "crash",
    ),
    Mutant(
        "templates/update_cache.py.jinja",
        "inside &= (entry >= 0) & (entry < ENTRIES)",
        "inside &= entry >= 0",
        named("cache_arguments", "lies_read"),
        "an entry after the last is written",
        "crash",
    ),
    Mutant(
        "templates/update_cache.py.jinja",
        '"tl.minimum(CAPACITY, tl.load(KV_LENS + z%s))" % there if OFFSETS else "CAPACITY"',
        '"CAPACITY"',
        named("cache_arguments", "not_there_is_not_written"),
        "tokens of an absent sequence are written",
    ),
    Mutant(
        "templates/update_cache.py.jinja",
        "(ends > tokens)",
        "(ends >= tokens)",
        named("kv_cache", "any_update and not gpu"),
        "a sequence's first token goes to the one before",
    ),
    Mutant(
        "templates/update_cache.py.jinja",
        "v_factor = 1.0 / tl.load(V_SCALES + head)",
        "v_factor = 1.0 / tl.load(K_SCALES + head)",
        named("kv_cache", "any_update and not gpu"),
        "values are scaled as keys",
    ),
    Mutant(
        "templates/_decode.jinja",
        "(first_tile_of(end, at + 1, QUERIES) > tile)",
        "(first_tile_of(end, at + 1, QUERIES) >= tile)",
        named("cached", "grid_follows"),
        "a sequence's first tile goes to the one before",
    ),
    Mutant(
        "templates/_cache.jinja",
        "inside = (page >= 0) & (page < Zkv) & (offs_n",
        "inside = (page < Zkv) & (offs_n",
        named("cache_arguments", "lies_read"),
        "page -1 is read",
        "crash",
    ),
    Mutant(
        "templates/_decode.jinja",
        "where((z_kv >= 0) & (z_kv < Zkv), KV_LEN, 0)",
        "where(z_kv >= 0, KV_LEN, 0)",
        named("cache_arguments", "lies_read"),
        "an entry after the last is read",
        "crash",
    ),
    Mutant(
        "templates/_decode.jinja",
        '{{ " - %s.maximum(count - Q_LEN, 0)" % tl if RAGGED and not mask_mod }}',
        "",
        named("cache_arguments", "that_lies_loses"),
        "queries of a sequence longer than max_q_len see keys after them",
    ),
    Mutant(
        "flexpress/inputs/cache_checks.py",
        "end = max(offset + count, length) if count and written else length",
        "end = offset + count if count else length",
        named("cache_arguments", "lengths_beyond or bad_calls or beyond"),
        "a kv_len beyond the cache passes",
    ),
    Mutant(
        "flexpress/inputs/cache_checks.py",
        "end = max(offset + count, length) if count and written else length",
        "end = max(offset + count, length) if count else length",
        named("cached", "behind_the_keys"),
        "queries behind the keys of a part need pages of their own",
    ),
    Mutant(
        "flexpress/inputs/cache_checks.py",
        "there = tensor.data_ptr() >= LOWEST",
        "there = True",
        named("wrapped_tensors", "float8 or columns"),
        "freed memory is read where a tensor is copied first",
        "crash",
    ),
    Mutant(
        "flexpress/masks/mask_lists.py",
        "return self._cuts and not (self._decided and self._fixed)",
        "return self._cuts and not self._decided",
        named("masks_as_torchs", "captures_may_change"),
        "blocks that a length cuts stay full whatever mask_mod captures since",
    ),
    Mutant(
        "flexpress/caches/cached_probabilities.py",
        "with torch.no_grad(), no_autocast(query):",
        "with torch.no_grad():",
        named("cached_probabilities", "under_autocast"),
        "statistics of a float8 cache round to autocast's dtype",
    ),
    Mutant(
        "flexpress/inputs/scales.py",
        "return torch.ones((), dtype=torch.float32, device=device) * value",
        "return torch.full((), value, dtype=torch.float32, device=device)",
        named("torch_compile", "floats_that_change"),
        "a graph for each float under torch.compile",
    ),
    Mutant(
        "flexpress/inputs/cache_checks.py",
        "if rows.start < taken.stop and taken.start < rows.stop:",
        "if rows.start < taken.stop - 1 and taken.start < rows.stop:",
        named("cache_arguments", "bad_calls_of_update"),
        "two sequences that share one row pass",
    ),
    Mutant(
        "codegen/run/layouts.py",
        "        if stride <= reach:",
        "        if stride < reach:",
        named("cache_arguments", "bad_calls_of_update"),
        "expanded caches are written",
    ),
    Mutant(
        "flexpress/inputs/cache_checks.py",
        "(type(t), t.shape, t.stride(), t.dtype,",
        "(type(t), t.shape, t.dtype,",
        named("cache_arguments", "any_strides"),
        "tables with gaps are read as if they had none",
    ),
    Mutant(
        "flexpress/inputs/cache_checks.py",
        "if starts[0] != 0 or",
        "if",
        named("cache_arguments", "bad_calls_of_both and offsets"),
        "offsets that begin at 1 pass",
    ),
    Mutant(
        "flexpress/caches/pages.py",
        "            self._holders[pages[-1]] -= 1\n            pages.pop()",
        "            pages.pop()",
        named("pages"),
        "a page that was copied is never free again",
    ),
    Mutant(
        "flexpress/caches/pages.py",
        "new_length > length and length % self._page_size and self._holders",
        "new_length > length and self._holders",
        named("pages"),
        "full pages are copied",
    ),
    Mutant("flexpress/caches/pages.py", "row + [-1] *", "row + [0] *", named("pages"), "what pads a page table is a page"),
]

CHECKS = [
    Mutant(
        "flexpress/inputs/checks.py",
        "if seq_lengths != (Q_LEN, KV_LEN):",
        "if seq_lengths[0] != Q_LEN:",
        named("arguments", "mask or lengths"),
        "a mask for other keys passes",
    ),
    Mutant(
        "flexpress/inputs/checks.py",
        'if "BLOCK" in part and size % number:',
        'if "BLOCK" in part and size < number:',
        named("arguments", "tile"),
        "a tile that does not divide the mask's blocks passes",
    ),
    Mutant(
        "flexpress/inputs/checks.py",
        "(torch.float64, torch.float8_e4m3fn)",
        "(torch.float8_e4m3fn,)",
        named("arguments", "float64"),
        "autocast rounds float64",
    ),
    Mutant(
        "flexpress/inputs/scales.py",
        'if scale.device.type == "cpu" and not (scale.requires_grad and torch.is_grad_enabled()) and not (tracing() or moving):',
        'if scale.device.type == "cpu":',
        named("scales", "learned_scale_gets"),
        "the gradient of scale is lost",
    ),
    Mutant(
        "codegen/mod/symbolic/dispatch.py",
        "if draws_in_torch(function):",
        "if False:",
        named("no_wrong_results", "random_numbers_are_refused"),
        "random numbers of torch are drawn",
    ),
    Mutant(
        "codegen/mod/tracing/runs.py",
        "if not self.watches or sys.getprofile() is not None:",
        "if True:",
        named("no_wrong_results", "autograd_function_of_a_symbol"),
        "an autograd.Function that makes no node passes",
    ),
    Mutant(
        "flexpress/inputs/checks.py",
        "isinstance(value, (bool, torch.Tensor)):  # a tensor's",
        "isinstance(value, bool):  # a tensor's",
        named("arguments", "bad_calls"),
        "a length in a tensor passes",
    ),
    Mutant(
        "codegen/mod/captured/tensors.py",
        "tensor.__class__ in ORDINARY and capture.dtype in DTYPES and not tensor.is_neg()\n",
        "tensor.__class__ in ORDINARY and capture.dtype in DTYPES\n",
        named("kinds_of_tensors", "sign_elsewhere"),
        "captured negative views lose their sign",
    ),
    Mutant(
        "codegen/mod/captured/tensors.py",
        "        if _transform() is None and keys not in _ordinary_keys(tensor.device):",
        "        if False:",
        named("kinds_of_tensors", "flex_attention and other_kinds"),
        "tensors without memory reach kernels",
        "crash",
    ),
    Mutant(
        "flexpress/masks/block_lists.py",
        "(place < counts[..., None]) & (indices >= 0) & (indices < columns)",
        "(place < counts[..., None]) & (indices < columns)",
        named("block_lists", "whatever_lists_hold and not gpu"),
        "block -1 is visited",
        "crash",
    ),
    Mutant(
        "flexpress/masks/block_lists.py",
        "partial = torch.where(full.gather(-1, place) == partial, columns, partial).sort(-1).values",
        "pass",
        named("block_lists", "full_blocks_may"),
        "a block that is full and partial is visited twice",
    ),
    Mutant(
        "codegen/export/file.py",
        "        if any(_PREFIX in name for name in names):\n            found |= names\n        elif",
        "        if",
        named("export_cpu", "names_that"),
        "captures of exported files are called as what is near them",
    ),
    Mutant(
        "codegen/export/captures.py",
        "        return next(alike, None)\n",
        "        return None\n",
        named("export_other_calls", "object_is_checked"),
        "what one mod decides by a number of a dict is not checked where the other one takes it",
    ),
    Mutant(
        "flexpress/distributed/attention.py",
        "*map(savable, captured), *of_masks)",
        "*map(savable, captured))",
        named("context", "written_to"),
        "a mask's tensor may be overwritten before the backward pass",
    ),
    Mutant(
        "flexpress/distributed/cached.py",
        "torch.where(kv_len > 0, kv_start + kv_len, 0)",
        "kv_start + kv_len",
        named("context", "split_over"),
        "a rank without keys of a sequence says where that ends",
    ),
    Mutant(
        "flexpress/masks/block_lists.py",
        "counts[:, :, :rows].long(), indices[:, :, :rows].long()",
        "counts.long(), indices.long()",
        named("block_mask", "more_rows and not gpu"),
        "kernels read statistics of queries that do not exist",
        "crash",
    ),
    Mutant(
        "flexpress/masks/mask_lists.py",
        "found = with_rows_beyond(self._whole, self._whole_lengths)",
        "found = self._whole",
        named("block_mask", "greater_seq_lengths"),
        "queries beyond those of a mask see what full blocks have",
    ),
    Mutant(
        "flexpress/masks/block_lists.py",
        "status = torch.where(low == 2, 2,",
        "status = torch.where(high == 2, 2,",
        named("block_lists", "full_in_part"),
        "a block that is full in part counts as full",
    ),
    Mutant(
        "flexpress/masks/block_lists.py",
        "seq_lengths[1] % size[1] == 0\n",
        "True\n",
        named("block_lists", "full_blocks_may"),
        "full blocks of others reach past KV_LEN",
    ),
]

DROPOUT = [
    Mutant(
        "templates/_dropout.jinja",
        "(seed >> 32).to({{ tl }}.uint32)",
        "seed.to({{ tl }}.uint32)",
        named("dropout", "every_tile"),
        "half of the seed is not used",
    ),
    Mutant(
        "templates/_dropout.jinja",
        "0xCC88 + (((m >> 3) & 1) * 2 + (n & 1)) * 0x1111",
        "0xCC88 + (((m >> 3) & 1) * 2) * 0x1111",
        named("hopper_backward", "dropout"),
        "in the kernel for Hopper every other key has the bits of the one before",
    ),
    Mutant(
        "templates/_dropout.jinja",
        "tl.where(is_left, every_8(next_left, n), every_8(next_right, n))",
        "words",
        named("dropout", "packed"),
        "in packed sequences columns past 128 keys have the bits of those before",
    ),
    Mutant(
        "templates/_dropout.jinja",
        "mixed(x0, x1, x2, x3, 5)",
        "mixed(x0, x1, x2, x3, 6)",
        named("dropout", "every_tile"),
        "kernels of one language mix other bits than those of others",
    ),
    Mutant(
        "templates/hopper_backward.py.jinja",
        "    dp = drop_float32(dp, words, drop_m, drop_n)\n",
        "",
        named("hopper_backward", "dropout"),
        "in the kernel for Hopper gradients go through dropped weights",
    ),
    Mutant(
        "templates/_hopper_backward_consumer.jinja",
        'drop_n0 = {{ "first_n" if SHIFTED else "kv_block * BLOCK_N" }} + CONSUMER * 64',
        'drop_n0 = {{ "first_n" if SHIFTED else "kv_block * BLOCK_N" }}',
        named("hopper_backward", "dropout"),
        "the second consumer drops what the first does",
    ),
    Mutant(
        "codegen/plan/hopper_backward.py",
        'if case.extras.dropout == "packed" and not (case.blocks and case.blocks.starts):',
        "if False:",
        named("extras_offline", "takes_them_or_refuses"),
        "a kernel that cannot drop weights of packed sequences serves them",
    ),
    Mutant(
        "templates/hopper_backward.py.jinja",
        '"start_m - drop_start" if DROPOUT == "packed"',
        '"start_m" if DROPOUT == "packed"',
        named("hopper_backward", "packed"),
        "queries are counted from where all begin, not their sequence",
    ),
    Mutant(
        "templates/hopper_backward.py.jinja",
        '"first_m" if SHIFTED else "start_m" }}, drop_n0',
        '"start_m" }}, drop_n0',
        named("hopper_backward", "dropout and blocks"),
        "in the backward kernel for Hopper queries drop what a rank's first ones do",
    ),
    Mutant(
        "templates/_hopper_backward_consumer.jinja",
        '"first_n" if SHIFTED else "kv_block * BLOCK_N" }} + CONSUMER * 64',
        '"kv_block * BLOCK_N" }} + CONSUMER * 64',
        named("hopper_backward", "dropout and blocks"),
        "there keys drop what a rank's first ones do",
    ),
    Mutant(
        "templates/_hopper_forward_consumer.jinja",
        '"(start_n + %s)" % shift_n if SHIFTED else "start_n"',
        '"start_n"',
        named("shifts", "hopper"),
        "in the forward kernel for Hopper keys drop what a rank's first ones do",
    ),
    Mutant(
        "templates/_dropout.jinja",
        '{% set drop_first = "(start_n + kv_shift)" if SHIFTED else "start_n" %}',
        '{% set drop_first = "start_n" %}',
        named("shifts", "dropout"),
        "weights are dropped by where a rank's keys lie in its memory",
    ),
    Mutant(
        "templates/_dropout.jinja",
        'start_m{{ " + q_shift" if SHIFTED }}, drop_m,',
        "start_m, drop_m,",
        named("shifts", "dropout"),
        "gradients of keys drop by where a rank's queries lie in its memory",
    ),
    Mutant(
        "templates/_cpu.jinja",
        '"int32_t(start_n) + i" ~ (" + kv_shift" if SHIFTED)',
        '"int32_t(start_n) + i"',
        named("shifts", "cpp"),
        "in C++ weights are dropped by where a rank's keys lie in its memory",
    ),
    Mutant(
        "flexpress/distributed/attention.py",
        "of_part(dropout, first_b, first_h + group.q.start)",
        "of_part(dropout, first_b, first_h)",
        named("context_parts", "dropout"),
        "groups of heads of a rank drop the same weights",
    ),
    Mutant(
        "flexpress/distributed/attention.py",
        "of_first_rank(arguments.dropout, (*plan.groups, *groups))",
        "of_first_rank(arguments.dropout, plan.groups)",
        named("context_parts", "seed_that_is_drawn"),
        "ranks of tensor parallel heads drop by seeds of their own",
    ),
    Mutant(
        "flexpress/distributed/exchange.py",
        "return of_queries[:, self.plan.position_ids].contiguous(),",
        "return of_queries[:, : len(self.plan.position_ids)].contiguous(),",
        named("context_parts", "dropout"),
        "packed queries of a rank drop what the first ones of all do",
        ends="time-out",  # ranks wait for one that has failed
    ),
    Mutant(
        "templates/_dropout.jinja",
        "drop_start = gl.load(first_place + 2 * {{ length }})",
        "drop_start = gl.load(first_place + {{ length }})",
        named("hopper_forward", "dropout_of_packed"),
        "keys are counted from where the tile lies in its sequence",
    ),
    Mutant(
        "templates/tangent.py.jinja",
        "    mean = tl.where(alpha == 0.0, 0.0, mean_i)\n",
        "    mean = mean_i * 0.0\n",
        named("tangents", "together"),
        "tangents of scores are rounded with what they have in common",
    ),
    Mutant(
        "templates/tangent.py.jinja",
        "p_t = drop(p_t, words, drop_m, drop_n)",
        "pass",
        named("dropout_derivatives", "tangent or packed"),
        "a tangent has weights that are dropped",
    ),
    Mutant(
        "templates/_tangents.jinja",
        "dp_t = drop(dp_t * KEPT_SCALE, words, drop_m, drop_n)",
        "pass",
        named("dropout_derivatives", "second"),
        "second derivatives have weights that are dropped",
    ),
    Mutant(
        "templates/tangent_dkv.py.jinja",
        '{{ "drop(p_t, words, drop_m, drop_n)" if DROPOUT else "p_t" }}',
        "p_t",
        named("dropout_derivatives", "second"),
        "second derivatives of values have weights that are dropped",
    ),
    Mutant(
        "templates/cpu_tangent_backward.cpp.jinja",
        'p_t{{ " * keeps" if DROPOUT }}',
        "p_t",
        named("cpp", "derivatives_with_dropout"),
        "in C++ second derivatives of values have weights that are dropped",
    ),
    Mutant(
        "flexpress/calls/mapped.py",
        "if size and (alone or problem.dropout is not None):",
        "if size and alone:",
        named("dropout_derivatives", "mapped"),
        "a mapped call drops other weights than it would alone",
    ),
    Mutant(
        "flexpress/calls/arguments.py",
        "        check_rows(lists.kv_indices.shape[2], block_mask.seq_lengths, (lists.q_block, lists.kv_block))\n",
        "",
        named("short_ways", "too_few"),
        "an operator's kernels read behind its lists",
    ),
    Mutant(
        "flexpress/operators/attention_operators.py",
        "of_operator=True,",
        "of_operator=False,",
        named("short_ways", "another_thread"),
        "an operator takes part in another thread's forward mode",
    ),
    Mutant(
        "codegen/mod/captured/levels.py",
        "t.select(dim, i)",
        "t.select(dim, 0)",
        named("functions", "several"),
        "of several gradients at once all are the first",
    ),
    Mutant(
        "flexpress/calls/problem.py",
        "if gradient._is_zerotensor():",
        "if False:",
        named("functions", "nothing_is_there"),
        "a gradient of zeros without memory is refused",
    ),
    Mutant(
        "flexpress/integrations/transformers.py",
        "(not is_transformed() and bind(",
        "(bind(",
        named("transformers", "inside_transforms"),
        "a model's padding that vmap maps is refused",
    ),
    Mutant(
        "templates/backward_dkv.py.jinja",
        "    dp = drop(dp * KEPT_SCALE, words, drop_m, drop_n)\n",
        "",
        named("dropout", "packed"),
        "gradients of keys go through dropped weights",
    ),
    Mutant(
        "templates/backward_dkv.py.jinja",
        "    dv{{ s.suffix }} *= KEPT_SCALE\n",
        "",
        named("dropout", "packed"),
        "gradients of values are too small",
    ),
    Mutant(
        "codegen/run/backward.py",
        "rows.provisional, _dropout_of(bound), *keys",
        "rows.provisional, *keys",
        named("dropout", "another_probability"),
        "a backward pass takes the probability of the one before",
    ),
    Mutant(
        "codegen/run/forward.py",
        "extras and (extras.structure, extras.numbers)",
        "extras and extras.structure",
        named("dropout", "another_probability"),
        "a forward pass takes the probability of the one before",
    ),
]
SINKS = [
    Mutant(
        "templates/_softmax.jinja",
        "l_i = l_i * alpha + {{ tl }}.exp2({{ tl }}.fma(sink, factor, -shift_safe))",
        "l_i = l_i * alpha",
        named("sinks", "alone"),
        "a sink takes no weight",
    ),
    Mutant(
        "templates/backward_delta.py.jinja",
        "-tl.sum(weight * delta, 0)",
        "tl.sum(weight * delta, 0)",
        named("sinks", "alone"),
        "the gradient of sinks has the wrong sign",
    ),
    Mutant(
        "templates/combine_splits.py.jinja",
        '"% INNER" if RAGGED',
        '"% INNER" if False',
        named("sinks", "caches"),
        "where keys are split, a token of packed queries gets another head's sink",
    ),
    Mutant(
        "codegen/plan/extras.py",
        "SMALLEST_SCALE = 1e-20",
        "SMALLEST_SCALE = 1e-37",
        named("sinks", "extreme"),
        "sinks are divided by a scale so small that they become infinite",
    ),
    Mutant(
        "flexpress/inputs/sinks.py",
        'aligned(readable("sinks", sinks).contiguous())',
        'readable("sinks", sinks).contiguous()',
        named("sinks", "place"),
        "sinks at any address reach kernels that were compiled for multiples of 16",
    ),
]
FLOAT8 = [
    Mutant(
        "templates/_softmax.jinja",
        "p = {{ tl }}.exp2({{ tl }}.fma(score - m_safe[:, None], TO_LOG2, 8.0))",
        "p = {{ tl }}.exp2({{ tl }}.fma(score - m_safe[:, None], TO_LOG2, 0.0))",
        named("float8", "any_problem"),
        "weights below 2**-6 lose their bits in products of 8 bits, and lse is off by 2**8",
    ),
    Mutant(
        "templates/_scales.jinja",
        "h_kv * stride",
        "h * stride",
        named("float8", "any_problem"),
        "scales of a head of keys are read by the head of queries",
    ),
    Mutant(
        "templates/_scales.jinja",
        "{{ tl }}.where(TO_LOG2 < 1e-37, 1e-37, TO_LOG2)",
        "TO_LOG2",
        named("float8", "all_zero"),
        "elements that are all 0, with a scale of 0, give NaN under a mask",
    ),
    Mutant(
        "flexpress/inputs/float8.py",
        'aligned(readable(f"{name}_scale", scale))',
        'readable(f"{name}_scale", scale)',
        named("float8", "place"),
        "scales at any address reach kernels that were compiled for multiples of 16",
    ),
    Mutant(
        "templates/_hopper_forward_products.jinja",
        "0x5410, 0x1054",
        "0x1054, 0x5410",
        named("hopper_forward", "float8"),
        "weights of 8 bits come from the wrong one of two threads",
    ),
    Mutant(
        "flexpress/calls/packed_blocks.py",
        "    if float8:\n        return ()\n",
        "",
        named("hopper_forward", "packed_sequences_of_float8"),
        "TMA copies values by keys from where it cannot",
    ),
    Mutant(
        "codegen/run/values_by_keys.py",
        "if v.stride(2) == 1 and not any(v.stride(i) % 16 for i in (0, 1, 3) if v.shape[i] > 1):",
        "if v.stride(2) == 1:",
        named("float8", "lie_by_keys"),
        "TMA gets values whose rows are no multiples of 16 bytes",
    ),
]
LAUNCHES = [
    Mutant(
        "codegen/plan/hopper_forward.py",
        "tiles_of_two(q_len, heads) <= 2 * multiprocessors",
        "False",
        named("explain", "tiles_of_dense"),
        "few tiles are large ones",
    ),
    Mutant(
        "codegen/plan/hopper_forward.py", "if tiles <= few //", "if tiles < 0 * few //", named("explain", "few_keys"), "few keys take long"
    ),
    Mutant(
        "codegen/run/block_lists.py",
        "self.sizes = [Hm * rows if Zm > 1 else 0, rows if Hm > 1 else 0,",
        "self.sizes = [Hm * rows if Zm > 1 else 0, rows,",
        named("mask_mod", "marking_every or the_call_makes"),
        "a mask that all heads share is read as if each had its own",
        "crash",
    ),
    Mutant(
        "codegen/run/forward.py",
        "tensors, addresses = [k, v, q, out, lse], [k_at, v_at, q_at,",
        "tensors, addresses = [k, v, q, out, lse], [v_at, k_at, q_at,",
        named("repeated_calls"),
        "a repeated call exchanges keys and values",
    ),
    Mutant(
        "codegen/run/forward.py",
        "factors_out(scale, extras), output_max",
        "True, output_max",
        named("attention") + ("tests/test_huge_scores.py",),
        "a negative scale is folded into the softmax's base",
    ),
    Mutant(
        "codegen/run/call.py",
        "return *extents[:3], extents[3] + lists.kv_block - 1",
        "return extents",
        named("block_lists", "past_its_end"),
        "mods that read past the keys in a block that begins anywhere are not checked",
    ),
    Mutant(
        "codegen/device/arguments.py",
        "            if arg % 16 or arg < LOWEST:\n                return None",
        "            if False:\n                return None",
        named("repeated_calls", "short_way"),
        "addresses that are not aligned take the short way",
    ),
    Mutant(
        "flexpress/distributed/parts.py",
        "    return lambda i: i + first\n",
        "    return lambda i: i\n",
        named("dtensors", "batch_and_heads"),
        "mods are told a rank's own b and h",
    ),
    Mutant(
        "flexpress/distributed/dtensors.py",
        "[Replicate() if there else Partial() for there in summed]",
        "[Replicate() for there in summed]",
        named("dtensors", "batch_and_heads"),
        "gradients of captured DTensors are not summed over ranks",
    ),
    Mutant(
        "flexpress/distributed/dtensors.py",
        "[p.is_replicate() or i in self._summed_over for",
        "[p.is_replicate() for",
        named("context_parts", "sharded_over"),
        "gradients of captured DTensors are summed over ranks of a plan, where they are sums already",
    ),
    Mutant(
        "flexpress/distributed/attention.py",
        "Part((heads.first or 0) + mine.start,",
        "Part(mine.start,",
        named("context_parts", "second_dimension_of_others"),
        "ranks that split a rank's heads are told those of the first rank",
    ),
    Mutant(
        "flexpress/distributed/attention.py",
        "for group in exchange.plan.groups if exchange.plan.sum_gradients else ():",
        "for group in exchange.plan.groups:",
        named("context_parts", "fully_sharded"),
        "gradients of captured parameters are summed before FSDP sums them",
    ),
    Mutant(
        "flexpress/distributed/heads.py",
        "rank < length % self.ranks",
        "rank < 0",
        named("context_parts", "second_dimension"),
        "ranks that split heads lose the positions that they cannot share evenly",
    ),
    Mutant(
        "flexpress/distributed/plan.py",
        "part.status = part.status.narrow(dim, first, count)",
        "part.status = part.status.narrow(dim, 0, count)",
        named("context_parts", "with_batch_and_heads"),
        "ranks of a plan walk the blocks of other heads",
    ),
    Mutant(
        "codegen/device/kernel.py",
        "            if isinstance(arg, torch.Tensor) and arg.data_ptr() < LOWEST:\n",
        "            if False:\n",
        named("wrapped_tensors", "backward"),
        "freed memory reaches a kernel",
        "crash",
    ),
    Mutant(
        "codegen/run/meanwhile.py",
        'device.type == "cuda" and torch.cuda.is_current_stream_capturing()',
        "False",
        named("compiling_beside", "must_wait"),
        "a CUDA graph records the kernel that serves meanwhile",
    ),
    Mutant(
        "flexpress/calls/call.py",
        "waits=deterministic)[:3]",
        "waits=False)[:3]",
        named("compiling_beside", "same_bits"),
        "deterministic results depend on when a compiler is done",
    ),
    Mutant(
        "codegen/run/backward.py",
        "transposed), meanwhile)",
        "transposed))",
        named("compiling_beside", "portable_kernels"),
        "a fused backward kernel is compiled for rows of a forward kernel that is replaced",
    ),
    Mutant(
        "codegen/run/meanwhile.py",
        " or bool(workers.POOL.fails)",
        "",
        named("compiling_beside", "no_process"),
        "calls do not wait where no process can compile",
    ),
    Mutant(
        "codegen/run/backward_kernels.py",
        "place = self.writes_to or device",
        "place = device",
        named("compiling_beside", "touches_no_device"),
        "a thread that begins kernels takes memory of a device while a graph may be captured",
    ),
    Mutant(
        "codegen/device/stages.py",
        "            os.killpg(0, signal.SIGTERM)",
        "            pass",
        named("compiling_beside", "a_program_ends"),
        "assemblers go on when the program has ended",
    ),
    Mutant(
        "codegen/run/evaluated_masks.py",
        " & (kv < KV_LEN)",
        "",
        named("evaluated_masks", "kernels_give"),
        "a block that reaches past the keys is full while kernels are compiled",
    ),
    Mutant(
        "codegen/device/workers.py",
        '        job.renew()\n        job.end("the process was forked")\n',
        "        job.renew()\n",
        named("compiling_beside", "forked"),
        "a forked child waits for a compiler that it has not",
    ),
    Mutant(
        "codegen/device/kernel.py",
        "key, plain = (constants, device.index, *options.values()), plain_values(args)",
        "key, plain = (device.index, *options.values()), plain_values(args)",
        named("threads", "variant"),
        "two tiles share one binary",
    ),
    Mutant(
        "codegen/run/workspace.py",
        "[start + offset for offset in self._offsets]",
        "[start for _ in self._offsets]",
        named("repeated_calls", "a_backward_pass"),
        "what a repeated backward pass keeps for its length lies in one place",
    ),
    Mutant(
        "codegen/run/backward_kernels.py",
        "[*addresses, *tables, *[t.data_ptr() for t in buffers.values()]]",
        "[*addresses, *[t.data_ptr() for t in buffers.values()], *tables]",
        named("repeated_calls", "a_backward_pass"),
        "a repeated backward pass takes buffers for block lists",
    ),
    Mutant(
        "codegen/run/backward.py",
        "layouts, out.stride(), bound.scale, details,",
        "layouts, out.stride(), details,",
        named("backward", "kept_for_repeated or new_lengths"),
        "another scale finds the numbers of the first",
    ),
    Mutant(
        "codegen/run/backward.py",
        "raw_tops, ordinary, structure_of",
        "raw_tops, True, structure_of",
        named("backward", "becomes_infinite"),
        "a captured number that is infinite now finds the kernel of one that was not",
    ),
    Mutant(
        "codegen/run/captured.py",
        "            at = torch.where(at < 0, at + size, at)\n",
        "",
        named("backward", "places_outside or twice or computes"),
        "negative indices lose their gradient",
    ),
    Mutant(
        "codegen/run/captured.py",
        "return distinct(tensor) if tensor.requires_grad else tensor",
        "return tensor",
        named("captured_sums"),
        "an expanded tensor gets its gradient in memory that indices share",
    ),
    Mutant(
        "codegen/mod/graphs/nan.py",
        "    return not math.isfinite(_size(expr, ordinary, {}))",
        "    return False",
        named("backward", "nothing_flows"),
        "0 * inf where nothing is attended to",
    ),
    Mutant(
        "codegen/mod/graphs/nan.py",
        "                return True\n    return False",
        "                return False\n    return False",
        named("backward", "nan_of_zero"),
        "padding rows become NaN in dK",
    ),
    Mutant(
        "templates/backward_dq.py.jinja",
        "q{{ s.suffix }} = (q{{ s.suffix }}.to(tl.float32) * SM_SCALE).to(q{{ s.suffix }}.dtype)",
        "q{{ s.suffix }} = (q{{ s.suffix }}.to(tl.float32) * (SM_SCALE * 1.002)).to(q{{ s.suffix }}.dtype)",
        named("backward", "queries_scaled"),
        "dQ is not of the queries that the forward pass rounded",
    ),
    Mutant(
        "templates/backward_dkv.py.jinja",
        "q{{ s.suffix }} = (q{{ s.suffix }}.to(tl.float32) * SM_SCALE).to(q{{ s.suffix }}.dtype)",
        "q{{ s.suffix }} = (q{{ s.suffix }} * SM_SCALE.to(q{{ s.suffix }}.dtype)).to(q{{ s.suffix }}.dtype)",
        named("backward", "queries_scaled"),
        "dK and dV round the scale before the product",
    ),
    Mutant(
        "templates/_softmax.jinja",
        "usual = {{ tl }}.abs(m_new) < HUGE",
        "usual = m_new < HUGE",
        named("huge_scores", "any_dtype and not gpu or caches or few"),
        "rows of huge negative scores",
    ),
    Mutant(
        "templates/_softmax.jinja",
        "-shift_i) - {{ tl }}.log2(l_i))",
        "-shift_i) + {{ tl }}.log2(l_i))",
        named("backward", "any_problem and not gpu"),
        "the backward pass gets weights that do not sum to 1",
    ),
    Mutant(
        "templates/backward_delta.py.jinja",
        "delta -= tl.load(DLSE",
        "delta += tl.load(DLSE",
        named("backward", "any_problem and not gpu"),
        "the gradient of lse has the wrong sign",
    ),
    Mutant(
        "templates/combine_splits.py.jinja",
        "row.to(tl.int64) * 2 + 1, -tl.log2(l_i))",
        "row.to(tl.int64) * 2 + 1, tl.log2(l_i))",
        named("decode", "gradients"),
        "gradients after few queries",
    ),
    Mutant(
        "codegen/device/interpret.py",
        "        restore()\n        # tensors become",
        "        # tensors become",
        named("interrupts", "left_switched or first_switch"),
        "what an interrupt left switched stays so",
    ),
    Mutant(
        "codegen/device/interpreter_operands.py",
        "name in NUMBERS and abs(number) < 2**31",
        "name in NUMBERS",
        named("operands", "int32"),
        "the interpreter makes numbers of int32 that have no room in it",
    ),
    Mutant(
        "codegen/device/interpreter_direct.py",
        "ufunc(right, left) if turned else ufunc(left, right)",
        "ufunc(left, right)",
        named("operands", "operations and int32"),
        "the interpreter takes a number minus a tensor for the tensor minus the number",
    ),
    Mutant(
        "codegen/device/interpreter_direct.py",
        "left + size * right.astype(np.uint64)",
        "left + right.astype(np.uint64)",
        named("operands", "memory and fp32 or pointers"),
        "the interpreter moves pointers by bytes",
    ),
    Mutant(
        "codegen/device/interpreter_direct.py",
        "max(left, right, key=_ORDER.index)",
        "left",
        named("operands", "operations and int32"),
        "the interpreter computes with an integer and a float in integers",
    ),
    Mutant(
        "codegen/device/interpreter_direct.py",
        "np.ones(shape, bool) if mask is None else _spread(mask.handle.data, shape)",
        "np.ones(shape, bool)",
        named("operands", "memory and fp32"),
        "the interpreter reads and writes what a mask leaves out",
    ),
    Mutant(
        "codegen/device/interpreter_direct.py",
        'result["dtype"]) if acc is None else acc.handle',
        'result["dtype"]) if True else acc.handle',
        named("operands", "products and fp32"),
        "the interpreter's products leave out what they are added to",
    ),
    Mutant(
        "codegen/text/parsing.py",
        'found[1] or ""',
        '""',
        named("folder", "nothing_else"),
        "what is in a kernel's strings does not count as its text",
    ),
]

_TRANSFORMERS, _REGISTRY = "flexpress/integrations/transformers.py", "flexpress/integrations/torch.py"
INTEGRATIONS = [
    Mutant(
        _TRANSFORMERS,
        "q_offset = q_offset.clone()",
        "q_offset = q_offset",
        named("transformers_generate", "piece and llama"),
        "a mask follows the counter of a static cache past its own step",
    ),
    Mutant(
        _TRANSFORMERS,
        "(queries is not None and bool(queries[0] + queries[1] <= given))",
        "True",
        named("transformers", "room_for_keys"),
        "keys that are not there yet are seen where nothing else hides them",
    ),
    Mutant(
        _TRANSFORMERS,
        "bool(queries[0] + queries[1] <= given)",
        "True",
        named("transformers", "ends_before"),
        "an attention_mask of fewer positions than the queries' is taken for none",
    ),
    Mutant(_TRANSFORMERS, "dropout if module.training else 0.0", "dropout", named("transformers", "dropout"), "evaluation drops weights"),
    Mutant(
        "flexpress/graphs/custom_ops.py",
        "[] if value is None and i in places else value",
        "value",
        named("cpp_wrapper", "aot"),
        "an empty list stays None",
    ),
    Mutant(
        "flexpress/graphs/programs.py", '("\\\\", "~1"), ', "", named("cpp_wrapper", "texts"), "backslashes stand in an operator's text"
    ),
    Mutant(
        "flexpress/operators/mask_operators.py",
        "device = resolve_device(device)  # torch's C++ wrapper gives the CPU a number\n    return masks.create_lists",
        "return masks.create_lists",
        named("cpp_wrapper", "not aot and not texts"),
        "cpu:0 is another device than a tensor's",
    ),
    Mutant(_TRANSFORMERS, "sinks=s_aux", "sinks=None", named("transformers", "padding and gpt_oss"), "a model's sinks are left out"),
    Mutant(
        _TRANSFORMERS,
        "is_local = is_asked and local_size is not None and kv_length >= local_size",
        "is_local = is_asked and local_size is not None and kv_length > local_size + 100",
        named("transformers", "padding and gemma2 or stored"),
        "a window that hides keys is taken for none",
    ),
    Mutant(
        "codegen/device/arguments.py",
        "        elif arg.__class__ is bool:\n            return None\n",
        "",
        named("launching", "bool"),
        "an integer is passed to a kernel that was compiled for a bool",
    ),
    Mutant(
        _REGISTRY,
        "torch.where(empty, 0.0, -lse * math.log2(math.e))",
        "-lse * math.log2(math.e)",
        named("torch_registry", "varlen_attn"),
        "gradients of rows that see nothing",
    ),
    Mutant(
        _REGISTRY,
        "placed_by_sequence(keys - cu_q.diff())",
        "placed_by_sequence(0 * keys)",
        named("torch_registry", "varlen_attn or keys_that"),
        "causal masks of torch's operators begin in the top left corner",
    ),
]

_ON_HOPPER = "templates/_exported_hopper.jinja"
EXPORTS = [
    Mutant(
        _ON_HOPPER,
        "counter = torch.zeros(2, dtype=torch.int32, device=device)  # of tiles",
        "counter = torch.empty(2, dtype=torch.int32, device=device)  # of tiles",
        named("export_hopper", "same_on_hopper and window"),
        "an exported kernel for Hopper begins to count anywhere",
    ),
    Mutant(
        _ON_HOPPER,
        "4 * compiled.n_spills > self.spill_limit",
        "compiled.n_spills > self.spill_limit",
        named("export_offline", "spills"),
        "words that an exported kernel spills are taken for bytes",
    ),
    Mutant(
        "templates/_exported_backward.jinja",
        "torch.stack((row_values[..., 0] * scale, row_values[..., 1]), -1)",
        "row_values",
        named("export_hopper", "without_scale or wide"),
        "exported portable kernels take scores without scale for scores",
    ),
    Mutant(
        "codegen/export/attention.py",
        '"2 * tiles" if name == "hopper" else "tiles"',
        '"tiles"',
        named("export_hopper", "slopes"),
        "an exported buffer has room for one of two consumers",
    ),
    Mutant(
        "templates/_exported_hopper_backward.jinja",
        "    d_sinks = parts_of_sinks.sum((0, 2))",
        "    d_sinks = parts_of_sinks[..., 0].sum(0)",
        named("export_sinks", "on_hopper"),
        "an exported file for Hopper gives sinks the gradient of the first rows alone",
    ),
    Mutant(
        "flexpress/exporting/export.py",
        "        sinks = sinks.detach().requires_grad_(backward and sinks.requires_grad)",
        "        sinks = sinks.requires_grad_(backward and sinks.requires_grad)",
        named("export_sinks", "mod_may_capture"),
        "sinks that a mod captures, too, are one argument of an exported file, with half of a gradient",
    ),
    Mutant(
        "templates/_exported.jinja",
        "triton.knobs.nvidia.ptxas = triton.knobs.nvidia.ptxas_blackwell = chosen[0]",
        "pass",
        named("export_offline", "library_compiles"),
        "an exported file is assembled by whichever assembler Triton takes",
    ),
    Mutant(
        "templates/_hopper_decode_producer.jinja",
        "zero_rows(desc_k, shared.k.buffers, slot, gl.maximum(KV_LEN - start_n, 0), {{ V_SLABS }})",
        "pass",
        named("hopper_decode", "what_the_kernel"),
        "values past a sequence's end are multiplied by 0",
    ),
    Mutant(
        "templates/_hopper_decode_output.jinja",
        "acc_1 = acc_1 * factor",
        "acc_1 = acc_1",
        named("hopper_decode", "scores_that_grow"),
        "half of the output is not scaled to a new maximum",
    ),
    Mutant(
        "templates/_softmax.jinja",
        "(usual == ({{ tl }}.abs(m_i) < HUGE)) & (shift - shift_i",
        "(shift - shift_i",
        named("hopper_decode", "past_what_is_usual"),
        "a shift in one base is kept for scores in the other",
    ),
    Mutant(
        "codegen/run/decode.py",
        "launch_nothing(kernels.launches)",
        "pass",
        named("precompile_cached"),
        "precompile_cached computes attention",
    ),
]

ELSEWHERE = [
    Mutant(
        "templates/_forward_block.jinja",
        '{{ "(offs_n + kv_shift)" if SHIFTED else "offs_n" }}',
        "offs_n",
        named("shifts", "cpu"),
        "keys are told where they are in memory, not in the sequence",
    ),
    Mutant(
        "templates/backward_dkv.py.jinja",
        '                z, h, n, start_m, {{ "q_shift, " if SHIFTED }}',
        '                z, h, n, start_m, {{ "0, " if SHIFTED }}',
        named("shifts", "cpu"),
        "queries of the backward pass are told where they are in memory",
    ),
    Mutant(
        "templates/_hopper_forward_tile.jinja",
        "        end_m = Q_LEN + shift\n",
        "        end_m = Q_LEN\n",
        named("shifts", "hopper"),
        "rows of a block further on are taken for padding",
    ),
    Mutant(
        "templates/_hopper_backward_scores.jinja",
        "first_m = start_m + q_shift",
        "first_m = start_m",
        named("hopper_backward", "longer or same"),
        "the fused backward kernel's queries are told where they are in memory",
    ),
    Mutant(
        "codegen/run/captured.py",
        'self._positions(axis.removesuffix("_idx"))',
        "self._range(values.shape[2])",
        named("shifts", "gather and cpu"),
        "gradients of what is read by key go to other keys",
    ),
    Mutant(
        "flexpress/distributed/exchange.py",
        "(kv_idx < kv_len) & seen if padded else seen",
        "seen",
        named("context"),
        "queries attend to padding",
    ),
    Mutant(
        "flexpress/distributed/assignment.py",
        "        if loads[most] <= enough:\n",
        "        if loads[most]:\n",
        named("assignment", "equal_work"),
        "no block is exchanged",
    ),
]

PROBABILITIES = [
    Mutant(
        "templates/_probabilities.jinja",
        "tl.where(kept > 0.0, kept * (m_i - m_new), 0.0)",
        "0.0",
        named("probabilities", "gradients and not gpu"),
        "entropy forgets that the largest score was another one",
    ),
    Mutant(
        "templates/_probabilities.jinja",
        "tl.where(highest == m_i, tl.minimum(top_i, at), top_i)",
        "top_i",
        named("probabilities", "first_key"),
        "of equal scores the one that is walked first is the top",
    ),
    Mutant(
        "templates/_probabilities.jinja",
        'tl.where((top > float("-inf"))[None, :], p, 0.0)',
        "p",
        named("probabilities", "known_distributions and not gpu"),
        "an empty row makes NaN of the columns' sums",
    ),
    Mutant(
        "flexpress/calls/merge.py",
        "torch.where(share > 0, out.to(precision), 0.0)",
        "out.to(precision)",
        named("merge", "empty_part"),
        "what an empty part leaves unwritten is read",
    ),
    Mutant(
        "mods/tree.py",
        "torch.where(jump == T, 0, size)",
        "torch.where(jump == T, 0, torch.ones_like(size))",
        named("structured_recipes", "test_tree"),
        "a node's descendants are counted too few",
    ),
    Mutant(
        "mods/neighborhood.py",
        ".minimum(count - window)",
        "",
        named("structured_recipes", "test_neighborhood"),
        "windows with gaps are cut off at the end",
    ),
]

PREFIXES = [
    Mutant(
        "templates/shared_tables.py.jinja",
        " & (first >= prefix)",
        "",
        named("shared_prefix", "queries_inside"),
        "queries inside a prefix see all of it",
    ),
    Mutant(
        "templates/shared_tables.py.jinja",
        "(kv_len >= prefix) & ",
        "",
        named("shared_prefix", "sequences_that_left"),
        "a sequence that ends inside a prefix, or is not there, sees all of it",
    ),
    Mutant(
        "templates/shared_tables.py.jinja",
        "(row < total) & (shift > 0)",
        "row < total",
        named("shared_prefix", "queries_inside"),
        "a sequence that reads all itself counts its prefix twice",
    ),
    Mutant(
        "templates/shared_tables.py.jinja",
        "(row < total) & (shift > 0)",
        "shift > 0",
        named("shared_prefix", "tables_are_those"),
        "tokens of no sequence have rows",
    ),
    Mutant(
        "codegen/plan/masks.py",
        "layouts(part, captured, extents, graph)",
        "layouts(part, captured, extents)",
        named("block_mask", "many_ways"),
        "texts of a mask count a stride in different units",
    ),
    Mutant(
        "flexpress/caches/shared_attention.py",
        "q_offset=laid.q_offset,",
        "q_offset=laid.q_offset, sinks=None,",
        named("shared_prefix", "sinks_count"),
        "sinks do not count",
    ),
    Mutant(
        "templates/shared_tiles.py.jinja",
        "tl.where(place >= 0, parts, 0)",
        "parts",
        named("shared_hopper", "test_tiles"),
        "a sequence that reads all itself is added what its group reads",
    ),
    Mutant(
        "templates/combine_splits.py.jinja",
        "parts + s - shared",
        "parts + s",
        named("shared_hopper", "what_the_kernel_computes"),
        "own parts behind shared ones are others",
    ),
    Mutant(
        "templates/_hopper_forward_producer.jinja",
        "num_blocks = num_blocks * (part + 1) // parts - first",
        "num_blocks = num_blocks - first",
        named("shared_hopper", "what_the_kernel_computes"),
        "keys are in several parts",
    ),
    Mutant(
        "flexpress/caches/shared_prefix.py",
        "max(one.counted(around), as_group)",
        "as_group",
        named("shared_prefix", "save_the_most"),
        "a group that shares more joins one that shares less",
    ),
    Mutant(
        "templates/merge_parts.py.jinja",
        'there &= part_lse != float("-inf")  # else nothing is added',
        "",
        named("merge_parts", "parts_are_merged"),
        "two parts without keys make NaN",
    ),
]


ELEMENTS = [
    Mutant(
        "codegen/run/forward.py",
        "extras and (extras.structure, extras.numbers), are_aligned(score)",
        "extras and (extras.structure, extras.numbers)",
        named("hopper_elements", "later_calls"),
        "a kernel that copies serves a tensor at an odd address",
    ),
    Mutant(
        "codegen/plan/hopper_elements.py",
        '(inside or index.op == "symbol")',
        "True",
        named("hopper_elements", "threads_read"),
        "an index that counts from the end is copied as one outside",
    ),
    Mutant(
        "templates/_hopper_forward_copies.jinja",
        "{{ score_mod.copied.place }}, {{ first_query }} + c * 64, start_n]",
        "{{ score_mod.copied.place }}, {{ first_query }}, start_n]",
        named("hopper_elements", "later_calls"),
        "both consumers get the elements of the first one's rows",
    ),
    Mutant(
        "codegen/plan/hopper_elements.py",
        "    room -= handed * tile.stages * tile.BLOCK_N\n",
        "",
        named("hopper_elements", "take_room"),
        "a kernel that copies wants more shared memory than there is",
    ),
]


MEANINGS = [  # of operations, as torch's eager reference has them
    Mutant(
        "codegen/mod/graphs/wide.py", "dtype, wide = torch.int64, True", "pass", named("wide_integers"), "integers of indices wrap around"
    ),
    Mutant(
        "codegen/mod/graphs/wide.py",
        "return mod if wide is bound else GraphMod(*wide)",
        "return mod",
        named("wide_integers"),
        "integers of positions that are elements wrap around",
    ),
    Mutant(
        "codegen/mod/symbolic/integers.py",
        "for x in (n, *n.args)",
        "for x in (n,)",
        named("ops", "test_literals"),
        "a number wraps around before an index is divided by it",
    ),
    Mutant(
        "codegen/mod/symbolic/methods.py",
        "    run = running()\n    return Sym(run.table.make",
        "    return found\n    return Sym(run.table.make",
        named("indexing", "beyond_int32"),
        ".int() of an index leaves it in int64",
    ),
    Mutant(
        "codegen/mod/symbolic/lookups.py",
        "if right else ~(other >= value)",
        "if not right else ~(other >= value)",
        named("lookups"),
        "sides change places",
    ),
    Mutant("codegen/mod/symbolic/lookups.py", "(place + step <= count) & ", "", named("lookups"), "a search goes past the end of a row"),
    Mutant(
        "codegen/mod/symbolic/lookups.py",
        "padding_idx is not None and weight",
        "False and weight",
        named("lookups"),
        "padding of an embedding learns",
    ),
    Mutant(
        "codegen/mod/symbolic/vector_statistics.py",
        " | ((part != part) & (value == value))",
        "",
        named("lookups", "nan_comes_first"),
        "argmax passes over NaN",
    ),
    Mutant(
        "codegen/mod/symbolic/vector_moves.py",
        "torch.where(place < 0, place + len(parts), place)",
        "place",
        named("lookups"),
        "-h indexes nothing",
    ),
    Mutant(
        "codegen/mod/symbolic/integers.py",
        'if node.op == "symbol" or (',
        'if node.op in ("symbol", "load") or (',
        named("wide_integers"),
        "products of elements do not wrap around as torch's do",
    ),
]

WAITS = [  # in kernels for Hopper, whose stand-in draws who goes on (tests/support/turns.py)
    Mutant(
        "templates/_hopper.jinja",
        "gl.where(visits.num_blocks > 0, gl.load(visits.indices), full)",
        "gl.where(visits.num_blocks >= 0, gl.load(visits.indices), full)",
        named("hopper_forward", "full_blocks_alone"),
        "a row of full blocks begins with what its other list holds",
    ),
    Mutant(
        "templates/_hopper.jinja",
        "if number >= by:",
        "if number > by:",
        named("hopper_forward", ""),
        "the first head of the second batch entry is one past the first's last",
    ),
    Mutant(
        "templates/_hopper_forward_producer.jinja",
        "            {{ hand_out_numbers() | trim | indent(12) }}\n{% if OUTPUT",
        "{% if OUTPUT",
        named("hopper_forward", ""),
        "the consumers hear nothing of a tile that visits nothing",
    ),
    Mutant(
        "templates/_hopper_backward_consumer.jinja",
        "mbarrier.wait(shared.kv_full, turn & 1)",
        "pass",
        named("hopper_backward", "gradients"),
        "nobody waits for keys and values",
    ),
    Mutant(
        "templates/_hopper_backward_producer.jinja",
        "    mbarrier.wait(shared.tiles.empty, turn & 1)\n",
        "",
        named("hopper_backward", "gradients"),
        "a head's last tile is counted before its dQ is in memory",
    ),
    Mutant(
        "templates/hopper_backward_sliced.py.jinja",
        "    mbarrier.wait(shared.q.full.index(slot), phase)\n",
        "",
        named("hopper_backward", "gradients"),
        "nobody waits for a slice of Q",
    ),
    Mutant(
        "templates/hopper_backward_sliced.py.jinja",
        "            if m_before >= 0:\n                wait_for_other(step - 1, CONSUMER)\n",
        "            pass\n",
        named("hopper_backward", "192"),
        "dS goes to a buffer that the other consumer reads",
    ),
    Mutant(
        "templates/hopper_backward_sliced.py.jinja",
        "store(left)\n    tma.store_wait(0)\n",
        "store(left)\n",
        named("hopper_backward", "192"),
        "a slice of dQ is stored where the TMA unit still reads another",
    ),
    Mutant(
        "templates/hopper_backward_sliced.py.jinja",
        "    fence_async_shared()  # for dS, too\n",
        "",
        named("hopper_backward", "192"),
        "the tensor cores may not find the dS that threads have stored",
    ),
    Mutant(
        "templates/hopper_backward_twice.py.jinja",
        "    if m_before >= 0:\n        wait_for_other(step - 1, CONSUMER)\n",
        "",
        named("hopper_backward", "192"),
        "dS goes to a buffer that the other consumer reads",
    ),
    Mutant(
        "templates/hopper_backward_twice.py.jinja",
        "    tma.store_wait(0)  # the TMA unit has read what the buffer held\n",
        "",
        named("hopper_backward", "192"),
        "a part of dQ is stored where the TMA unit still reads another",
    ),
    Mutant(
        "templates/_hopper_backward_producer.jinja",
        "                    mbarrier.wait(shared.v_read, turn & 1)\n",
        "",
        named("hopper_backward", "192"),
        "dO is copied over V, which is still read",
    ),
    Mutant(
        "templates/hopper_backward_twice.py.jinja",
        "mbarrier.wait(shared.again.full.index(do_slot), (again >> 1) & 1)",
        "pass",
        named("hopper_backward", "192"),
        "nobody waits for dO of a second walk",
    ),
    Mutant(
        "templates/_hopper_decode_output.jinja",
        "mbarrier.wait(shared.weighed.index(slot * 2 + {{ half }}), phase)",
        "pass",
        named("hopper_decode", "what_the_kernel"),
        "weights are multiplied before they are there",
    ),
    Mutant(
        "templates/_hopper_forward_consumer.jinja",
        "    tma.store_wait(0)\n{% endif %}",
        "{% endif %}",
        named("hopper_forward"),
        "warps end before their output has been read",
    ),
    Mutant(
        "templates/hopper_backward.py.jinja",
        "warpgroup_mma_wait({{ V_COLUMNS | length }}, deps=(qk,))",
        "warpgroup_mma_wait({{ V_COLUMNS | length + 1 }}, deps=(qk,))",
        named("hopper_backward", "gradients"),
        "scores are read while their product runs",
    ),
    Mutant(
        "templates/_hopper_forward_output.jinja",
        "        fence_async_shared()\n",
        "",
        named("hopper_forward"),
        "the TMA unit may not find the output that threads have stored",
    ),
    Mutant(
        "templates/_hopper_forward_copies.jinja",
        "mbarrier.wait(shared.v_rest.empty.index({{ rest }}), {{ rest_free }})",
        "",
        named("hopper_forward"),
        "the smaller part of V is copied over one that is still read",
    ),
    Mutant(
        "templates/_hopper_forward_output.jinja",
        "left, right = gl.split(",
        "right, left = gl.split(",
        named("hopper_forward"),
        "halves of an accumulator change places",
    ),
    Mutant(
        "templates/hopper_backward_wide.py.jinja",
        "dk, dv = warpgroup_mma_wait(1, deps=(dk, dv))",
        "dk, dv = warpgroup_mma_wait(2, deps=(dk, dv))",
        named("hopper_backward", "gradients"),
        "Q is let go of while its product runs",
    ),
    Mutant(
        "templates/hopper_backward.py.jinja",
        '"2 * CONSUMER)',
        '"CONSUMER)',
        named("hopper_backward", "gradients"),
        "dK of 32 columns leaves through what the other consumer writes next",
    ),
]
VARIOUS = [
    Mutant(
        "codegen/mod/symbolic/dispatch.py",
        "    if not running().hides_gradients() or any(found is a for a in args):\n        return found\n    return _without_gradient(found)",
        "    return found",
        named("backward", "no_grad_makes"),
        "what is only moved keeps the gradient that no_grad hides",
    ),
    Mutant(
        "codegen/text/addresses.py",
        "if index.dtype.itemsize < 4:",
        "if False:",
        named("cpp", "small_integers"),
        "a stride is brought into int8",
    ),
    Mutant(
        "codegen/text/expressions.py",
        "if difference and not self.target.rows_before_first:",
        "if difference:",
        named("prefill", "negative_positions"),
        "bits of negative positions are no differences",
    ),
    Mutant(
        "flexpress/distributed/attention.py",
        "captured = [apart(t) for t in values[: len(graph.tensors)]]",
        "captured = values[: len(graph.tensors)]",
        named("context", "captured_is_read"),
        "an expanded tensor gets its gradient several times",
    ),
    Mutant(
        "codegen/run/backward.py",
        "return out if out.stride() == do.stride() else with_rows(out), rows.values.contiguous()",
        "return out, rows.values",
        named("kinds_of_tensors", "anew"),
        "what hooks have laid out anew is read as it was",
    ),
    Mutant(
        "flexpress/calls/transformed.py",
        "graph, values = bind_once(mod, kind, device)",
        "graph, values = bind_once(mod, kind, None)",
        named("functions", "asks_for"),
        "a mod is told no device inside torch.func",
    ),
    Mutant(
        "templates/_strides.jinja",
        '{{ names | join(", ") }} = {{ names | join(".to(%s.int64) * VECTOR, " % tl) }}.to({{ tl }}.int64) * VECTOR',
        '{{ names | join(", ") }} = {{ names | join(" * VECTOR, ") }} * VECTOR',
        named("far_strides", "keys"),
        "a stride of 2**31 elements wraps around",
    ),
    Mutant(
        "codegen/text/addresses.py",
        "step = language.cast(step, torch.int64) if self.layouts[load.attr].wide else step",
        "pass",
        named("far_strides", "bias"),
        "so does that of a captured tensor",
    ),
    Mutant(
        "templates/update_cache.py.jinja",
        "head = tl.program_id(1).to(tl.int64)",
        "head = tl.program_id(1)",
        named("far_strides", "heads"),
        "so does where the head of a cache begins",
    ),
    Mutant(
        "codegen/device/streams.py",
        "        stream.wait_event(self.event)\n",
        "",
        named("streams", "once"),
        "a stream reads what another one is about to make",
    ),
    Mutant(
        "flexpress/calls/packing.py",
        "(self.sequence_q.shape[0], self.sequence_k.shape[0])",
        "(len(self.sequence_q), len(self.sequence_k))",
        named("compiled_lengths", "packed"),
        "each number of packed tokens is a graph of its own",
    ),
    Mutant(
        "flexpress/masks/mask_mods.py",
        "tensor = tensor.squeeze(i)",
        "tensor = tensor.squeeze()",
        named("compiled_lengths", "extents"),
        "an exported program drops dimensions that are 1 by chance",
    ),
    Mutant(
        "codegen/plan/extras.py",
        "return wanted or scale <= SMALLEST_SCALE",
        "return wanted",
        named("sinks", "tiny"),
        "a backward pass takes scaled scores for unscaled ones",
    ),
    Mutant(
        "flexpress/graphs/custom_ops.py",
        "if shapes_alone and others:",
        "if False:",
        named("serving", "without_values"),
        "an operator returns memory that nobody wrote",
    ),
    Mutant(
        "flexpress/graphs/custom_ops.py",
        "            increment_version(args[i])",
        "            pass",
        named("short_ways", "writes_are_counted"),
        "autograd does not know of an operator's writes",
    ),
    Mutant(
        "flexpress/graphs/custom_ops.py",
        "if followed or (torch",
        "if (torch",
        named("short_ways", "which_way or walked"),
        "a mode does not see what is below an operator",
    ),
    Mutant(
        "flexpress/operators/attention_operators.py",
        "if walked_in_every_length(size):",
        "if True:",
        named("short_ways", "cannot_walk"),
        "kernels walk blocks that no tile divides",
    ),
    Mutant(
        "codegen/device/cpp_compiler.py",
        "if isinstance(why, CompilerStopped):",
        "if False:",
        named("cpp", "stopped"),
        "a compiler that was killed once is given up",
    ),
    Mutant(
        "flexpress/caches/splits.py",
        "causal if mask_mod is None else mask_mod",
        "mask_mod or causal",
        named("cached", "by_none"),
        "a mod whose truth is False is left out",
    ),
    Mutant(
        "flexpress/flash_attn/kvcache.py",
        "    if bring is not None:\n        bring()\n",
        "",
        named("flash_attn_cache", "padding"),
        "keys behind left padding are never copied",
    ),
    Mutant(
        "codegen/text/expressions.py",
        "if id(node) in self.deciding",
        "if False",
        named("decisions", "approximated"),
        "a mask is decided by an approximate tanh in some kernels",
    ),
    Mutant(
        "codegen/mod/tracing/calls.py",
        "if state.place is None or reader.is_the_same(value):",
        "if True:",
        named("captured_callables", "another"),
        "a module that was captured first is called for all others",
    ),
    Mutant(
        "codegen/mod/captured/program.py",
        "value is member and not operators and own.isdisjoint(attributes)",
        "value is member",
        named("captured_callables", "enumerations"),
        "what a property of an enumeration's member gave is part of the trace",
    ),
    Mutant(
        "codegen/mod/symbolic/nodes.py",
        "value.run is trace or trace.numbers is None",
        "True",
        named("captured_callables", "kept"),
        "a tensor that a mod keeps is another argument at the next call",
    ),
    Mutant(
        "codegen/mod/symbolic/vector_statistics.py",
        "inside = torch.where(none, 1.0, x)",
        "inside = x",
        named("vectors", "deviations"),
        "a gradient at 0 is NaN",
    ),
    Mutant(
        "codegen/mod/tracing/trace.py",
        "result = with_rounded_products(result, run.table)",
        "pass",
        named("decisions"),
        "a compiler makes one multiply-add of what a mask is decided by",
    ),
    Mutant(
        "flexpress/flash_attn/kvcache.py",
        "(filled.clamp(max=room) - leftpad).clamp(min=0)",
        "filled.clamp(max=room)",
        named("flash_attn_cache", "padding"),
        "a sequence behind its padding is as long as with it",
    ),
    Mutant(
        "flexpress/caches/cached_arguments.py",
        "check_shared(shared_prefix, problem.query, tables, k_cache)",
        "check_shared(shared_prefix, problem.query, tables._replace(q_offset=problem.q_offset), k_cache)",
        named("shared_prefix", "columns"),
        "a contiguous copy of q_offset is another step's",
    ),
    Mutant(
        "codegen/mod/table/rows_arithmetic.py",
        "result = square if result is None else",
        "result = square if result is None or result.expr.is_literal else",
        named("ops", "literals"),
        "a power of a number is what came last",
    ),
    Mutant(
        "codegen/mod/symbolic/methods.py",
        "and id(expr) in with_indices(expr):",
        "and False:",
        named("wide_integers"),
        "a number like an index is int32 whatever is beside it",
    ),
    Mutant(
        "codegen/run/captured.py",
        "axes[name] for name in own",
        "axes[name] for name in sorted(own)",
        named("captured_sums"),
        "a gradient by head and batch entry is one by batch entry and head",
    ),
    Mutant(
        "codegen/run/captured.py",
        "moved = axis",
        "moved = False and axis",
        named("shifts", "gather and cpu"),
        "gradients of what is read by position go where blocks without a shift are",
    ),
    Mutant(
        "codegen/run/captured.py",
        "if values.shape != tensor.shape:",
        "if False:",
        named("captured_sums"),
        "a gradient ends where positions do",
    ),
    Mutant(
        "codegen/device/counters.py",
        "if last != number:",
        "if last is None:",
        named("counters"),
        "a graph counts where the last one counted",
    ),
    Mutant(
        "flexpress/caches/cached_calls.py",
        "if B > 1 and query.stride(0)",
        "if False and query.stride(0)",
        named("prefill", "serves"),
        "queries are copied to lie one after another",
    ),
    Mutant(
        "flexpress/caches/cached.py",
        "if call.lse is not lse:",
        "if False:",
        named("prefill", "padded"),
        "lse of padded queries is not written",
    ),
    Mutant(
        "codegen/run/backward.py",
        '.masked_fill(sinks == float("-inf"), 0.0)',
        "",
        named("sinks", "no_sink_without"),
        "a sink of -inf has a gradient where there are no keys",
    ),
    Mutant(
        "flexpress/inputs/sinks.py",
        ".clamp(min=torch.finfo(torch.float32).min)",
        "",
        named("sinks", "folded"),
        "a sink of -inf makes an empty row NaN",
    ),
    Mutant(
        "flexpress/inputs/sinks.py",
        "before, found = before + d_lse * share, found + d_lse * of_sink",
        "before, found = before + d_lse, found + d_lse * of_sink",
        named("sinks_derivatives", "without_keys"),
        "second derivatives take all of the gradient of lse for that of the keys",
    ),
    Mutant(
        "flexpress/inputs/sinks.py",
        "torch.where(lse > scores, lse + softplus(scores - lse), scores + softplus(lse - scores))",
        "torch.logaddexp(lse, scores.expand_as(lse))",
        named("sinks_derivatives", "without_keys"),
        "second derivatives are NaN where a row has its sink alone",
    ),
    Mutant(
        "flexpress/calls/transformed.py",
        "out, lse = fold_sinks(out, lse, self.sinks)",
        "pass",
        named("sinks_derivatives", "transforms"),
        "sinks do not count in transforms",
    ),
    Mutant(
        "flexpress/calls/probabilities.py",
        "d_entropy * share * (1.0 - turned)",
        "d_entropy * share",
        named("probabilities", "gradients"),
        "the entropy's gradient forgets that weight goes to the sink",
    ),
    Mutant(
        "flexpress/calls/probabilities.py",
        "of_k.unflatten(1, (k.shape[1], -1)).sum(2)",
        "of_k.unflatten(1, (-1, k.shape[1])).sum(1)",
        named("probabilities", "gradients"),
        "gradients of column sums go to other heads of keys",
    ),
    Mutant(
        "flexpress/calls/probabilities.py",
        "        found = map(added, found, gradients_of(problem, (out, rows, *x), moved, None, of_values))\n",
        "",
        named("probability_transforms", "gradients_and_tangents"),
        "the tangent of column sums forgets that a sink takes more or less",
    ),
    Mutant(
        "flexpress/calls/probabilities.py",
        "entropy_t = share * entropy_t + ",
        "entropy_t = entropy_t + ",
        named("probability_transforms", "gradients_and_tangents"),
        "the entropy's tangent is that without sinks",
    ),
    Mutant(
        "flexpress/calls/probabilities.py",
        "    base = torch.where(base.isfinite(), base, 0.0)",
        "    base = torch.zeros_like(base)",
        named("probability_transforms", "very_low"),
        "the mean of a row's scores has no digits for what they differ by",
    ),
    Mutant(
        "codegen/mod/symbolic/vector_moves.py",
        "_by_numbers(index))",
        "_by_numbers(args[1]))",
        named("vectors", "two_dimensions"),
        "a nested list of places is taken for one for each dimension",
    ),
    Mutant(
        "flexpress/calls/mapped.py",
        "kind == ALONE and dim is not None for",
        "kind == ALONE and dim is None for",
        named("probability_transforms", "vmap"),
        "mapped sinks are taken for those of one call",
    ),
    Mutant(
        "codegen/mod/tracing/trace.py",
        "result.ndim > 0 and result.numel() == 1",
        "False",
        named("vectors", "one_element"),
        "a product with a parameter of shape (1,) is refused",
    ),
    Mutant(
        "flexpress/masks/mask_lists.py",
        "self._walked, self._decided and self._fixed",
        "self._walked, self._decided",
        named("block_lists", "whatever_mask_mod_reads_later"),
        "odd blocks that were full ask mask_mod again",
    ),
    Mutant(
        "flexpress/calls/recorded.py",
        "decided = block_mask._fixed  #",
        "pass  #",
        named("block_lists", "whatever_mask_mod_reads_later"),
        "the same under torch.compile",
    ),
    Mutant(
        "flexpress/inputs/dropout.py",
        "    if dropped == 0:\n",
        "    if p == 0:\n",
        named("context", "seed_of_dropout"),
        "ranks wait for one whose dropout_p rounds to 0",
    ),
    Mutant(
        "codegen/run/statistics.py",
        "        if not launches:\n            launch_nothing([found.launch])\n",
        "",
        named("precompile", "no_attention_kernel"),
        "precompile computes statistics",
    ),
    Mutant(
        "examples/engine/scheduler.py",
        "self.reason = self.reason or said or",
        "self.reason = said or",
        named("engine", "cancelled_in_a_step"),
        "a request that its own stop cancels goes on",
    ),
    Mutant(
        "codegen/mod/symbolic/vector_dtypes.py",
        "if len(dtypes) > 1:",
        "if False:",
        named("vectors", "refused"),
        "products of two dtypes are computed",
    ),
    Mutant(
        "codegen/mod/symbolic/vectors.py",
        "if len(set(dims)) < len(dims):",
        "if False:",
        named("vectors", "refused"),
        "a dimension is reduced twice",
    ),
    Mutant(
        "flexpress/graphs/custom_ops.py",
        "                if missing:\n",
        "                if False:\n",
        named("operators", "missing"),
        "a tensor that is missing is not named",
    ),
    Mutant(
        "templates/_hopper_forward_consumer.jinja",
        "{{ drop_b }}, {{ drop_head }}, drop_m0",
        "{{ drop_b }}, h, drop_m0",
        named("dropout_parts", "on_hopper"),
        "a part's heads drop what the first heads do, on Hopper",
    ),
    Mutant(
        "templates/_cpu.jinja",
        '"int32_t(z + SEED[1])"',
        '"z"',
        named("dropout_parts", "in_cpp"),
        "a part's batch entries drop what the first ones do, in C++",
    ),
    Mutant(
        "flexpress/distributed/dtensors.py",
        "dropout = of_first_rank(dropout, self.groups)",
        "pass",
        named("dtensors", "dropout_of_the_whole"),
        "ranks that have the same heads drop different weights",
    ),
    Mutant(
        "codegen/mod/tracing/calls.py",
        "return any(map(_would_be_instance, kind)) if isinstance(kind, tuple) else issubclass(torch.Tensor, kind)",
        "return False",
        named("captures", "symbols_are_tensors"),
        "symbols are no tensors",
    ),
    Mutant(
        "codegen/mod/symbolic/vector_moves.py",
        " and not is_traced_kind(index):",
        ":",
        named("compiled_calls", "tensors_of_indices"),
        "a compiler's tensors of indices are asked for their values",
    ),
    Mutant(
        "flexpress/calls/autograd.py",
        "        if elsewhere:  # then",
        "        if False:  # then",
        named("checkpoints", "another_kernel"),
        "a checkpoint's rows are taken for those of the forward pass",
    ),
    Mutant(
        "codegen/mod/tracing/bind.py",
        "    if (bucket is None or bucket.computes) and is_watched():",
        "    if bucket is None and is_watched():",
        named("checkpoints", "two_kernels or evaluation"),
        "a checkpoint counts what traces that do not fit compute",
    ),
    Mutant(
        "codegen/mod/tracing/bind.py",
        "    if (bucket is None or bucket.computes) and is_watched():",
        "    if bucket is not None and bucket.computes and is_watched():",
        named("checkpoints", "every_call"),
        "a checkpoint counts what tracing computes",
    ),
    Mutant(
        "codegen/mod/captured/watched.py",
        "            stack.enter_context(_disable_current_modes())",
        "            pass",
        named("checkpoints", "two_kernels or evaluation"),
        "a selective checkpoint counts what traces that do not fit compute",
    ),
    Mutant(
        "flexpress/graphs/bound_mods.py",
        "    if gather is not None:",
        "    if False:",
        named("dtensors", "operators_are_seen"),
        "DTensors that a mod captures are not gathered under modes",
    ),
    Mutant(
        "flexpress/distributed/dtensors.py",
        "return part.joined(*attend_and_look(call, output_max, wanted, deterministic))",
        "return part.joined(*attend_and_look(call, output_max, wanted._replace(column_sums=False), deterministic))",
        named("dtensors", "statistics_of"),
        "column sums of DTensors are left out",
    ),
    Mutant(
        "templates/row_statistics.py.jinja",
        "+ tl.where(weight > 0.0, weight * (sink - m_i), 0.0)",
        "",
        named("probabilities", "any_problem or gradients"),
        "the sink is no outcome of the entropy",
    ),
    Mutant(
        "codegen/run/statistics.py",
        "return bound._replace(lists=make(bound.mask), transposed=partial(make, transposed=True))",
        "return bound",
        named("packed_probabilities", "long"),
        "lists of blocks that begin anywhere are read as those of even ones",
    ),
    Mutant(
        "flexpress/calls/packed_call.py",
        "torch.where(top_index < 0, top_index, top_index - starts[:, None])",
        "top_index",
        named("packed_probabilities", "any_problem"),
        "the top index is a packed position",
    ),
    Mutant(
        "templates/cached_columns.py.jinja",
        "sums = tl.where(n < KV_LEN, sums, 0.0)",
        "",
        named("cached_probabilities", "any_batch and not cpp"),
        "positions behind a sequence are given something",
    ),
    Mutant(
        "codegen/run/cached_statistics.py",
        "weights * (parts.mean + less)",
        "weights * parts.mean",
        named("cached_probabilities", "many_keys"),
        "what parts leave for the entropy is not of one largest score",
    ),
    Mutant(
        "codegen/run/cached_statistics.py",
        "torch.where(parts.largest == most[..., None], parts.top, NO_KEY).amin(-1)",
        "parts.top[..., 0]",
        named("cached_probabilities", "many_keys"),
        "the top index is that of the first part",
    ),
    Mutant(
        "codegen/plan/cached_statistics.py",
        "pack = 1 if by_head else",
        "pack =",
        named("cached_probabilities", "many_keys"),
        "heads with block lists of their own share a tile",
    ),
    Mutant(
        "flexpress/caches/cached_probabilities.py",
        "masked_fill_(((entry < 0) | (entry >= entries))[:, None, None], 0.0)",
        "masked_fill_(entry.isnan()[:, None, None], 0.0)",
        named("cached_probabilities", "outside"),
        "pages outside of the cache are read as others",
    ),
    Mutant(
        "codegen/run/statistics.py",
        "bound.options, wanted, sinks)",
        "bound.options, wanted)",
        named("probabilities", "kernels_of_their_own"),
        "a call with sinks gets the kernel of one without",
    ),
    Mutant(
        "flexpress/sdpa.py",
        "if math.prod(batch) > 1:",
        "if math.prod(batch) > 2:",
        named("sdpa", "some_batch"),
        "a mask of two batch entries is that of the first one",
    ),
    Mutant(
        "flexpress/masks/block_mask.py",
        "listed_status(status, self._lists, partial or not cut, self.BLOCK_SIZE)",
        "listed_status(status, self._lists, True, self.BLOCK_SIZE)",
        named("slices", "full_blocks_of_lists"),
        "keys past the end of a mask that was cut are attended to",
    ),
    Mutant(
        "codegen/run/cpu_decode.py",
        "1 if lists and lists.by_head else ",
        "",
        named("cpp", "lists_of_their_own"),
        "heads that share keys take the lists of the first one",
    ),
    Mutant(
        "codegen/text/gradient_text.py",
        "tuple(sorted({use.name for use in uses_of(codes)}))",
        "frozenset({use.name for use in uses_of(codes)})",
        named("golden", "one_name"),
        "each process prints backward kernels anew",
    ),
    Mutant(
        "codegen/device/cpp_build.py",
        '"No space left on device", "Disk quota exceeded",',
        '"Disk quota exceeded",',
        named("cpp", "was_stopped"),
        "a disk that was full once turns C++ off",
    ),
    Mutant(
        "flexpress/steps/layer_step.py",
        "if 1 < rows < sequences and q.shape[1] == 1:",
        "if False:",
        named("serving", "rows_are_sequences"),
        "rows of a decoding batch go to other sequences",
    ),
    Mutant(
        "codegen/mod/symbolic/vectors.py",
        "if isinstance(value, torch.Tensor) and not value.ndim:",
        "if False:",
        named("vectors", "number_in_a_tensor"),
        "a number in a tensor is that of the first call",
    ),
    Mutant(
        "codegen/mod/symbolic/symbols.py",
        "            left += value._make",
        "            left += ()",
        named("mod_errors", "test_scores"),
        "a view of what was changed in place has the old elements",
    ),
    Mutant(
        "codegen/mod/graphs/wide.py",
        "if not fits_int32(value)}",
        "if False}",
        named("torch_compile", "32_bits"),
        "an integer beyond int32 is cut",
    ),
    Mutant(
        "flexpress/calls/merge.py", "~torch.isneginf(stacked).all(0)", "total > 0", named("merge", "failed"), "NaN is taken for no keys"
    ),
    Mutant(
        "flexpress/caches/kv_cache.py",
        "tensor.clone() if any(",
        "tensor if any(",
        named("kv_cache", "move"),
        "tokens are read while they are written",
    ),
    Mutant(
        "flexpress/calls/derivatives.py",
        "enumerate(needs[3 : 3 + count])",
        "enumerate(needs[3:])",
        named("functions", "mask_reads"),
        "gradients are asked for of what a mask reads",
    ),
    Mutant(
        "flexpress/distributed/attention.py",
        "torch.zeros(captured[i].shape, dtype=torch.float32, device=q.device)",
        "torch.zeros_like(captured[i], dtype=torch.float32)",
        named("context", "lie_otherwise"),
        "ranks add up captured gradients as they lie in memory",
    ),
    Mutant(
        "flexpress/distributed/attention.py",
        "graph and text_of(graph),",
        "graph,",
        named("context", "forgotten"),
        "a rank that traces a mod again asks the others, who do not answer",
    ),
    Mutant(
        "flexpress/distributed/attention.py",
        " or (several and size == 1 and name.lower() in symbols)",
        "",
        named("context", "masks_by_head_of"),
        "a plan has the first head's mask for all",
    ),
    Mutant(
        "flexpress/distributed/heads.py",
        "return Gathered.apply(gradient, ctx.dim, ctx.counts, ctx.group), None, None, None",
        "return torch.nn.functional.pad(gradient.movedim(ctx.dim, -1), (0, sum(ctx.counts) - gradient.shape[ctx.dim])).movedim(-1, ctx.dim), None, None, None",
        named("context", "twice"),
        "a second derivative of the whole is that of one part",
    ),
    Mutant(
        "flexpress/distributed/shards.py",
        "        return arguments, part.sinks\n",
        "",
        named("context_parts", "one_rank_lacks"),
        "sinks are gathered before ranks have agreed",
        "crash",
    ),
    Mutant(
        "templates/backward_dq.py.jinja",
        "{{ c.sum }} = tl.where(offs_m < {{ END }}, {{ c.sum }}, 0.0)",
        "pass",
        named("captured_sums", "past_the_last and first"),
        "a gradient by head sums rows that are no queries",
    ),
    Mutant(
        "templates/tangent_dq.py.jinja",
        "tl.sum(tl.where(inside, {{ c.sum }}, 0.0), 0)",
        "tl.sum({{ c.sum }}, 0)",
        named("captured_sums", "past_the_last and second"),
        "a second derivative by head sums rows that are no queries",
    ),
    Mutant("codegen/plan/extras.py", "scale > SMALLEST_SCALE", "scale > 0.0", named("scales", "tiny"), "a scale becomes 0 in base 2"),
    Mutant(
        "templates/_cache.jinja",
        "in_page = in_page.to(tl.int64)",
        "pass",
        named("far_strides", "large_pages"),
        "rows of a page begin at offsets of 32 bits",
        "crash",
    ),
    Mutant(
        "codegen/plan/geometry.py",
        " or 255 * s[2] + (shape[3] - 1) * s[3] >= 1 << 31",
        "",
        named("far_strides", "columns_too_far"),
        "columns lie beyond 32 bits",
        "crash",
    ),
    Mutant(
        "codegen/mod/graphs/sums.py",
        "return cast(part, dtype) if isinstance(part, Sym)",
        "return part if isinstance(part, Sym)",
        named("sums", "add_up"),
        "narrow integers wrap around where they are added to scores at once",
    ),
    Mutant(
        "codegen/text/addresses.py",
        " and index.dtype.itemsize >= 4:",
        ":",
        named("indexing", "narrow_integers"),
        "addresses take the terms of an index that wraps around",
        "crash",
    ),
    Mutant(
        "codegen/run/captured.py",
        "tensor.clone(memory_format=torch.contiguous_format) if 0",
        "tensor.contiguous() if 0",
        named("captured_sums", "any_stride"),
        "a dimension of one index has no position in a gradient's grid",
    ),
    Mutant(
        "codegen/text/lower.py",
        '{id(n) for n in nodes} if graph.kind == "zone" else deciding(nodes)',
        "deciding(nodes)",
        named("decisions", "zones"),
        "zones hold approximate quotients",
    ),
    Mutant(
        "codegen/mod/table/rows_special.py",
        "infinite = (x == y) & (torch.abs(x) == math.inf)",
        "infinite = x == y",
        named("second_derivatives", "two_forms"),
        "logaddexp has no second derivative between equal numbers",
    ),
    Mutant(
        "codegen/mod/table/rows_composed.py",
        "torch.where(min < max, min, torch.detach(min))",
        "min",
        named("grad", "clamp"),
        "the lower of two equal bounds has a gradient",
    ),
    Mutant(
        "flexpress/operators/attention_operators.py",
        "    if not asked.rows:",
        "    if False:",
        named("operators", "recorded_without"),
        "a backward pass reads what no forward pass wrote",
    ),
    Mutant(
        "flexpress/operators/attention_operators.py",
        "if rows.shape != (*query.shape[:3], 2) or out.shape",
        "if out.shape",
        named("operators", "rows_of_another"),
        "kernels read rows that are not there",
        "crash",
    ),
    Mutant(
        "flexpress/caches/cached_arguments.py",
        "*checks.autocast(queries)",
        "queries",
        named("operators", "autocast"),
        "a recorded cache leaves autocast out",
    ),
    Mutant(
        "flexpress/graphs/dynamo.py",
        "found.install_dict_keys_match_guard()",
        "pass",
        named("torch_compile", "come_later"),
        "options that are added are not seen",
    ),
    Mutant(
        "flexpress/masks/given_lists.py",
        "kept[0] == versions and ",
        "",
        named("masks_as_torchs", "rewritten"),
        "what a user writes to a mask's lists is not seen",
    ),
    Mutant(
        "flexpress/masks/block_lists.py",
        "return torch.argsort(listed[..., :columns], dim=-1, descending=True, stable=True).to(torch.int32)",
        "return torch.nn.functional.pad(indices, (0, columns - indices.shape[-1]))",
        named("masks_as_torchs", "users_crop"),
        "shown lists hold zeros past their counts",
    ),
    Mutant(
        "flexpress/masks/foreign_masks.py",
        " or found.owner() is not mask",
        "",
        named("torchs_masks", "copies"),
        "a copy of a mask changes the mask_mod of what the mask has kept",
    ),
    Mutant(
        "templates/_exported_gradients.jinja",
        "if tensor.stride() == strides and tensor.data_ptr() % 16 == 0:",
        "if True:",
        named("export_cpu", "anew"),
        "exported kernels read saved tensors as they lay before",
    ),
    Mutant(
        "templates/_exported.jinja",
        "    check_storage(name, tensor)\n",
        "",
        named("export_cpu", "anew"),
        "exported kernels read freed memory",
        "crash",
    ),
    Mutant(
        "flexpress/caches/cached_mods.py",
        "position(b, torch.minimum(q_idx, cu_seqlens_q[b + 1] - cu_seqlens_q[b] - 1))",
        "position(b, q_idx)",
        named("cpp", "alone"),
        "a sequence's blocks follow from how many queries others have",
    ),
    Mutant(
        "examples/engine/scheduler.py",
        "for request in [r for r in self.waiting if r.asked < len(r.made)]:",
        "for request in []:",
        named("engine_scheduler", "stop_that_fails"),
        "an answer goes on behind a stop that failed",
    ),
    Mutant(
        "examples/engine/text.py",
        "last if len(piece) > len(known) else first",
        "last",
        named("engine_scheduler", "spaces"),
        "a text loses a space behind a token that shows nothing",
    ),
    Mutant(
        "codegen/plan/hopper_forward.py",
        'm.staged("q_idx", "kv_idx").handed_bytes for',
        '4 * len(m.staged("q_idx", "kv_idx").handed) for',
        named("hopper_elements", "64_bits"),
        "a plan takes ids of 64 bits for numbers of 32",
    ),
    Mutant(
        "codegen/run/backward_kernels.py",
        "reason = lacks_room(planned(_plans, self, call))",
        "pass",
        named("hopper_backward_offline", "its_room"),
        "a backward kernel is compiled that no multiprocessor can hold",
    ),
    Mutant(
        "codegen/mod/graphs/tangent.py",
        "reversed(moved[id(dot)])",
        "moved[id(dot)]",
        named("long_dots_derivatives", "forward_over"),
        "a row of a dot product gets what its own tangent adds, not the other's",
    ),
    Mutant(
        "codegen/mod/graphs/tangent.py",
        "                rows += [(role, dot, known[id(gradient)])] if id(gradient) in known else []\n",
        "",
        named("long_dots_derivatives", "forward_over"),
        "the gradient of a row in a dot product has a tangent for its own factor alone",
    ),
    Mutant(
        "codegen/plan/tangent.py",
        "ends_keys=not own",
        "ends_keys=False",
        named("long_dots", "second"),
        "rows of keys past the last one, which may be NaN, come into sums",
    ),
    Mutant(
        "codegen/plan/cpu_tangent.py",
        ", *score.tangents.of_rows)",
        ",)",
        named("cpp", "derivative_of_dot"),
        "rows of dot products have no second derivative in C++",
        "time-out",
    ),
    Mutant(
        "codegen/mod/symbolic/dispatch.py",
        "TensorView(_detached(found.tensor), found.index)",
        "found",
        named("backward", "rows_that_no_grad_reads or product_that_no_grad"),
        "no_grad does not hide what is left of a tensor",
    ),
    Mutant(
        "codegen/mod/symbolic/dispatch.py",
        "tuple(replace(row, tensor=_detached(row.tensor)) for row in found.rows)",
        "found.rows",
        named("backward", "rows_that_no_grad_reads"),
        "no_grad does not hide the factors of a product of rows",
    ),
    Mutant(
        "codegen/mod/symbolic/vector_moves.py",
        "view = Sym(item.expr)",
        "view = item",
        named("backward", "rows_that_no_grad_reads"),
        "a view of a symbol that no_grad makes has a gradient",
    ),
    Mutant(
        "codegen/text/expressions.py",
        "if row.picks is not None and",
        "if False and row.picks is not None and",
        named("ops", "literals"),
        "the smaller of a narrow integer and a number has 32 bits",
    ),
    Mutant(
        "flexpress/calls/autograd.py",
        "map(savable, saved)",
        "saved",
        named("kinds_of_tensors", "inference_mode"),
        "tensors of inference mode are not saved",
    ),
    Mutant(
        "codegen/mod/captured/tensors.py",
        "return tensor.clone() if tensor is not None and tensor.is_inference() else tensor",
        "return tensor",
        named("kinds_of_tensors", "inference_mode"),
        "tensors of inference mode are not copied",
    ),
    Mutant(
        "flexpress/flash_attn/tables.py",
        "    if tracing():\n        return torch.ops.flexpress.flash_cache_lengths(*given)\n",
        "    if tracing():\n        return lengths\n",
        named("compiled_flash_attn", "looked_at"),
        "tables of caches are not looked at in compiled programs",
    ),
    Mutant(
        "flexpress/graphs/dynamo.py",
        "        if copy is not record:\n            vars(record).update(vars(copy))\n            tx.output.side_effects = record\n",
        "        del copy\n",
        named("compiled_changes", "written or counts"),
        "what a compiled program writes to its objects behind a call is lost",
    ),
    Mutant(
        "flexpress/masks/mask_attributes.py",
        "        if any(map(is_traced_kind, tensors)):  # while",
        "        if False:  # while",
        named("compiled_changes", "as_an_argument"),
        "a mask is no argument of a strictly exported model",
    ),
    Mutant(
        "codegen/mod/graphs/wide.py",
        "[torch.iinfo(torch.int32).max if type(v) is int else v for v in values]",
        "list(values)",
        named("wide_integers", "any_captured"),
        "exported files are for numbers as large as the example's",
    ),
    Mutant(
        "templates/cpu_captured.h",
        "INLINE Vec<int64_t> operator+(Vec<T> a, Vec<U> b) { return to_int64(a) + to_int64(b); }",
        "INLINE Vec<int64_t> operator+(Vec<T> a, Vec<U> b) { return to_int64(a) - to_int64(b); }",
        named("cpp", "32_and_of_64"),
        "offsets of both widths are subtracted",
        "crash",
    ),
    Mutant(
        "codegen/device/cpp_compiler.py",
        "    elif _works():",
        "    elif False:",
        named("cpp", "leaves_the_others"),
        "one kernel that does not compile moves all to the interpreter",
    ),
    Mutant(
        "codegen/device/cpp.py",
        "        if self._failed[0] == name:",
        "        if False:",
        named("cpp", "leaves_the_others"),
        "a kernel that does not compile is compiled at every call",
    ),
    Mutant(
        "codegen/device/cpp.py",
        "    return threads if threads == 1 or _began[0] == os.getpid() else 1",
        "    return threads",
        named("cpp", "forked_child and not exported"),
        "a forked child waits for threads of its parent",
    ),
    Mutant(
        "flexpress/graphs/dynamo.py",
        '        if _reads(read) or getattr(read, "target", None) is _number_in:',
        "        if False:",
        named("compiled_calls", "read_from_tensors"),
        "numbers that a mod reads from tensors are arguments of operators",
    ),
    Mutant(
        "flexpress/graphs/dynamo.py",
        "        elif _comes_of_an_integer_read(node):",
        "        elif False:",
        named("compiled_calls", "integers_that"),
        "floats of integers that a mod reads are arguments of operators",
    ),
    Mutant(
        "flexpress/flash_attn/tables.py",
        "            if padding > n:",
        "            if False:",
        named("flash_attn_cache", "say_what or bad_arguments or errors"),
        "padding reaches beyond a sequence",
    ),
    Mutant(
        "flexpress/flash_attn/bert_padding.py", "(lengths > S) | ", "", named("bert_padding", "wraps_around"), "sums of lengths wrap around"
    ),
    Mutant(
        "flexpress/steps/layer_step.py",
        "        if length and starts[b + 1] - starts[b] != 1:",
        "        if False:",
        named("serving", "one_token_are_sequences"),
        "rows of one token have cu_seqlens of others",
    ),
]

MUTANTS = [
    *CAPTURES,
    *INTERVALS,
    *CACHE,
    *PAGES,
    *PREFIXES,
    *CHECKS,
    *DROPOUT,
    *SINKS,
    *FLOAT8,
    *LAUNCHES,
    *INTEGRATIONS,
    *ELSEWHERE,
    *ELEMENTS,
    *MEANINGS,
    *WAITS,
    *EXPORTS,
    *PROBABILITIES,
    *VARIOUS,
]


def copied(place: Path) -> Path:
    """The packages and tests in one folder, so that it alone is imported from: with its packages as they are once installed."""
    ignored = shutil.ignore_patterns(".hypothesis", ".pytest_cache")
    shutil.copytree(ROOT / "flexpress", place / "flexpress", ignore=ignored)
    for name in ("codegen", "templates", "mods"):
        shutil.copytree(ROOT / name, place / "flexpress" / name, ignore=ignored)
        (place / name).symlink_to(place / "flexpress" / name)
    for name in ("tests", "examples"):
        shutil.copytree(ROOT / name, place / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "docs", "Makefile", "generated", "benchmarks"):
        if (ROOT / name).exists():
            (place / name).symlink_to(ROOT / name)
    return place


def tested(place: Path, arguments: tuple[str, ...], seconds: float = SECONDS) -> tuple[str, str]:
    """What becomes of pytest in a copy ("passed", "failed", "time-out" or "crash"), and what it says at the end."""
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:warnings", "--tb=line", *arguments]
    try:
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "time-out", f"{seconds} s"
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    said = next((line for line in lines if line.startswith(("FAILED", "ERROR", "Fatal"))), lines[-1])
    return {0: "passed", 1: "failed"}.get(done.returncode, "crash" if done.returncode < 0 else f"status {done.returncode}"), said


def places(text: str, wanted: str) -> list[tuple[int, int]]:
    """Where `wanted` begins and ends, however its lines are broken. Blanks at its ends are taken as they are: they may be a line's indentation."""
    pattern = ""
    words = re.findall(r"\s+|[(\[{]|[)\]}]|[^\s()\[\]{}]+", wanted)
    for i, word in enumerate(words):
        if word.isspace():
            pattern += re.escape(word) if i in (0, len(words) - 1) else r"\s+"
        elif word in "([{":
            pattern += re.escape(word) + r"\s*"
        else:
            pattern += r"(?:,?\s*)" + re.escape(word) if word in ")]}" else re.escape(word)
    return [found.span() for found in re.finditer(pattern, text)]


def tried(number: int) -> tuple[int, bool, str]:
    """A mutant in a copy of its own: its number, whether it was noticed, and by what."""
    mutant = MUTANTS[number]
    with tempfile.TemporaryDirectory(prefix="flexpress-mutant-") as folder:
        place = copied(Path(folder))
        file = place / mutant.file
        text = file.read_text(encoding="utf-8")
        found = places(text, mutant.old)
        if len(found) != 1:
            return number, False, f"its text occurs {len(found)} times"
        file.write_text(text[: found[0][0]] + mutant.new + text[found[0][1] :], encoding="utf-8")
        how, said = tested(place, mutant.tests)
    return number, how == "failed" or how == mutant.ends, f"{how}: {said}"


def base_passes(numbers: list[int]) -> bool:
    """Do the tests pass without mutants?"""
    with tempfile.TemporaryDirectory(prefix="flexpress-mutant-") as folder:
        place = copied(Path(folder))
        for tests in dict.fromkeys(MUTANTS[n].tests for n in numbers):
            how, said = tested(place, tests)
            if how != "passed":
                print(f"without a mutant, {' '.join(tests)}: {how}: {said}", flush=True)
                return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, nargs="+", help="numbers of mutants")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--skip-base", action="store_true", help="believe that the tests pass without mutants")
    options = parser.parse_args()
    numbers = options.only or list(range(len(MUTANTS)))
    if options.list:
        for n in numbers:
            print(f"{n:3} {MUTANTS[n].file:36} {MUTANTS[n].breaks}")
        return 0
    if not options.skip_base and not base_passes(numbers):
        return 1
    survivors = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, noticed, how in pool.map(tried, numbers):
            print(
                f"{number:3} {'killed  ' if noticed else 'SURVIVED'} {MUTANTS[number].file:36} {MUTANTS[number].breaks}\n"
                f"             {how[:150]}",
                flush=True,
            )
            survivors += [] if noticed else [number]
    print(f"{len(numbers)} mutants, {len(numbers) - len(survivors)} killed" + (f"; survivors: {survivors}" if survivors else ""))
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
