"""The chat template of a pretrained model."""

import datetime
import functools
import json
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_po.config import ConfigError

SPECIAL = re.compile("[a-z_]+_token")  # names of special tokens, such as `eos_token`
CUT = "CONTINUE_FINAL_MESSAGE_TAG "  # the trailing space reveals whether a template trims messages


class ChatTemplate(NamedTuple):
    """Jinja template that renders messages as the text of a prompt.

    Attributes:
      source: source code of the template.
      special: texts of the special tokens, by names such as `eos_token`.
    """

    source: str
    special: Mapping[str, str]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **arguments: Any,
    ) -> str:
        """Renders the messages; by default the text ends with the opening of an answer.

        Args:
          messages: messages of the conversation, each with `role` and `content`.
          add_generation_prompt: True to end with the opening of the assistant's answer.
          continue_final_message: True to end with the last message instead, which is left open.
          **arguments: other arguments of the template, such as `enable_thinking`. The defaults of
            `tools` and `documents` are None, as in `transformers`.

        Raises:
          ConfigError: the template is not valid, refuses the messages, writes a special token
            that the tokenizer does not have, or does not show a last message to continue.
        """
        given: dict[str, Any] = {"tools": None, "documents": None, **self.special, **arguments}
        last = messages[-1]["content"] if continue_final_message else ""
        if continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": last + CUT}]
            add_generation_prompt = False
        try:
            text: str = _compiled(self.source).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **given
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise ConfigError("chat_template", f"{_line(error)}{_reason(error)}") from None
        if not continue_final_message:
            return text
        shown, tag, rest = text.rpartition(CUT.strip())
        if not tag or last.strip() not in text:
            raise ConfigError("chat_template", "does not show the last message as it stands")
        return shown if rest.startswith(" ") else shown.rstrip()


def _line(error: Exception) -> str:
    """Returns the template's line that raised an error, as "line 3: ".

    Empty if the line is unknown.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    number = getattr(error, "lineno", lines[-1] if lines else None)
    return f"line {number}: " if number else ""


def _reason(error: Exception) -> str:
    """Returns the message of an error, after its type unless the template itself raised it."""
    import jinja2

    named = isinstance(error, jinja2.TemplateError)
    return str(error) if named and str(error) else f"{type(error).__name__}: {error}"


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


def _environment() -> Any:
    """Sets Jinja up as `transformers` does: templates cannot modify objects or access files."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """Tag `{% generation %}`, which marks an assistant's text and does not change it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    class Missing(jinja2.Undefined):
        """Undefined variable that renders as empty text, or raises for a special token."""

        def __str__(self) -> str:
            if SPECIAL.fullmatch(self._undefined_name or ""):
                self._fail_with_undefined_error()
            return super().__str__()

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        form: Any = {"separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        undefined=Missing,
    )
    environment.filters["tojson"] = tojson  # Jinja's own filter escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
