"""The parameters of a notebook: read from its source, converted, and checked where it runs.

A notebook declares its parameters, as plain values, in the one cell tagged ``parameters``. What a
reader gives instead crosses a command line or a YAML file, where types get lost, and papermill lets
misspelt names pass. Here both are errors that name the parameter.
"""

import ast
import contextlib
import difflib
import math
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args


def read_parameters(source: str | Path) -> dict[str, Any]:
    """Names and default values of a notebook's parameters cell.

    Raises ValueError unless exactly one code cell is tagged ``parameters`` and holds plain values.
    """
    import jupytext

    notebook = jupytext.read(source)
    cells = [
        cell.source
        for cell in notebook.cells
        if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", [])
    ]
    if len(cells) != 1:
        raise ValueError(f"{source}: one code cell must be tagged 'parameters', got {len(cells)}")
    try:
        return _assignments(cells[0])
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"{source}: the parameters cell may only give names plain values: {error}"
        ) from None


def convert_parameters(
    parameters: Mapping[str, object], defaults: Mapping[str, object]
) -> dict[str, Any]:
    """Values of the types that the defaults have, whether they came as text or from Python.

    ``"1e-3"`` becomes a number and ``"false"`` is false; a tuple becomes a list, a path or a numpy
    value its plain twin. A parameter whose default is None takes any plain value. Raises ValueError
    for a name without a default and for a value that has no faithful conversion.
    """
    for name in parameters:
        if name not in defaults:
            declared = ", ".join(f"{known}={value!r}" for known, value in defaults.items())
            raise ValueError(f"{_unknown(name, defaults)}; the parameters are {declared}")
    return {name: _convert(name, value, defaults[name]) for name, value in parameters.items()}


def check_parameters(namespace: Mapping[str, object], **allowed: Any) -> None:
    """Refuse parameters that a notebook does not declare, and values out of range.

    Stands in the code cell right after the parameters and is given ``globals()``, so that plain
    papermill and Jupyter are as strict as our runner. ``allowed`` names every parameter with

    - a type, such as ``str`` or ``float | None`` (a whole number is a float too),
    - a ``(low, high)`` pair of numbers: the closed range; a whole ``low`` asks for whole numbers,
    - any other collection: the allowed values,
    - a list with one of these in it: a list of such values,
    - a tuple of ranges: a list of as many numbers, one in each.

    Raises ValueError naming the parameter, its value and what is allowed.
    """
    for name in _names_set_before(namespace, allowed):
        if name not in allowed:
            raise ValueError(f"{_unknown(name, allowed)}; the parameters are {', '.join(allowed)}")
    for name, rule in allowed.items():
        if name not in namespace:
            raise ValueError(f"the parameters cell must set {name!r}, which this notebook reads")
        _check_value(name, namespace[name], rule)


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"unknown parameter {name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")


def _names_set_before(namespace: Mapping[str, object], declared: Collection[str]) -> list[str]:
    """Names that the cells just before this one set: the parameters, and papermill's after them.

    IPython keeps the cells that ran in ``In``; outside IPython there are none to look at.
    """
    cells = namespace.get("In", [])
    names: list[str] = []
    if not isinstance(cells, list):
        return names
    for cell in reversed(cells[:-1]):
        try:
            found = list(_assignments(cell))
        except (SyntaxError, ValueError):
            break
        names += found
        if set(declared) <= set(found):  # the parameters cell itself
            return names
    return []


