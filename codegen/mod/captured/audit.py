"""What a function's bytecode does that no stand-in can see.

A stand-in for a captured value sees operators, calls, attributes and conversions. It does not see `is`, `except`, `match`, `import` or a
class statement. So before a function is traced with stand-ins, its instructions are looked at, those of functions inside it as
well. Only instructions on a list pass; one that is unknown, of a newer Python say, is refused.
"""

from __future__ import annotations

import dis
import types
from dataclasses import dataclass

from ...registry import remembered

_PLAIN = frozenset(
    (
        "CACHE",
        "NOP",
        "RESUME",
        "EXTENDED_ARG",
        "NOT_TAKEN",
        "POP_TOP",
        "POP_ITER",
        "POP_BLOCK",
        "END_FOR",
        "END_SEND",
        "PUSH_NULL",
        "COPY",
        "SWAP",
        "DUP_TOP",
        "DUP_TOP_TWO",
        "ROT_TWO",
        "ROT_THREE",
        "ROT_FOUR",
        "ROT_N",
        "LOAD_CONST",
        "LOAD_SMALL_INT",
        "LOAD_FAST",
        "LOAD_FAST_CHECK",
        "LOAD_FAST_AND_CLEAR",
        "LOAD_FAST_LOAD_FAST",
        "LOAD_FAST_BORROW",
        "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
        "STORE_FAST",
        "STORE_FAST_LOAD_FAST",
        "STORE_FAST_STORE_FAST",
        "STORE_FAST_MAYBE_NULL",
        "DELETE_FAST",
        "LOAD_GLOBAL",
        "LOAD_DEREF",
        "LOAD_CLOSURE",
        "MAKE_CELL",
        "COPY_FREE_VARS",
        "LOAD_ATTR",
        "LOAD_METHOD",
        "BINARY_ADD",
        "BINARY_SUBTRACT",
        "BINARY_MULTIPLY",
        "BINARY_TRUE_DIVIDE",
        "BINARY_FLOOR_DIVIDE",
        "BINARY_MODULO",
        "BINARY_POWER",
        "BINARY_LSHIFT",
        "BINARY_RSHIFT",
        "BINARY_AND",
        "BINARY_OR",
        "BINARY_XOR",
        "BINARY_MATRIX_MULTIPLY",
        "BINARY_SUBSCR",
        "BINARY_SLICE",
        "BINARY_OP",
        "INPLACE_ADD",
        "INPLACE_SUBTRACT",
        "INPLACE_MULTIPLY",
        "INPLACE_TRUE_DIVIDE",
        "INPLACE_FLOOR_DIVIDE",
        "INPLACE_MODULO",
        "INPLACE_POWER",
        "INPLACE_LSHIFT",
        "INPLACE_RSHIFT",
        "INPLACE_AND",
        "INPLACE_OR",
        "INPLACE_XOR",
        "INPLACE_MATRIX_MULTIPLY",
        "UNARY_POSITIVE",
        "UNARY_NEGATIVE",
        "UNARY_NOT",
        "UNARY_INVERT",
        "TO_BOOL",
        "COMPARE_OP",
        "CONTAINS_OP",
        "BUILD_TUPLE",
        "BUILD_LIST",
        "BUILD_SET",
        "BUILD_MAP",
        "BUILD_CONST_KEY_MAP",
        "BUILD_STRING",
        "BUILD_SLICE",
        "LIST_EXTEND",
        "LIST_APPEND",
        "LIST_TO_TUPLE",
        "MAP_ADD",
        "DICT_MERGE",
        "DICT_UPDATE",
        "SET_ADD",
        "SET_UPDATE",
        "STORE_SUBSCR",
        "UNPACK_SEQUENCE",
        "UNPACK_EX",
        "CALL",
        "CALL_KW",
        "CALL_FUNCTION",
        "CALL_FUNCTION_KW",
        "CALL_FUNCTION_EX",
        "CALL_METHOD",
        "PRECALL",
        "KW_NAMES",
        "MAKE_FUNCTION",
        "SET_FUNCTION_ATTRIBUTE",
        "RETURN_VALUE",
        "RETURN_CONST",
        "GET_ITER",
        "FOR_ITER",
        "RETURN_GENERATOR",
        "GEN_START",
        "YIELD_VALUE",
        "RAISE_VARARGS",
        "RERAISE",
        "LOAD_ASSERTION_ERROR",
        "LOAD_COMMON_CONSTANT",
        "FORMAT_VALUE",
        "FORMAT_SIMPLE",
        "FORMAT_WITH_SPEC",
        "CONVERT_VALUE",
    )
)
_INTRINSICS = {"INTRINSIC_STOPITERATION_ERROR", "INTRINSIC_UNARY_POSITIVE", "INTRINSIC_LIST_TO_TUPLE", 3, 5, 6}
_WORDS = {  # of instructions that are refused, for a reader
    "IS_OP": "`is`",
    "IMPORT_NAME": "`import`",
    "IMPORT_FROM": "`import`",
    "SETUP_FINALLY": "`try`",
    "PUSH_EXC_INFO": "`try` or `with`",
    "SETUP_WITH": "`with`",
    "BEFORE_WITH": "`with`",
    "LOAD_SPECIAL": "`with`",
    "LOAD_BUILD_CLASS": "a class statement",
    "STORE_ATTR": "an assignment to an attribute",
    "STORE_GLOBAL": "an assignment to a global",
    "STORE_DEREF": "`nonlocal`",
    "DELETE_ATTR": "`del`",
    "DELETE_SUBSCR": "`del`",
    "DELETE_GLOBAL": "`del`",
    "LOAD_SUPER_ATTR": "`super`",
}
# builtins that look at the frame they are called from
_FRAMES = {"globals", "locals", "vars", "dir", "eval", "exec", "super", "__import__", "breakpoint", "compile", "open", "input"}


