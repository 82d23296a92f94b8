"""What the pages made of docstrings need beside them: doctests as code, and what a field of a record says of itself."""

import ast
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Reads `Example:` as griffe's `Examples:`, and the text of `number(…)` and `static(…)` as the docstring of a field."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Completes one object."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
        elif isinstance(obj, griffe.Attribute) and _is_field(obj.value):
            said = str(obj.value.arguments[1])
            with_quotes = said.removeprefix("f")  # what an f-string names stays as it is written
            obj.docstring = griffe.Docstring(f"{ast.literal_eval(with_quotes)}.", parent=obj)


def _is_field(value: Any) -> bool:
    return isinstance(value, griffe.ExprCall) and str(value.function).rpartition(".")[2] in (
        "number",
        "static",
    )