def _check_value(name: str, value: Any, rule: Any) -> None:
    if isinstance(rule, list) and len(rule) == 1:
        if not isinstance(value, (list, tuple)) or not value:
            hint = "; give papermill a list with -y" if isinstance(value, str) else ""
            raise ValueError(f"{name} must be a list of at least one value, got {value!r}{hint}")
        for element in value:
            _check_value(name, element, rule[0])
        return
    if isinstance(rule, tuple) and all(map(_is_range, rule)):
        if not isinstance(value, (list, tuple)) or len(value) != len(rule):
            raise ValueError(f"{name} must be a list of {len(rule)} numbers, got {value!r}")
        for element, part in zip(value, rule, strict=True):
            _check_value(name, element, part)
        return
    hint = ""
    if isinstance(rule, (type, UnionType)):
        types = get_args(rule) or (rule,)
        good = type(value) in types or (type(value) is int and float in types)
        names = ["None" if kind is type(None) else kind.__name__ for kind in types]
        wanted = f"of type {' or '.join(names)}"
    elif _is_range(rule):
        low, high = rule
        whole = isinstance(low, int)
        good = type(value) in ((int,) if whole else (int, float)) and low <= value <= high
        wanted = f"{'a whole number ' if whole else ''}in [{low}, {high}]"
    else:
        # 1 == True, but whoever wrote one did not mean the other
        good = any(value == known and type(value) is type(known) for known in rule)
        near = difflib.get_close_matches(str(value), [str(known) for known in rule], n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        wanted = f"one of {', '.join(map(repr, rule))}"
    if not good:
        raise ValueError(f"{name} must be {wanted}, got {value!r}{hint}")


def _is_range(rule: object) -> bool:
    return (
        isinstance(rule, tuple)
        and len(rule) == 2
        and all(type(end) in (int, float) for end in rule)
    )


def _assignments(code: str) -> dict[str, Any]:
    """What code made of nothing but ``name = plain value`` assigns; ValueError for other code."""
    values = {}
    for statement in ast.parse(code).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = _plain(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                values[name] = _plain(value)
            case ast.Expr(value=ast.Constant(value=str())):
                pass  # a sentence for the reader
            case _:
                raise ValueError(ast.unparse(statement))
    return values


def _plain(expression: ast.expr) -> Any:
    """Value of a literal; ``inf``, ``float("inf")``, ``true``, ``false`` and ``null`` count too."""
    wrapper = ast.Expression(body=expression)
    for parent in ast.walk(wrapper):
        for field, child in ast.iter_fields(parent):
            if isinstance(child, list):
                child[:] = [_constant(element) for element in child]
            else:
                setattr(parent, field, _constant(child))
    return ast.literal_eval(wrapper)


def _constant(node: object) -> object:
    words = {"true": True, "false": False, "null": None, "inf": math.inf, "nan": math.nan}
    match node:
        case ast.Name(id=word) if word in words:
            return ast.Constant(words[word])
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str() as text)]):
            return ast.Constant(float(text))
        case _:
            return node


def _convert(name: str, value: Any, default: Any) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if hasattr(value, "tolist"):  # numpy scalars, arrays, tensors
        value = value.tolist()
    if isinstance(value, str) and not isinstance(default, str):
        # Text that is no value stays text, which only a default of None lets pass below.
        with contextlib.suppress(SyntaxError, TypeError, ValueError):
            value = _plain(ast.parse(value.strip(), mode="eval").body)
    kind = type(default)
    if default is None:
        return _check_plain(name, value)
    if kind is str and isinstance(value, str):
        return value
    if kind is bool and type(value) is bool:
        return value
    if kind is int and type(value) in (int, float) and value % 1 == 0:
        return int(value)
    if kind is float and type(value) in (int, float):
        return _check_plain(name, float(value))
    if kind in (list, tuple) and isinstance(value, (list, tuple)):
        kinds = {type(element) for element in default}
        like = default[0] if len(kinds) == 1 else None
        return [_convert(name, element, like) for element in value]
    if kind is dict and isinstance(value, dict):
        return _check_plain(name, value)
    wanted = {str: "text", bool: "True or False", int: "a whole number", float: "a number"}
    like = wanted.get(kind, f"a {kind.__name__}")
    raise ValueError(f"{name} must be {like}, as its default {default!r} is, got {value!r}")


def _check_plain(name: str, value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float and not math.isnan(value):
        return value
    if isinstance(value, (list, tuple)):
        return [_check_plain(name, element) for element in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _check_plain(name, element) for key, element in value.items()}
    raise ValueError(f"{name} must be a plain value (number, text, list, None), got {value!r}")