@dataclass(frozen=True)
class Facts:
    """Of a function's code: why it cannot be traced with stand-ins ("" if it can); the globals, attributes and modules to import that it
    names, and the numbers that stand in it, as (type, repr)."""

    refused: str
    globals: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[str]
    numbers: frozenset[tuple[type, str]]


@remembered("audits of bytecode", 4096)
def audited(code: types.CodeType) -> Facts:
    """The facts of a function's code and of the functions inside it."""
    found_globals, attributes, imports, numbers, refused = set(), set(), set(), set(), ""
    before = None
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in ("CACHE", "EXTENDED_ARG"):
            continue
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            found_globals.add(value)
        elif name in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            attributes.add(value)
        elif name == "IMPORT_NAME":
            imports.add(value)
        elif name.startswith(("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST")):
            numbers |= _numbers_in(value)
        if not refused and not _passes(instruction, before, code):
            refused = f"uses {_WORDS.get(name, _match(name))} ({_where(code, instruction)})"
        before = instruction
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = audited(constant)
            found_globals |= inner.globals
            attributes |= inner.attributes
            imports |= inner.imports
            refused = refused or inner.refused
    unseen = sorted((found_globals & _FRAMES) | (attributes & {"__class__", "__dict__", "__torch_function__"}))
    if unseen and not refused:
        refused = f"uses {unseen[0]} ({_where(code, None)})"
    return Facts(refused, frozenset(found_globals), frozenset(attributes), frozenset(imports), frozenset(numbers))


def _numbers_in(constant) -> set[tuple[type, str]]:
    if isinstance(constant, (tuple, frozenset)):
        return set().union(*map(_numbers_in, constant))
    return {(type(constant), repr(constant))} if type(constant) in (int, float, bool) else set()


def _passes(instruction: dis.Instruction, before: dis.Instruction | None, code: types.CodeType) -> bool:
    name = instruction.opname
    if name == "IS_OP":  # a captured value that is None is the constant None
        return before is not None and before.opname == "LOAD_CONST" and before.argval is None and not instruction.is_jump_target
    if name == "STORE_DEREF":
        return instruction.argval not in code.co_freevars
    if name == "CALL_INTRINSIC_1":
        return instruction.argrepr in _INTRINSICS or instruction.arg in _INTRINSICS
    return name in _PLAIN or name.startswith(("JUMP", "POP_JUMP"))


def _match(name: str) -> str:
    return "`match`" if name.startswith(("MATCH", "GET_LEN")) else f"the instruction {name}"


def _where(code: types.CodeType, instruction: dis.Instruction | None) -> str:
    positions = getattr(instruction, "positions", None)
    line = positions.lineno if positions is not None and positions.lineno else code.co_firstlineno
    return f"{code.co_filename.rpartition('/')[2]}:{line}"
