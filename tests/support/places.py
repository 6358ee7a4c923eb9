"""Every place that Python has for a value. Each gives a mod that reads it and a function that puts another value into the place."""

from __future__ import annotations

import builtins
import collections
import contextvars
import dataclasses
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable

import torch

from support.mutations import Called, Data, Descriptor, Dynamic, Items, Kind, Named, Plain, Slots, Stringed, in_namespace, reading, used

Place = tuple[Callable, Callable]
PLACES: dict[str, Callable[[object], Place]] = {}


def place(function):
    PLACES[function.__name__] = function
    return function


@place
def closure_cell(w):
    def mod(score, b, h, q_idx, kv_idx):
        return used(score, w, q_idx, kv_idx)

    def put(value):
        nonlocal w
        w = value

    return mod, put


@place
def global_name(w):
    mod, names = in_namespace("return used(score, w, q_idx, kv_idx)", w=w)
    return mod, lambda value: names.update(w=value)


@place
def builtin_name(w):
    mod, _ = in_namespace("return used(score, flexpress_test_value, q_idx, kv_idx)")
    builtins.flexpress_test_value = w
    return mod, lambda value: setattr(builtins, "flexpress_test_value", value)


@place
def default(w):
    def mod(score, b, h, q_idx, kv_idx, w=w):
        return used(score, w, q_idx, kv_idx)

    return mod, lambda value: setattr(mod, "__defaults__", (value,))


@place
def keyword_default(w):
    def mod(score, b, h, q_idx, kv_idx, *, w=w):
        return used(score, w, q_idx, kv_idx)

    return mod, lambda value: setattr(mod, "__kwdefaults__", {"w": value})


@place
def keyword_default_in_place(w):
    def mod(score, b, h, q_idx, kv_idx, *, w=w):
        return used(score, w, q_idx, kv_idx)

    return mod, lambda value: mod.__kwdefaults__.update(w=value)


def attributes(make, read, put=lambda holder, value: setattr(holder, "w", value)):
    def made(w):
        holder = make(w)
        return reading(read, holder), lambda value: put(holder, value)

    return made


def filled(cls):
    def make(w):
        holder = cls()
        holder.w = w
        return holder

    return make


def klass(w):
    return type("Config", (), {"w": w})


def metaclass(w):
    meta = type("Meta", (type,), {"w": property(lambda cls: cls.hidden)})
    return meta("Config", (), {"hidden": w})


def with_descriptor(w):
    descriptor = Descriptor()
    descriptor.value = w
    return type("Owner", (), {"w": descriptor})()


def module(w):
    found = types.ModuleType("flexpress_test_settings")
    found.w = w
    sys.modules["flexpress_test_settings"] = found
    return found


def buffered(w):
    return types.SimpleNamespace(w=w)


def with_class_method(w):
    return type("Config", (), {"w": w, "read": classmethod(lambda cls: cls.w)})


def with_static_method(w):
    return type("Config", (), {"read": staticmethod(lambda: w)})()


def set_static(holder, value):
    type(holder).read = staticmethod(lambda: value)


def tagged(w):
    tensor = torch.ones(3)
    tensor.w = w
    return tensor


def tagged_parameter(w):
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.w = w
    return parameter


def partly(w):
    return functools.partial(lambda value: value, w)


def with_default(w):
    return functools.partial(getattr, Plain(w), "w", 5)


def chain(w):
    return collections.ChainMap({}, {"w": w})


def in_module(w):
    found = torch.nn.Module()
    found.w = w
    return found


def nested_module(w):
    found = torch.nn.Module()
    found.inner = torch.nn.Module()
    found.inner.w = w
    return found


def context(w):
    variable = contextvars.ContextVar("w")
    variable.set(w)
    return variable


def try_read(holder):
    try:
        return holder.w
    except AttributeError:
        return 7


def imported(holder):
    import flexpress_test_settings

    return flexpress_test_settings.w


def imported_name(holder):
    from flexpress_test_settings import w

    return w


def in_class_statement(holder):
    class Local:
        w = holder.w

    return Local.w


def matched(holder):
    match holder.w:
        case bool():
            return 3
        case int():
            return 5
        case other:
            return other


def with_statement(holder):
    with torch.no_grad():
        return holder.w


def identity(holder):
    return 11 if holder.w is holder.first else holder.w


