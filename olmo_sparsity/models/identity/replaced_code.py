"""Find functions that somebody has put in place of a model's methods, and describe what they
compute.

    def double(x): return 2 * x
    model.layers[0].mlp.forward = double
    replaced_code(model)                # {"layers.0.mlp.forward": "(('9700…', ['None', '2'], …"}

The text has the bytecode of `double` and of functions that it calls, with the values that they
read. It is part of a model's identity (model_identity.py): without it, a model with another
`forward` would continue the results of the model that it was.

    replaced_code ─┬─ _replaced_in_modules, _replaced_in_classes     which functions
                   └─ _describe ─ _describe_bytecode, _values_of     what they compute

Code of trusted packages is not described: it belongs to a model's class, whose name the identity
has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dis import get_instructions
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from olmo_sparsity.models.identity.checksums import checksum, is_plain

TRUSTED = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "torchao", "olmo",
           "olmo_sparsity", "kernels")  # fmt: skip
"""Packages whose hooks, and functions in place of methods, are part of a model's class."""

_THIS_PROCESS = os.urandom(8).hex()
"""A text that replaces values which cannot be compared between processes. So a model with such a
value in its code continues no results of another process."""


def replaced_code(model: nn.Module) -> dict[str, str]:
    """Return the code that somebody has put in place of methods of modules, or of their classes, by
    the names of these methods. The texts are hashed and stored, so their form must stay."""
    # `_describe` adds names while it reads a function, so each function gets a copy of its own.
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    functions = _replaced_in_modules(model) | _replaced_in_classes(model)
    return {name: repr(_describe(function, dict(names))) for name, function in functions.items()}


# --- which functions were replaced ----------------------------------------------------------------


def _replaced_in_modules(model: nn.Module) -> dict[str, Any]:
    """Return the functions that hide methods of single modules, as `layer.forward = f` does, by the
    names of these methods, such as "layers.0.mlp.forward"."""
    replaced = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if _replaces_method(module, key, value):
                replaced[f"{name}.{key}" if name else key] = value
    return replaced


def _replaced_in_classes(model: nn.Module) -> dict[str, Any]:
    """Return the functions that were put into the classes of modules, as `LlamaMLP.forward = f`
    does, by the names of these methods, such as "LlamaMLP.forward"."""
    # A dict keeps the order in which the classes are met.
    classes: dict[type, None] = {}
    for module in model.modules():
        classes |= dict.fromkeys(type(module).__mro__)

    replaced = {}
    for kind in classes:
        # Methods that are from the package of the class itself replace nothing.
        own_package = _package(kind.__module__)
        for key, value in vars(kind).items():
            function = getattr(value, "__func__", value)  # of a classmethod or staticmethod
            if isinstance(function, FunctionType) and _is_untrusted(function, own_package):
                replaced[f"{kind.__qualname__}.{key}"] = function
    return replaced


def _replaces_method(module: nn.Module, key: str, value: Any) -> bool:
    """Return whether an attribute of a module hides a method of its class. It does not if a trusted
    package has put it around that method, as accelerate does to move tensors between devices."""
    original = getattr(type(module), key, None)
    if not callable(original) or not callable(value) or isinstance(value, type):
        return False

    # A wrapper holds the method that it wraps, bound to the module.
    bound_methods = [
        function for function in _unwrap(value) if getattr(function, "__self__", None) is module
    ]
    holds_original = any(method.__func__ is original for method in bound_methods)
    return not holds_original or _is_untrusted(value)


def _is_untrusted(function: Any, own_package: str = "") -> bool:
    """Return whether a function, or one that it wraps, belongs to a package that is neither trusted
    nor `own_package`, nor part of Python."""
    for inner in _unwrap(function):
        # Not `__module__`, which functools.wraps copies from the function that is replaced.
        variables = getattr(inner, "__globals__", None)
        name = type(inner).__module__ if variables is None else variables["__name__"]
        package = _package(name)
        if package not in (*TRUSTED, own_package) and package not in sys.stdlib_module_names:
            return True
    return False


def _unwrap(function: Any) -> Iterator[Any]:
    """Yield a function, and then the functions in it: for `partial(double, 2)` the partial and
    `double`; for a bound method also its function; for a decorated function also the one that the
    decorator wraps."""
    yield function
    for name in ("func", "__func__", "__wrapped__"):
        inner = getattr(function, name, None)
        if inner is not None:
            yield from _unwrap(inner)


def _package(module_name: str) -> str:
    """Return the package of a module: the first part of its name."""
    return module_name.partition(".")[0]


# --- what a function computes ---------------------------------------------------------------------


def _describe(value: Any, names: dict[int, str]) -> Any:
    """Return what a function or a value is, in plain values that another process can compare.

        def double(x): return FACTOR * x        with FACTOR = 2 in its module
        (("9700…", ["None"], ("FACTOR",)), ["None", "None", "2"])
          bytecode, constants, names         defaults, keyword defaults, and FACTOR

    Args:
        value: A function, or a value that one holds or reads from its module.
        names: Names of the model's modules, and of functions that are being described, by `id`.
            They replace these objects, so that the description of a function that calls itself
            ends.
    """
    if id(value) in names:
        return names[id(value)]

    # Functions
    if isinstance(value, FunctionType):
        if not _is_untrusted(value):
            return qualified_name(value)
        names[id(value)] = qualified_name(value)
        inner_values = [_describe(inner, names) for inner in _values_of(value)]
        return _describe_bytecode(value.__code__), inner_values
    if isinstance(value, partial):
        return [_describe(inner, names) for inner in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return _describe(value.__func__, names), _describe(value.__self__, names)

    # What has a name of its own
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type | BuiltinFunctionType):
        return qualified_name(value)

    # Values, and what holds some
    if isinstance(value, Mapping):
        return [(str(key), _describe(inner, names)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [_describe(inner, names) for inner in value]
    if isinstance(value, Tensor):
        return checksum(value).hex()
    return repr(value) if is_plain(value) else (qualified_name(type(value)), _THIS_PROCESS)


def qualified_name(function: Any) -> str:
    """Return the module and name of a function, such as "torch.nn.functional.gelu". For a partial
    this is its function, and for any other object its class."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _values_of(function: FunctionType) -> list[Any]:
    """Return the values that a function depends on: its defaults, those that it closes over, and
    those that it reads from its module."""
    values: list[Any] = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # of a cell that is not filled yet
            values.append(cell.cell_contents)
    variables = function.__globals__
    for name in _global_names(function.__code__):
        if name in variables:  # other names are those of Python itself, such as `len`
            values.append(variables[name])
    return values


def _global_names(code: CodeType) -> list[str]:
    """Return the names that a function, and functions in it, read from their module."""
    # Not `co_names`, which has names of attributes, too: `x.mean` is no global `mean`.
    names = [
        instruction.argval
        for instruction in get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    ]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function or comprehension in it
            names += _global_names(constant)
    return names


def _describe_bytecode(code: CodeType) -> Any:
    """Return the bytecode of a function, with its constants and the names that it uses. Bytecode
    alone refers to both by their indices."""
    constants: list[Any] = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_describe_bytecode(constant))
        elif isinstance(constant, frozenset):  # whose order differs between processes
            constants.append(sorted(map(repr, constant)))
        else:
            constants.append(repr(constant))
    return code.co_code.hex(), constants, code.co_names
