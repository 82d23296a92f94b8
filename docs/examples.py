"""A griffe extension for the API pages: doctests as code, descriptions of the fields of records."""

import ast
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renders `Example:` sections, and the text of `number(…)` and `static(…)` as a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Completes one object."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
        elif isinstance(obj, griffe.Attribute) and _is_field(obj.value):
            said = str(obj.value.arguments[1])
            with_quotes = said.removeprefix("f")  # the names in an f-string stay as written
            obj.docstring = griffe.Docstring(f"{ast.literal_eval(with_quotes)}.", parent=obj)


def _is_field(value: Any) -> bool:
    return isinstance(value, griffe.ExprCall) and str(value.function).rpartition(".")[2] in (
        "number",
        "static",
    )
