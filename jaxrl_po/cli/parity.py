"""Holds a pretrained model of ours to `transformers`: `jaxrl-po parity --model=path/to/model`.

Reads the folder or GGUF file with both, in float32, and compares the logits of random tokens, with
padding on the left and without, and the tokens that each finds most likely.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_po import config
from jaxrl_po.config import COUNT, POSITIVE, SEED, ConfigError, static
from jaxrl_po.language import pretrained, sampling
from jaxrl_po.run.experiment import extras, flags
from jaxrl_po.run.experiment.flags import UsageError

ROWS = 2


@config.record
class Options:
    """The comparison."""

    model: str = static("", "folder or GGUF file of a pretrained model")
    length: int = static(64, "random tokens of a prompt", unit="tokens", within=COUNT)
    new_tokens: int = static(32, "greedy tokens after a prompt", unit="tokens", within=COUNT)
    tolerance: float = static(
        1e-3, "largest difference of two logits that is still parity", within=POSITIVE
    )
    seed: int = static(0, "of the tokens", within=SEED)


class Comparison(NamedTuple):
    """What both computed, B = `ROWS`.

    Attributes:
      ours: logits `[B, N, V]`, float32.
      theirs: likewise.
      seen: `[B, N]`, bool, False for padding.
      greedy: our most likely tokens, `[B, T]`, padded after an end.
      their_greedy: likewise.
    """

    ours: npt.NDArray[np.float32]
    theirs: npt.NDArray[np.float32]
    seen: npt.NDArray[np.bool_]
    greedy: npt.NDArray[np.int32]
    their_greedy: npt.NDArray[np.int32]

    @property
    def difference(self) -> float:
        """The largest difference of two logits outside the padding."""
        return float(np.abs(self.ours - self.theirs)[self.seen].max())


def compare(folder: Path, *, length: int, new_tokens: int, seed: int = 0) -> Comparison:
    """Reads a folder with both libraries and runs both.

    Args:
      folder: of the model, or its GGUF file.
      length: N, tokens of a prompt; a quarter of the second row's are padding.
      new_tokens: T.
      seed: of the tokens.

    Raises:
      ConfigError: we cannot read the folder, or `transformers` finds other tensors in it.
    """
    torch, theirs = importlib.import_module("torch"), _theirs(folder)
    loaded = pretrained.load(folder)
    tokenizer = loaded.tokenizer
    known = np.arange(min(tokenizer.rules.get_vocab_size(), tokenizer.size))
    usual = np.setdiff1d(known, [tokenizer.pad, *tokenizer.ends])
    tokens = np.random.default_rng(seed).choice(usual, size=(ROWS, length)).astype(np.int32)
    pad = np.array([0, length // 4], np.int32)
    seen = np.arange(length)[None] >= pad[:, None]
    tokens = np.where(seen, tokens, tokenizer.pad)
    mask = torch.tensor(seen.astype(np.int64))
    inputs = {"input_ids": torch.tensor(tokens).long(), "attention_mask": mask}
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = theirs(**inputs, position_ids=positions).logits
        ends = {"eos_token_id": list(tokenizer.ends), "pad_token_id": tokenizer.pad}
        continued = theirs.generate(**inputs, **ends, max_new_tokens=new_tokens, do_sample=False)
        continued = continued[:, length:]
    their_greedy = np.full((ROWS, new_tokens), tokenizer.pad, np.int32)
    their_greedy[:, : continued.shape[1]] = continued.numpy()
    ours = sampling.generate(
        loaded.model,
        loaded.params,
        jnp.asarray(tokens),
        jnp.asarray(pad),
        jax.random.split(jax.random.key(0), ROWS),
        group_size=1,
        decoding=sampling.Decoding(new_tokens),
        eos=tokenizer.ends,
        pad_token=tokenizer.pad,
        greedy=True,
    )
    return Comparison(
        ours=np.asarray(jax.jit(loaded.model.apply)(loaded.params, tokens, pad)[0]),
        theirs=logits.float().numpy(),
        seen=seen,
        greedy=np.asarray(ours.tokens),
        their_greedy=their_greedy,
    )


def _theirs(folder: Path) -> Any:
    """The model of `transformers`."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    place, given = (folder.parent, {"gguf_file": folder.name}) if folder.is_file() else (folder, {})
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        place, **given, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            raise ConfigError(f"{folder}: transformers reports {kind}: {sorted(found[kind])[0]}")
    return model.eval()


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0 for parity and 1 for none."""
    summary = "Compares a pretrained model with transformers."
    options = flags.ask(argv, "jaxrl-po parity", summary, Options)
    if options is None:
        return 0
    if not options.model:
        raise UsageError("--model must name the folder of a pretrained model")
    extras.require("model", "safetensors", "pretrained")
    needed = ["torch", "transformers"]
    if Path(options.model).is_file():
        extras.require("model", "gguf", "gguf")
        needed.append("accelerate")  # which transformers asks for with a GGUF file
    for package in needed:
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"--model is compared with transformers: pip install {package}")
    sizes = {name: getattr(options, name) for name in ("length", "new_tokens", "seed")}
    try:
        found = compare(Path(options.model), **sizes)
    except ConfigError as error:
        raise UsageError(f"--model={options.model}: {error}") from None
    equal = found.greedy == found.their_greedy
    print(f"largest difference of a logit: {found.difference:.1e}")
    print(f"logits of transformers: {found.theirs.min():.4g} to {found.theirs.max():.4g}")
    print(f"greedy tokens equal: {equal.sum()} of {equal.size}")
    return int(found.difference > options.tolerance or not equal.all())
