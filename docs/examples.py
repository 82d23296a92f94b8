"""Extension of griffe for the API pages: doctests as code, descriptions of fields of records."""

import dataclasses
import importlib
from typing import Any

import griffe

from jaxrl_po import config


class Examples(griffe.Extension):
    """Renders `Example:` sections, and the text of `number(…)` and `static(…)` as a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Completes one object."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
        elif isinstance(obj, griffe.Attribute) and _is_field(obj.value):
            module, _, record = obj.parent.path.rpartition(".")
            fields = dataclasses.fields(getattr(importlib.import_module(module), record))
            (doc,) = (config.setting_of(field).doc for field in fields if field.name == obj.name)
            obj.docstring = griffe.Docstring(f"{doc}.", parent=obj)


def _is_field(value: Any) -> bool:
    return isinstance(value, griffe.ExprCall) and str(value.function).rpartition(".")[2] in (
        "number",
        "static",
        "option",
        "common_option",
        "start_option",
        "process_option",
    )