def two(w):
    found = Plain(w)
    found.first = w
    return found


PLACES |= {
    "attribute": attributes(Plain, lambda o: o.w),
    "attribute_deleted_and_set": attributes(Plain, lambda o: o.w, lambda o, v: (delattr(o, "w"), setattr(o, "w", v))),
    "instance_dict": attributes(Plain, lambda o: o.__dict__["w"]),
    "slots": attributes(filled(Slots), lambda o: o.w),
    "property_": attributes(Plain, lambda o: o.doubled),
    "property_replaced": attributes(
        lambda w: type("P", (), {"w": property(lambda self: w)})(),
        lambda o: o.w,
        lambda o, v: setattr(type(o), "w", property(lambda self: v)),
    ),
    "dynamic": attributes(lambda w: filled(Dynamic)(w), lambda o: o.w),
    "dynamic_hidden": attributes(
        lambda w: (o := Dynamic(), setattr(o, "hidden", w))[0], lambda o: o.w, lambda o, v: setattr(o, "hidden", v)
    ),
    "descriptor": attributes(with_descriptor, lambda o: o.w, lambda o, v: setattr(type(o).__dict__["w"], "value", v)),
    "class_attribute": attributes(klass, lambda o: o.w),
    "class_attribute_of_an_instance": attributes(lambda w: klass(w)(), lambda o: o.w, lambda o, v: setattr(type(o), "w", v)),
    "class_attribute_hidden_by_an_instance": attributes(lambda w: klass(w)(), lambda o: o.w),
    "class_by_type": attributes(lambda w: klass(w)(), lambda o: type(o).w, lambda o, v: setattr(type(o), "w", v)),
    "class_by_dunder": attributes(lambda w: klass(w)(), lambda o: o.__class__.w, lambda o, v: setattr(type(o), "w", v)),
    "class_exchanged": attributes(lambda w: klass(w)(), lambda o: o.w, lambda o, v: setattr(o, "__class__", klass(v))),
    "base_class": attributes(lambda w: type("Sub", (klass(w),), {})(), lambda o: o.w, lambda o, v: setattr(type(o).__mro__[1], "w", v)),
    "metaclass_property": attributes(metaclass, lambda o: o.w, lambda o, v: setattr(o, "hidden", v)),
    "method_of_another": attributes(Plain, lambda o: o.reader(), lambda o, v: setattr(o, "reader", Plain(v).reader)),
    "class_method": attributes(with_class_method, lambda o: o.read()),
    "static_method": attributes(with_static_method, lambda o: o.read(), set_static),
    "getattr_": attributes(Plain, lambda o: getattr(o, "w")),  # noqa: B009
    "getattr_with_default": attributes(Plain, lambda o: getattr(o, "w", 5)),
    "getattr_default_then_set": attributes(lambda w: Plain(w).__class__.__new__(Plain), lambda o: getattr(o, "w", 5)),
    "hasattr_": attributes(lambda w: Plain.__new__(Plain), lambda o: o.w if hasattr(o, "w") else 5),
    "try_except": attributes(Plain, try_read),
    "try_except_then_set": attributes(lambda w: Plain.__new__(Plain), try_read),
    "vars_": attributes(Plain, lambda o: vars(o)["w"]),
    "attrgetter": attributes(Plain, operator.attrgetter("w")),
    "nested_attribute": attributes(lambda w: Plain(Plain(w)), lambda o: o.w.w, lambda o, v: setattr(o.w, "w", v)),
    "nested_object_exchanged": attributes(lambda w: Plain(Plain(w)), lambda o: o.w.w, lambda o, v: setattr(o, "w", Plain(v))),
    "names_of_our_own": attributes(
        lambda w: types.SimpleNamespace(_at=w, _name=1, _value=2, _reader=3, _state=4, place=5),
        lambda o: o._at,
        lambda o, v: setattr(o, "_at", v),
    ),
    "state_name": attributes(lambda w: types.SimpleNamespace(_state=w), lambda o: o._state, lambda o, v: setattr(o, "_state", v)),
    "data_class": attributes(Data, lambda o: o.w),
    "replaced_data_class": attributes(
        lambda w: Plain(Data(w)), lambda o: o.w.w, lambda o, v: setattr(o, "w", dataclasses.replace(o.w, w=v))
    ),
    "namespace": attributes(buffered, lambda o: o.w),
    "user_module": attributes(module, lambda o: o.w),
    "imported_module": attributes(module, imported),
    "imported_name": attributes(module, imported_name),
    "nn_module": attributes(in_module, lambda o: o.w),
    "nested_nn_module": attributes(nested_module, lambda o: o.inner.w, lambda o, v: setattr(o.inner, "w", v)),
    "module_exchanged": attributes(nested_module, lambda o: o.inner.w, lambda o, v: setattr(o, "inner", in_module(v))),
    "tensor_attribute": attributes(tagged, lambda o: o.w),
    "parameter_attribute": attributes(tagged_parameter, lambda o: o.w),
    "function_attribute": attributes(lambda w: (f := lambda: None, setattr(f, "w", w))[0], lambda o: o.w),
    "string_attribute": attributes(lambda w: (s := Stringed("x"), setattr(s, "w", w))[0], lambda o: o.w),
    "list_item": attributes(lambda w: [1, w], lambda o: o[1], lambda o, v: operator.setitem(o, 1, v)),
    "last_item": attributes(lambda w: [1, w], lambda o: o[-1], lambda o, v: o.append(v)),
    "list_in_list": attributes(lambda w: [[w]], lambda o: o[0][0], lambda o, v: operator.setitem(o, 0, [v])),
    "tuple_in_list": attributes(lambda w: [(w, 2)], lambda o: o[0][0], lambda o, v: operator.setitem(o, 0, (v, 2))),
    "unpacked": attributes(lambda w: [w, 2], lambda o: (lambda first, second: first)(*o), lambda o, v: operator.setitem(o, 0, v)),
    "sum_of_a_list": attributes(lambda w: [w, 2], sum, lambda o, v: operator.setitem(o, 0, v)),
    "comprehension": attributes(lambda w: [w, 2], lambda o: sum([x * 2 for x in o]), lambda o, v: operator.setitem(o, 0, v)),
    "generator": attributes(lambda w: [w, 2], lambda o: sum(x * 2 for x in o), lambda o, v: operator.setitem(o, 0, v)),
    "dict_item": attributes(lambda w: {"w": w}, lambda o: o["w"], lambda o, v: o.update(w=v)),
    "dict_get": attributes(lambda w: {"w": w}, lambda o: o.get("w"), lambda o, v: o.update(w=v)),
    "dict_get_default": attributes(lambda w: {}, lambda o: o.get("w", 5), lambda o, v: o.update(w=v)),
    "dict_values": attributes(lambda w: {"w": w}, lambda o: next(iter(o.values())), lambda o, v: o.update(w=v)),
    "dict_items": attributes(lambda w: {"w": w}, lambda o: [v for _, v in o.items()][0], lambda o, v: o.update(w=v)),
    "dict_unpacked": attributes(lambda w: {"w": w}, lambda o: (lambda w: w)(**o), lambda o, v: o.update(w=v)),
    "dict_in": attributes(
        lambda w: {},
        lambda o: o["w"] if "w" in o else 5,  # noqa: SIM401
        lambda o, v: o.update(w=v),
    ),
    "dict_by_enum": attributes(lambda w: {Kind.ONE: w}, lambda o: o[Kind.ONE], lambda o, v: o.update({Kind.ONE: v})),
    "ordered_dict": attributes(lambda w: collections.OrderedDict(w=w), lambda o: o["w"], lambda o, v: o.update(w=v)),
    "ordered_dict_get": attributes(lambda w: collections.OrderedDict(w=w), lambda o: o.get("w"), lambda o, v: o.update(w=v)),
    "default_dict": attributes(lambda w: collections.defaultdict(lambda: 5), lambda o: o["w"], lambda o, v: o.update(w=v)),
    "counter": attributes(lambda w: collections.Counter(), lambda o: o["w"], lambda o, v: o.update(w=v) if type(v) is int else None),
    "user_dict": attributes(lambda w: collections.UserDict(w=w), lambda o: o["w"], lambda o, v: o.update(w=v)),
    "user_list": attributes(lambda w: collections.UserList([w]), lambda o: o[0], lambda o, v: operator.setitem(o, 0, v)),
    "chain_map": attributes(chain, lambda o: o["w"], lambda o, v: operator.setitem(o, "w", v)),
    "deque": attributes(lambda w: collections.deque([w]), lambda o: o[0], lambda o, v: o.appendleft(v)),
    "mapping_proxy": attributes(klass, lambda o: o.__dict__["w"]),
    "named_tuple": attributes(lambda w: Plain(Named(w, 1)), lambda o: o.w.w, lambda o, v: setattr(o, "w", Named(v, 1))),
    "named_tuple_item": attributes(lambda w: Plain(Named(w, 1)), lambda o: o.w[0], lambda o, v: setattr(o, "w", o.w._replace(w=v))),
    "own_getitem": attributes(Items, lambda o: o["anything"], lambda o, v: setattr(o, "content", v)),
    "context_variable": attributes(context, lambda o: o.get(), lambda o, v: o.set(v)),
    "weak_reference": attributes(lambda w: Plain(w), lambda o: weakref.ref(o)().w),
    "class_statement": attributes(Plain, in_class_statement),
    "match_": attributes(Plain, matched),
    "with_": attributes(Plain, with_statement),
    "identity_": attributes(two, identity),
    "partial_argument": attributes(lambda w: Plain(partly(w)), lambda o: o.w(), lambda o, v: setattr(o, "w", partly(v))),
    "partial_of_getattr": attributes(with_default, lambda o: o(), lambda o, v: setattr(o.args[0], "w", v)),
    "cell_of_a_helper": attributes(
        lambda w: Plain((lambda x: lambda: x)(w)), lambda o: o.w(), lambda o, v: setattr(o.w.__closure__[0], "cell_contents", v)
    ),
    "recursive_list": attributes(lambda w: (x := [w], x.append(x))[0], lambda o: o[1][1][0], lambda o, v: operator.setitem(o, 0, v)),
    "recursive_object": attributes(lambda w: (o := Plain(w), setattr(o, "me", o))[0], lambda o: o.me.me.w),
}


