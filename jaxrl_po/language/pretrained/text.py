"""The tokenizer and the chat template of a pretrained model."""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError
from jaxrl_po.language.stopping import Stops, make_stops

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
CONTEXT = "max_position_embeddings"  # in config.json: the longest text, tokens
GENERATION, CONFIG = "generation_config.json", "config.json"
SPECIAL_MAP = "special_tokens_map.json"
SPECIAL = re.compile("[a-z_]+_token")  # names of special tokens, such as `eos_token`


class ChatTemplate(NamedTuple):
    """Messages to the text of a prompt, by a template in Jinja.

    Attributes:
      source: of the template.
      special: names such as `eos_token` to the text of a special token.
    """

    source: str
    special: Mapping[str, str]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        """The text, which begins the assistant's answer unless told otherwise.

        Args:
          messages: each with `role` and `content`.
          add_generation_prompt: end with what opens an answer.
          **arguments: others of the template, such as `enable_thinking`. Without them `tools` and
            `documents` are None, as in `transformers`.

        Raises:
          ConfigError: the template is not valid, refuses the messages, or writes a special token
            that the tokenizer does not have.
        """
        import jinja2

        given: dict[str, Any] = {"tools": None, "documents": None, **self.special, **arguments}
        try:
            text: str = _compiled(self.source).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **given
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(f"chat template: {error}") from None
        return text


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


