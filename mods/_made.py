"""The functions that recipes make, in a form that pickles: a function inside a function does not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class Made:
    """A mod that a recipe has made. It is called as the function that it holds, and pickled as the call of the recipe.

    function   the mod itself: Flexpress traces this
    recipe     what made it, of which arguments
    """

    stands_for_its_function = True
    __name__: str  # as of the function, or as it was called since

    def __init__(self, function: Callable, recipe: Callable, args: tuple, kwargs: dict) -> None:
        self.function, self.recipe, self.args, self.kwargs = function, recipe, args, kwargs
        functools.update_wrapper(self, function)  # its names, which may be changed, and where inspect.signature looks

    __code__ = property(lambda self: self.function.__code__)
    __closure__ = property(lambda self: self.function.__closure__)

    def __call__(self, *symbols, **named):
        return self.function(*symbols, **named)

    def __repr__(self) -> str:
        return f"<mod {self.__name__} of {self.recipe.__module__}.{self.recipe.__qualname__}>"

    def __reduce__(self) -> tuple:
        given = inspect.signature(self.recipe).bind(*self.args, **self.kwargs)
        given.apply_defaults()  # or what comes after one that was left out would be, too
        return self.recipe, given.args


def plain(mod):
    """The function that a recipe has made; anything else is itself."""
    return mod.function if type(mod) is Made else mod


def picklable(recipe: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a function that makes a mod of its arguments, none of them by keyword alone: what it makes can be pickled if they can.

    It gets the functions of mods that other recipes have made, so that those cost a call nothing.
    """

    @functools.wraps(recipe)
    def make(*args, **kwargs):
        made = recipe(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()}) if kwargs else recipe(*map(plain, args))
        if torch.compiler.is_dynamo_compiling():  # which traces functions best
            return made
        for given in args:
            if given is made or type(given) is Made and given.function is made:  # a composition of one
                return given
        return Made(made, make, args, kwargs)

    return make