@place
def bound_method(w):
    owner = Plain(w)
    return owner.method, lambda value: setattr(owner, "w", value)


@place
def callable_object(w):
    owner = Called(w)
    return owner, lambda value: setattr(owner, "w", value)


@place
def decorated(w):
    """wraps() copies torch's name and module onto a function of the user's."""
    state = [w]

    @functools.wraps(torch.tanh)
    def inner(score, q_idx, kv_idx):
        return used(score, state[0], q_idx, kv_idx)

    return lambda score, b, h, q_idx, kv_idx: inner(score, q_idx, kv_idx), lambda value: operator.setitem(state, 0, value)


@place
def name_of_an_attribute(w):
    """A global that has the name of an attribute is not read for it."""
    mod, names = in_namespace("return used(score, holder.w, q_idx, kv_idx)", w=99, holder=Plain(w))
    return mod, lambda value: setattr(names["holder"], "w", value)


@place
def helper_by_two_names(w):
    """One function reached by two names, of which one is changed."""
    first = lambda score, q_idx, kv_idx: used(score, w, q_idx, kv_idx)  # noqa: E731
    mod, names = in_namespace("return f(score, q_idx, kv_idx) + g(score, q_idx, kv_idx)", f=first, g=first)
    return mod, lambda value: names.update(g=lambda score, q_idx, kv_idx: used(score, value, q_idx, kv_idx))


@place
def module_forward(w):
    class Mod(torch.nn.Module):
        def forward(self, score, b, h, q_idx, kv_idx):
            return used(score, self.w, q_idx, kv_idx)

    found = Mod()
    found.w = w
    return found, lambda value: setattr(found, "w", value)


@place
def module_with_a_hook(w):
    class Mod(torch.nn.Module):
        def forward(self, score, b, h, q_idx, kv_idx):
            return score

    found, state = Mod(), [w]
    found.register_forward_hook(lambda module, args, out: used(out, state[0], args[3], args[4]))
    return found, lambda value: operator.setitem(state, 0, value)


@place
def submodule_called(w):
    class Inner(torch.nn.Module):
        def forward(self, score, q_idx, kv_idx):
            return used(score, self.w, q_idx, kv_idx)

    inner = Inner()
    inner.w = w
    return lambda score, b, h, q_idx, kv_idx: inner(score, q_idx, kv_idx), lambda value: setattr(inner, "w", value)