def _environment() -> Any:
    """Jinja as `transformers` sets it up: templates can neither change objects nor reach files."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what an assistant says, which does not change the text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    class Missing(jinja2.Undefined):
        """Empty where it is written, but for a special token, which no text may lose."""

        def __str__(self) -> str:
            if SPECIAL.fullmatch(self._undefined_name or ""):
                self._fail_with_undefined_error()
            return super().__str__()

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        undefined=Missing,
    )
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class TextTokenizer(NamedTuple):
    """Text to ids and back, by `tokenizers`.

    Attributes:
      rules: the `tokenizers.Tokenizer`.
      size: V of the model, which may be larger than the number of tokens.
      pad: id that fills rows, never `eos`; it may be another of `ends`, so that masks must go by
        length. Any other id, where the tokenizer has no such token.
      ends: ids of which each ends a completion.
      settings: the content of `tokenizer_config.json`.
      stops: strings of which each ends a completion too; None for none.
    """

    rules: Any
    size: int
    pad: int
    ends: tuple[int, ...]
    settings: Mapping[str, Any]
    stops: Stops | None = None

    @property
    def eos(self) -> int:
        """Id of the token that ends a text of ours."""
        return self.ends[0]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text`; with `special` the tokenizer adds its own, such as BOS."""
        ids: list[int] = self.rules.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, tokens: list[int], *, pad: str = "") -> str:
        """Text up to the first end, without special tokens; PAD is one, and `pad` unused."""
        del pad
        end = next((i for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        text: str = self.rules.decode(tokens[:end], skip_special_tokens=True)
        return text

    def decode_rows(self, tokens: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> list[str]:
        """Texts of all rows, `[B, T]`: the unmasked tokens without ends and special ones."""
        kept = mask & ~np.isin(tokens, self.ends)
        rows = [row[keep].tolist() for row, keep in zip(tokens, kept, strict=True)]
        texts: list[str] = self.rules.decode_batch(rows, skip_special_tokens=True)
        return texts


def read_tokenizer(folder: Path, vocabulary: int) -> tuple[TextTokenizer, ChatTemplate | None]:
    """The tokenizer of a folder and its chat template, None without one.

    Args:
      folder: of the checkpoint.
      vocabulary: V of the model.

    Raises:
      ConfigError: no tokenizer, one with ids outside the vocabulary, or one without an EOS.
    """
    from tokenizers import Tokenizer

    if not (folder / TOKENIZER).exists():
        raise ConfigError(f"{folder} must hold {TOKENIZER}")
    try:
        rules = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{folder / TOKENIZER} must be a tokenizer: {error}") from None
    rules.no_padding()
    rules.no_truncation()
    largest = max(rules.get_vocab(with_added_tokens=True).values())
    if largest >= vocabulary:
        raise ConfigError(
            f"{folder / TOKENIZER} must have ids below {vocabulary}, the vocabulary of the model, "
            f"got {largest}"
        )
    settings = read_json(folder / SETTINGS, optional=True)
    named = read_json(folder / SPECIAL_MAP, optional=True) | settings
    special = {
        name: _text(token)
        for name, token in named.items()
        if SPECIAL.fullmatch(name) and _is_text(token)
    }
    source = _template(folder, settings)
    template = None if source is None else ChatTemplate(source, special)
    ends = _ends(folder, rules, special)
    if template is not None:
        ends = _turn_end_first(ends, template, rules)
    # A demonstration ends with the first end, from which PAD must be told.
    pads = (rules.token_to_id(special.get("pad_token", "")), *ends, *range(len(ends) + 1))
    pad = next(token for token in pads if token not in (None, ends[0]))
    tokenizer = TextTokenizer(
        rules, vocabulary, pad, ends, settings, _stops(folder, rules, vocabulary)
    )
    return tokenizer, template


def _ends(folder: Path, rules: Any, special: Mapping[str, str]) -> tuple[int, ...]:
    """Ids of which each ends a completion, from the first file that names any."""
    for name in (GENERATION, CONFIG):
        ends = read_json(folder / name, optional=True).get("eos_token_id")
        if ends is not None:
            return tuple(ends) if isinstance(ends, list) else (ends,)
    end = rules.token_to_id(special.get("eos_token", ""))
    if end is None:
        raise ConfigError(
            f"{folder} must name a token that ends a text: eos_token_id in {GENERATION} or "
            f"{CONFIG}, or eos_token in {SETTINGS}"
        )
    return (end,)


def _turn_end_first(ends: tuple[int, ...], template: ChatTemplate, rules: Any) -> tuple[int, ...]:
    """The ends, first the one with which the template ends what the model says."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    try:
        text = template.render(said, add_generation_prompt=False)
    except ConfigError:
        return ends
    written = [i for i in rules.encode(text, add_special_tokens=False).ids if i in ends]
    return tuple(sorted(ends, key=lambda end: end != written[-1])) if written else ends


def _stops(folder: Path, rules: Any, vocabulary: int) -> Stops | None:
    strings = read_json(folder / GENERATION, optional=True).get("stop_strings") or []
    strings = [strings] if isinstance(strings, str) else strings
    try:
        return make_stops(strings, token_texts(rules, vocabulary)) if strings else None
    except ConfigError as error:
        raise ConfigError(f"{folder / GENERATION}: {error}") from None


def token_texts(rules: Any, vocabulary: int) -> list[bytes]:
    """What each token adds to a text that it does not begin; nothing where an id has no token."""
    decoder = json.loads(rules.to_str())["decoder"]
    by_bytes = _unicode_to_byte() if "ByteLevel" in json.dumps(decoder) else {}
    added = {token.content for token in rules.get_added_tokens_decoder().values()}

    def text(token: str | None) -> bytes:
        if token is None or token in added:
            return (token or "").encode()
        if by_bytes and set(token) <= by_bytes.keys():
            return bytes(by_bytes[character] for character in token)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
            return bytes([int(byte[1], 16)])
        whole: str = rules.decoder.decode(["a", token]) if decoder else f"a {token}"
        return whole.removeprefix("a").encode()

    return [text(rules.id_to_token(i)) for i in range(vocabulary)]


def _unicode_to_byte() -> dict[str, int]:
    """How byte-level tokens are written: printable bytes as themselves, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (folder / TEMPLATE).exists():
        return (folder / TEMPLATE).read_text()
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = {each["name"]: each["template"] for each in source}.get("default")
    return source


def _is_text(token: Any) -> bool:
    """Whether an entry is a token: `add_bos_token` is a switch."""
    return bool(token) and isinstance(token, str | Mapping)


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def write_tokenizer(folder: Path, tokenizer: TextTokenizer, template: ChatTemplate | None) -> None:
    """Writes what `read_tokenizer` and `transformers` read."""
    tokenizer.rules.save(str(folder / TOKENIZER))
    settings = {
        name: value for name, value in tokenizer.settings.items() if name != "chat_template"
    }
    write_json(folder / SETTINGS, settings)
    stops = {} if tokenizer.stops is None else {"stop_strings": list(tokenizer.stops.strings)}
    write_json(folder / GENERATION, {"eos_token_id": list(tokenizer.ends)} | stops)
    if template is not None:
        (folder / TEMPLATE).write_text(template.source)


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The content of a JSON file, empty where it may be missing and is.

    Raises:
      ConfigError: it is missing or not a JSON object.
    """
    if not path.exists():
        if optional:
            return {}
        raise ConfigError(f"{path.parent} must hold {path.name}")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
