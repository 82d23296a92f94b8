"""JSON schemas of tools, from type hints and docstrings in Google style.

The schemas match `get_json_schema` of `transformers`, as chat templates expect. A worker process
imports this module, which therefore imports only the standard library.
"""

import enum
import inspect
import json
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxrl_po.run.data.workers import Json

SECTIONS = ("Args:", "Returns:", "Raises:")
PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
GROUPS = {list: "array", tuple: "array", dict: "object"}
ENTRY = re.compile(r"(\s*)(\w+):\s*(.*)")
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


class ToolError(Exception):
    """A tool lacks a part that its schema needs; the message names the method and that part."""


def schema_of(tool: Callable[..., Any], name: str) -> Json:
    """Returns the JSON schema of one tool.

    Args:
      tool: function or bound method that implements the tool.
      name: name of the tool.

    Raises:
      ToolError: the tool has no docstring, a parameter has no type hint or description, or JSON
        lacks the type of a parameter.

    Example:
      >>> def double(x: int):
      ...     '''Twice a number.
      ...
      ...     Args:
      ...         x: the number
      ...     '''
      >>> print(json.dumps(schema_of(double, "double")["function"]["parameters"]["properties"]))
      {"x": {"type": "integer", "description": "the number"}}
    """
    doc = (inspect.getdoc(tool) or "").strip()
    if not doc:
        raise ToolError(f"{name} lacks a docstring, from which the model learns what it does")
    description, entries, returns = read_docstring(doc)
    try:
        hints = get_type_hints(tool)
    except (NameError, TypeError) as error:
        raise ToolError(f"{name} has a type hint that cannot be read: {error}") from None
    properties, required = dict[str, Any](), []
    for parameter in inspect.signature(tool).parameters.values():
        where = f"parameter {parameter.name} of {name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolError(f"{where} must be a named one: the model cannot know of others")
        if parameter.name not in hints:
            raise ToolError(f"{where} lacks a type hint")
        if parameter.name not in entries:
            raise ToolError(f"{where} lacks a line in the section Args of the docstring")
        properties[parameter.name] = _described(
            type_of(hints[parameter.name], where), entries[parameter.name], where
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    function = {"name": name, "description": description, "parameters": schema}
    if "return" in hints:
        try:
            returned = type_of(hints["return"], name)
            function["return"] = returned | ({"description": returns} if returns else {})
        except ToolError:
            pass  # the schema may lack the return type, since the model never writes results
    return {"type": "function", "function": function}


def read_docstring(doc: str) -> tuple[str, dict[str, str], str]:
    r"""Returns a docstring's description, parameter descriptions and `Returns`, or empty texts.

    Example:
      >>> read_docstring("Adds.\n\nArgs:\n  a: one\n    number\n  b: b\nReturns:\n  Sum.")
      ('Adds.', {'a': 'one number', 'b': 'b'}, 'Sum.')
    """
    parts: dict[str, list[str]] = {"": []}
    part = ""
    for line in doc.splitlines():
        if line.strip() in SECTIONS:
            part = line.strip()
            parts.setdefault(part, [])
        else:
            parts[part].append(line)
    entries: dict[str, list[str]] = {}
    depth, current = None, ""
    for line in filter(str.strip, parts.get("Args:", [])):
        found = ENTRY.fullmatch(line)
        if found and (depth is None or len(found[1]) <= depth):
            depth, current = len(found[1]), found[2]
            entries[current] = [found[3].strip()]
        elif current:
            entries[current].append(line.strip())
    described = {name: " ".join(filter(None, lines)) for name, lines in entries.items()}
    return ("\n".join(parts[""]).strip(), described, "\n".join(parts.get("Returns:", [])).strip())


def type_of(hint: Any, where: str) -> Json:
    """Returns the JSON type that corresponds to a type hint.

    Example:
      >>> type_of(list[int], ""), type_of(Literal["a", "b"], "")
      ({'type': 'array', 'items': {'type': 'integer'}}, {'type': 'string', 'enum': ['a', 'b']})

    Raises:
      ToolError: JSON lacks such a type; the message starts with `where`.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if hint in GROUPS:
        return {"type": GROUPS[hint]}
    if origin is Literal:
        return _one_of(list(arguments), where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of([member.value for member in hint], where)
    if origin is list:
        return {"type": "array", "items": type_of(arguments[0], where)}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [type_of(each, where) for each in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_of(arguments[1], where)}
    if origin in (Union, types.UnionType):
        return _any_of([each for each in arguments if each is not type(None)], arguments, where)
    raise ToolError(
        f"{where} has the type {getattr(hint, '__name__', hint)}, which JSON does not have: use "
        "str, int, float, bool, list, dict, Literal or an Enum of these, or one | None"
    )


def _any_of(hints: list[object], arguments: tuple[object, ...], where: str) -> Json:
    each = [type_of(hint, where) for hint in hints]
    if len(each) == 1:
        found = each[0]
    elif all(one.keys() == {"type"} and isinstance(one["type"], str) for one in each):
        names = sorted({one["type"] for one in each})
        found = {"type": names[0] if len(names) == 1 else names}
    else:
        found = {"anyOf": each}
    return found | ({"nullable": True} if type(None) in arguments else {})


def _one_of(values: list[object], where: str) -> Json:
    if not values or any(type(value) not in PLAIN for value in values):
        raise ToolError(f"{where} must list values that JSON has, got {values}")
    names = list(dict.fromkeys(PLAIN[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _described(found: Json, text: str, where: str) -> Json:
    """Returns a type with its description, which may end with `(choices: ["a", "b"])`."""
    choices = CHOICES.search(text)
    if choices is None:
        return found | {"description": text}
    try:
        listed = json.loads(choices[1])
    except ValueError:
        raise ToolError(f'{where} must list its choices as JSON: (choices: ["a", "b"])') from None
    values = [value.strip() if isinstance(value, str) else value for value in listed]
    return found | {"enum": values, "description": text[: choices.start()].strip()}
