"""How torch's compiler (Dynamo) traces a call of in_graph.py. Imported by it alone: torch's compiler takes seconds to import."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterator

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables import higher_order_ops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable, discard_graph_changes, speculate_subgraph
from torch._dynamo.variables.lists import BaseListVariable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flexpress.inputs.plain_arguments import resolve_device
from flexpress.inputs.scales import number_on

from ..codegen.mod.captured.watched import unwatched
from ..codegen.mod.expr import MASK_SYMBOLS, SCORE_SYMBOLS
from ..codegen.mod.tracing.bind import bind_once
from ..codegen.mod.tracing.capture import name_of

_SYMBOLS = {"score_mod": SCORE_SYMBOLS, "mask_mod": MASK_SYMBOLS}  # of arguments that are mods


def know(call) -> None:
    """Tell Dynamo what becomes of `call`."""
    higher_order_ops._hop_name_to_variable_class[call.__name__] = CallVariable


class _Inputs:
    """Inputs of a node, and arguments of which these are parts."""

    def __init__(self) -> None:
        self.proxies: list[torch.fx.Proxy] = []

    def input(self, proxy):
        """The argument that is this input."""
        self.proxies.append(proxy)
        at = len(self.proxies) - 1
        return lambda values: values[at]

    def argument(self, found: VariableTracker):
        """What makes an argument of the inputs' values."""
        if isinstance(found, ConstDictVariable):
            found.install_dict_keys_match_guard()  # a key may come later
        if found.is_python_constant():
            constant = found.as_python_constant()
            return lambda values: constant
        if isinstance(found, BaseListVariable):  # a tuple or a list
            made = [self.argument(item.realize()) for item in found.items]
            return lambda values: tuple(make(values) for make in made)
        if isinstance(found, ConstDictVariable):
            named = {key.vt.as_python_constant(): self.argument(item.realize()) for key, item in found.items.items()}
            return lambda values: {key: make(values) for key, make in named.items()}
        return self.input(found.as_proxy())


