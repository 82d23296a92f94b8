"""Reads and writes the tokenizer of a pretrained model."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError
from jaxrl_po.language.pretrained.files import (
    CONFIG,
    GENERATION,
    SETTINGS,
    SPECIAL_MAP,
    TEMPLATE,
    TEMPLATES,
    TOKENIZER,
    ModelFiles,
)
from jaxrl_po.language.pretrained.templates import SPECIAL, ChatTemplate
from jaxrl_po.language.stopping import Stops, make_stops

# Tokenizer classes that obey `add_bos_token`; model families, for a model that does not name a
# class.
FLAGGED = re.compile("(code_?)?llama|gemma", re.IGNORECASE)


class TextTokenizer(NamedTuple):
    """Tokenizer between text and ids, backed by the package `tokenizers`.

    Attributes:
      rules: tokenizer of the package, a `tokenizers.Tokenizer`.
      size: vocabulary size V of the model, which may be larger than the number of tokens.
      pad: id that fills rows, which is never `eos`. The id `pad` may be another id of `ends`, so
        masks must be computed from lengths. If the tokenizer does not have a padding token, `pad`
        is an arbitrary other id.
      ends: ids that each end a completion.
      settings: content of `tokenizer_config.json`.
      stops: automaton of strings that each end a completion too; None if the model has no stop
        strings.
      others: contents of further files that `write_tokenizer` writes again:
        `special_tokens_map.json`, `generation_config.json`, and the templates in
        `additional_chat_templates` by file name.
    """

    rules: Any
    size: int
    pad: int
    ends: tuple[int, ...]
    settings: Mapping[str, Any]
    stops: Stops | None = None
    others: Mapping[str, Mapping[str, Any]] = {}

    @property
    def eos(self) -> int:
        """Id of the token that ends a text written by this package."""
        return self.ends[0]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Returns the ids of `text`; with `special`, special tokens such as BOS are added once.

        Raises:
          ConfigError: a token is outside the vocabulary of the model.
        """
        found = self.rules.encode(text, add_special_tokens=special)
        ids: list[int] = found.ids[1:] if _is_doubled(found) else found.ids
        if ids and (largest := max(ids)) >= self.size:
            raise ConfigError(
                "text",
                f"must leave out the token {self.rules.id_to_token(largest)!r}: its id is "
                f"{largest}, and the vocabulary of the model has {self.size}",
            )
        return ids

    def begins(self, text: str) -> bool:
        """Returns True if `text` begins with the token that the tokenizer prepends, such as BOS."""
        return _is_doubled(self.rules.encode(text))

    def decode(self, tokens: list[int], *, pad: str = "") -> str:
        """Returns the text before the first end, without special tokens.

        PAD is a special token, so the argument `pad` is unused.
        """
        del pad
        end = next((i for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        text: str = self.rules.decode(tokens[:end], skip_special_tokens=True)
        return text

    def token_texts(self) -> list[bytes]:
        """Returns the bytes that each id adds to a text; b"" for special tokens and unused ids."""
        added = self.rules.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special} | set(self.ends)
        found = token_texts(self.rules, self.size)
        return [b"" if i in special else text for i, text in enumerate(found)]

    def decode_rows(self, tokens: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> list[str]:
        """Decodes all rows, `[B, T]`: their unmasked tokens without ends and special tokens."""
        kept = mask & ~np.isin(tokens, self.ends)
        rows = [row[keep].tolist() for row, keep in zip(tokens, kept, strict=True)]
        texts: list[str] = self.rules.decode_batch(rows, skip_special_tokens=True)
        return texts


def _is_doubled(found: Any) -> bool:
    """Returns True if the tokenizer has prepended a token that the text already begins with."""
    return found.special_tokens_mask[:2] == [1, 0] and found.ids[0] == found.ids[1]


def read_tokenizer(files: ModelFiles, vocabulary: int) -> tuple[TextTokenizer, ChatTemplate | None]:
    """Reads a model's tokenizer and its chat template, or None for a model without template.

    Args:
      files: files of the checkpoint.
      vocabulary: vocabulary size V of the model.

    Raises:
      ConfigError: the tokenizer is missing, the tokenizer has ids outside the vocabulary (added
        tokens are refused only once a text uses them) or lacks an EOS, or the files contradict each
        other.
    """
    from tokenizers import Tokenizer

    path = files.path / TOKENIZER
    if TOKENIZER not in files.contents:
        raise ConfigError("folder", f"{files.path} must hold {TOKENIZER}")
    try:
        rules = Tokenizer.from_str(files.text(TOKENIZER))
    except Exception as error:  # the package `tokenizers` raises no narrower type
        raise ConfigError("folder", f"{path} must be a tokenizer: {error}") from None
    rules.no_padding()
    rules.no_truncation()
    added = rules.get_added_tokens_decoder()
    largest = max(i for i in rules.get_vocab().values() if i < vocabulary or i not in added)
    if largest >= vocabulary:
        raise ConfigError(
            "folder",
            f"{path} must have ids below {vocabulary}, the vocabulary of the model, got {largest}",
        )
    settings = files.json(SETTINGS)
    named = files.json(SPECIAL_MAP) | settings
    special = {
        name: str(token["content"]) if isinstance(token, Mapping) else token
        for name, token in named.items()
        # The name `add_bos_token` matches the pattern, but is a switch.
        if SPECIAL.fullmatch(name) and token and isinstance(token, str | Mapping)
    }
    _follow_flags(files, rules, settings, special)
    source = _template(files, settings)
    template = None if source is None else ChatTemplate(source, special)
    ends = _ends(files, rules, special, vocabulary)
    if template is not None:
        ends = _turn_end_first(ends, template, rules)
    # A demonstration ends with the first id of `ends`, so PAD must differ from the first id.
    pads = (rules.token_to_id(special.get("pad_token", "")), *ends, *range(len(ends) + 1))
    pad = next(i for i in pads if i not in (None, ends[0]) and i < vocabulary)
    stops = _stops(files, rules, vocabulary)
    others = {name: files.json(name) for name in (SPECIAL_MAP, GENERATION)}
    others[TEMPLATES] = {
        Path(name).name: files.text(name)
        for name in files.contents
        if name.startswith(f"{TEMPLATES}/")
    }
    return TextTokenizer(rules, vocabulary, pad, ends, settings, stops, others), template


def _follow_flags(
    files: ModelFiles, rules: Any, settings: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Makes tokenizers of Llama, Gemma and GGUF files obey `add_bos_token` and `add_eos_token`.

    `transformers` 4 obeys these flags whatever `tokenizer.json` says; version 5 follows
    `tokenizer.json`, and so do other tokenizer classes. If flags and `tokenizer.json` both state
    the added tokens, they must therefore agree.

    Raises:
      ConfigError: flags and `tokenizer.json` disagree, or a flag requests a token that does not
        exist.
    """
    from tokenizers import processors

    kind = settings.get("tokenizer_class")
    kind = kind or files.json(CONFIG).get("model_type")
    followed = files.adds_tokens or FLAGGED.match(str(kind))
    if not (followed and {"add_bos_token", "add_eos_token"} & settings.keys()):
        return

    def added(name: str, default: bool) -> list[str]:
        token = special.get(name, "")
        if not settings.get(f"add_{name}", default):
            return []
        if rules.token_to_id(token) is None:
            raise ConfigError(
                "folder",
                f"{files.path / SETTINGS}: add_{name} must be false or left out, or {name} one of "
                f"{TOKENIZER}, got {token!r}",
            )
        return [token]

    before, after = added("bos_token", True), added("eos_token", False)
    bare, whole = (rules.encode("a", add_special_tokens=more).tokens for more in (False, True))
    if whole == (wanted := [*before, *bare, *after]):
        return
    if whole != bare or "TemplateProcessing" in str(rules.post_processor):
        raise ConfigError(
            "folder",
            f"{files.path / SETTINGS}: add_bos_token and add_eos_token must agree with "
            f"post_processor of {TOKENIZER}: they make {wanted} of 'a', and it {whole}",
        )
    rules.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, rules.token_to_id(token)) for token in {*before, *after}],
    )


def _ends(
    files: ModelFiles, rules: Any, special: Mapping[str, str], vocabulary: int
) -> tuple[int, ...]:
    """Returns the ids that each end a completion, from the first file that names such ids."""
    for name in (GENERATION, CONFIG):
        given = files.json(name).get("eos_token_id")
        if given in (None, [], -1):
            continue
        ends = given if isinstance(given, list) else [given]
        if not all(type(end) is int and 0 <= end < vocabulary for end in ends):
            raise ConfigError(
                "folder",
                f"{files.path / name}: eos_token_id must be one id or a list of ids below "
                f"{vocabulary}, the vocabulary of the model, got {json.dumps(given)}",
            )
        return tuple(dict.fromkeys(ends))
    end = rules.token_to_id(special.get("eos_token", ""))
    if end is None or end >= vocabulary:
        raise ConfigError(
            "folder",
            f"{files.path} must name a token that ends a text: eos_token_id in {GENERATION} or "
            f"{CONFIG}, or eos_token in {SETTINGS}",
        )
    return (end,)


def _turn_end_first(ends: tuple[int, ...], template: ChatTemplate, rules: Any) -> tuple[int, ...]:
    """Sorts the ends so that the end that the template puts after a model's turn is first."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    try:
        text = template.render(said, add_generation_prompt=False)
    except ConfigError:
        return ends
    written = [i for i in rules.encode(text, add_special_tokens=False).ids if i in ends]
    return tuple(sorted(ends, key=lambda end: end != written[-1])) if written else ends


def _stops(files: ModelFiles, rules: Any, vocabulary: int) -> Stops | None:
    strings = files.json(GENERATION).get("stop_strings") or []
    strings = [strings] if isinstance(strings, str) else strings
    try:
        return make_stops(strings, token_texts(rules, vocabulary)) if strings else None
    except ConfigError as error:
        raise ConfigError("folder", f"{files.path / GENERATION}: {error}") from None


def token_texts(rules: Any, vocabulary: int) -> list[bytes]:
    """Returns the bytes that each token adds inside a text; b"" for ids without a token."""
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
    """Maps characters of byte-level tokens to bytes.

    Printable characters map to themselves, others start at U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _template(files: ModelFiles, settings: Mapping[str, Any]) -> str | None:
    if TEMPLATE in files.contents:
        return files.text(TEMPLATE)
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = {each["name"]: each["template"] for each in source}.get("default")
    return source


def write_tokenizer(folder: Path, tokenizer: TextTokenizer, template: ChatTemplate | None) -> None:
    """Writes the tokenizer files that `read_tokenizer` and `transformers` read."""
    tokenizer.rules.save(str(folder / TOKENIZER))
    settings, others = dict(tokenizer.settings), tokenizer.others
    named = settings.pop("chat_template", None)
    if isinstance(named, list):  # readers ignore these templates if `chat_template.jinja` exists
        kept = [each for each in named if each["name"] != "default"]
        default = [] if template is None else [{"name": "default", "template": template.source}]
        settings["chat_template"] = default + kept
    elif template is not None:
        (folder / TEMPLATE).write_text(template.source, encoding="utf-8")
    dump_json(folder / SETTINGS, settings)
    stops = {} if tokenizer.stops is None else {"stop_strings": list(tokenizer.stops.strings)}
    ends = {"eos_token_id": list(tokenizer.ends)} | stops
    dump_json(folder / GENERATION, dict(others.get(GENERATION, {})) | ends)
    if others.get(SPECIAL_MAP):
        dump_json(folder / SPECIAL_MAP, others[SPECIAL_MAP])
    for name, source in others.get(TEMPLATES, {}).items():
        (folder / TEMPLATES).mkdir(exist_ok=True)
        (folder / TEMPLATES / name).write_text(source, encoding="utf-8")


def dump_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