class CallVariable(TorchHigherOrderOperatorVariable):
    """A call of in_graph.py, while Dynamo traces it."""

    _HOP_NAME = "flexpress_call"
    _ALLOW_FALLBACK_TO_EAGER = True

    def _call_function(self, tx, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker:
        full_name = args[0].as_python_constant()
        function, inputs, makers = self.value.functions[full_name], _Inputs(), {}
        name = full_name.rpartition(".")[2]
        named = {key: found.realize() for key, found in kwargs.items()}
        device = _device_of(named)
        for key, found in named.items():
            if key in _SYMBOLS and not _is_none(found):
                makers[key] = self._mod(tx, device, name, key, found, inputs)
            else:
                makers[key] = inputs.argument(found)

        if any(is_traceable_wrapper_subclass(proxy.node.meta["example_value"]) for proxy in inputs.proxies):
            raise Unsupported(f"{name} of DTensors, or of other tensors that stand for some, is no operator: it runs outside of the graph")
        if torch.autograd.forward_ad._current_level >= 0:
            raise Unsupported(f"{name} in forward mode is no operator, which would have no tangent: it runs outside of the graph")

        def call(*values):
            return function(**{key: make(values) for key, make in makers.items()})

        call.__name__ = call.__qualname__ = f"flexpress_{name}_{next(_numbers)}"
        return wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", call, tuple(inputs.proxies), {}))

    def _mod(self, tx, device, function: str, key: str, mod: VariableTracker, inputs: _Inputs):
        """What makes a mod of the inputs' values: the graph that Dynamo traces of it."""
        names = _SYMBOLS[key]

        def scalar(name):
            details = {"dtype": torch.float32 if name == "score" else torch.int32, "device": device}
            empty = VariableTracker.build(tx, torch.empty)
            return empty.call_function(tx, [VariableTracker.build(tx, ())], {k: VariableTracker.build(tx, v) for k, v in details.items()})

        try:
            with discard_graph_changes(tx):
                symbols = [scalar(name) for name in names]
            with TransformGetItemToIndex(), _floats_of_the_whole_graph(), _one_record_of_changes(tx):
                (_, _), graph, captured = speculate_subgraph(
                    tx, mod, symbols, {}, f"{function}: {key}", source_target=self.value, set_subgraph_inputs="flatten_manual"
                )
            module, examples = torch.fx.GraphModule(tx.output.nn_modules, graph), [proxy.node.meta["example_value"] for proxy in captured]
            with tx.fake_mode:
                made = _from_graph(module, len(names), _name(mod))
                if not _takes_tensors(made, examples, device, key):  # numbers where there must be numbers: torch.sym_max, for example
                    device = None
                    _check(made(examples, None), key)
        except Unsupported as reason:
            why = str(reason).strip().splitlines()[0]
            warnings.warn(f"torch.compile cannot trace the {key} of {function} ({why}): the call is a graph break", stacklevel=2)
            raise
        found = [inputs.input(proxy) for proxy in captured]
        return lambda values: made([get(values) for get in found], device)


@contextlib.contextmanager
def _floats_of_the_whole_graph() -> Iterator[None]:
    """A float that becomes a symbol while a mod is traced is a node of the whole graph: the other mod may read it, or what follows."""
    wrap = VariableBuilder.wrap_symfloat

    def wrapped(builder, *args, **kwargs):
        output = builder.tx.output
        tracers, output.tracers = output.tracers, output.tracers[:1]
        try:
            return wrap(builder, *args, **kwargs)
        finally:
            output.tracers = tracers

    VariableBuilder.wrap_symfloat = wrapped
    try:
        yield
    finally:
        VariableBuilder.wrap_symfloat = wrap


@contextlib.contextmanager
def _one_record_of_changes(tx) -> Iterator[None]:
    """When Dynamo has traced a mod, a copy takes the place of its record of what the program has changed. Attributes of objects that were
    written before go on into the one that there was, so that one is brought to the copy's state, and stays."""
    record = tx.output.side_effects
    try:
        yield
    finally:
        copy = tx.output.side_effects
        if copy is not record:
            vars(record).update(vars(copy))
            tx.output.side_effects = record


def _from_graph(module: torch.fx.GraphModule, symbols: int, name: str):
    """From what a mod captures, in the order of the graph's inputs behind its symbols, to the mod. With a device, floats that are open
    become tensors there."""
    for node in module.graph.find_nodes(op="call_function", target=torch._refs.tensor):
        node.target = torch.as_tensor  # what Dynamo makes of torch.tensor(number) changes tensors in place
    for node in module.graph.nodes:
        if node.op == "placeholder" or not isinstance(node.meta.get("example_value"), torch.SymFloat):
            continue
        read = node.args[0] if node.target is torch.sym_float else node
        if _reads(read) or getattr(read, "target", None) is _number_in:
            node.op, node.target, node.args = "call_function", _number_in, read.args
        elif _comes_of_an_integer_read(node):
            raise Unsupported(f"{name} computes {node.name} of an integer that it reads from a tensor: compute it before the call")
    module.recompile()
    forward = type(module).forward
    places = [n.target for n in module.graph.nodes if n.op == "placeholder"][symbols:]

    def make(values, device):
        captured = (number_on(device, x) if device is not None and isinstance(x, torch.SymFloat) else x for x in values)
        mod = functools.partial(forward, module, **dict(zip(places, captured, strict=True)))
        mod.__name__ = name
        return mod

    return make


def _reads(node) -> bool:
    """Is it the number of a tensor? Of an array of NumPy's, too."""
    if not isinstance(node, torch.fx.Node) or node.op == "placeholder":  # an input of the mod may have that name
        return False
    return getattr(node.target, "__name__", node.target) in ("item", "wrapped_item")


def _comes_of_an_integer_read(number: torch.fx.Node) -> bool:
    numbers = [of for of in number.all_input_nodes if isinstance(of.meta.get("example_value"), (torch.SymInt, torch.SymFloat))]
    return any(_reads(of) or _comes_of_an_integer_read(of) for of in numbers)


def _number_in(tensor):
    """What a mod reads with float() or .item(). Of a captured tensor it is one, too: a graph is made before the number is known."""
    return tensor.detach().to(torch.float32) if isinstance(tensor, torch.Tensor) else tensor.item()


def _takes_tensors(made, examples: list, device: torch.device, key: str) -> bool:
    """Are there floats that are open among these values, and a mod if they become tensors?"""
    if not any(isinstance(value, torch.SymFloat) for value in examples):
        return False
    with contextlib.suppress(Exception):
        _check(made(examples, device), key)
        return True
    return False


def _check(mod, key: str) -> None:
    """What flexpress refuses breaks the graph: then it says why, with the user's own line."""
    try:
        with unwatched():  # what is computed of fake tensors to find out is none of a checkpoint's
            bind_once(mod, key.removesuffix("_mod"), None)
    except Exception as refused:
        raise Unsupported(f"flexpress refuses this {key}: {str(refused).splitlines()[0]}") from refused


def _device_of(arguments: dict[str, VariableTracker]) -> torch.device:
    """Where the symbols of a call's mods are: on its device, as mods may ask."""
    if "device" in arguments:
        return resolve_device(arguments["device"].as_python_constant())
    return next(iter(arguments.values())).as_proxy().node.meta["example_value"].device  # of query


_numbers = itertools.count()


def _is_none(found: VariableTracker) -> bool:
    return found.is_python_constant() and found.as_python_constant() is None


def _name(mod: VariableTracker) -> str:
    """What the user calls a mod."""
    try:
        return mod.get_name()
    except (AttributeError, NotImplementedError):
        return name_of(getattr(mod, "value", mod))  # of an object
