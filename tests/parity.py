"""Our pretrained models against `transformers`, live; `make parity` runs it.

`python tests/parity.py --write` keeps the logits of `transformers` for `make test`.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import families
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jaxrl_po.language import pretrained, sampling

GOLDEN = Path(__file__).parent / "golden_pretrained.json"
LENGTH, NEW = 70, 64
MESSAGES = [
    {"role": "system", "content": "w8 w9"},
    {"role": "user", "content": " w4 w5 "},
    {"role": "assistant", "content": "w6"},
    {"role": "user", "content": "w7"},
]


def tokens_of(vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Two rows, the second with padding on the left."""
    drawn = np.random.default_rng(0).integers(4, min(vocabulary, 97), size=(2, LENGTH))
    pad = np.array([0, 9])
    drawn[1, :9] = 2
    return drawn.astype(np.int32), pad.astype(np.int32)


def theirs(folder: Path):
    """The model of `transformers`, of which no tensor may be missing or left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def their_logits(model, tokens: np.ndarray, pad: np.ndarray) -> np.ndarray:
    """`[B, N, V]`."""
    seen = np.arange(tokens.shape[1])[None] >= pad[:, None]
    with torch.no_grad():
        mask = torch.tensor(seen.astype(np.int64))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = model(torch.tensor(tokens).long(), attention_mask=mask, position_ids=positions)
    return out.logits.float().numpy()


def greatest(ours, others, pad) -> float:
    """The largest difference of two logits outside the padding."""
    seen = np.arange(LENGTH)[None] >= pad[:, None]
    return float(np.abs(np.asarray(ours) - others)[seen].max())


def greedy(loaded, prompt: np.ndarray, pad: np.ndarray) -> np.ndarray:
    """`[B, NEW]`."""
    return np.asarray(
        sampling.generate(
            loaded.model,
            loaded.params,
            jnp.asarray(prompt),
            jnp.asarray(pad),
            jax.random.split(jax.random.key(0), len(prompt)),
            group_size=1,
            decoding=sampling.Decoding(NEW),
            eos=loaded.tokenizer.ends,
            pad_token=loaded.tokenizer.pad,
            greedy=True,
        ).tokens
    )


def compare(name: str, folder: Path) -> dict:
    """Asserts parity; returns what `make test` compares with."""
    families.write(folder, name)
    loaded, model = pretrained.load(folder), theirs(folder)
    tokens, pad = tokens_of(loaded.model.vocabulary)
    logits = their_logits(model, tokens, pad)
    ours = loaded.model.apply(loaded.params, tokens, pad)[0]
    difference = greatest(ours, logits, pad)
    assert difference < 1e-4, (name, difference)
    short, short_pad = tokens[:, :12], np.minimum(pad, 5)
    short = np.where(np.arange(12)[None] < short_pad[:, None], 2, short)
    mask = torch.tensor((np.arange(12)[None] >= short_pad[:, None]).astype(np.int64))
    generated = model.generate(
        torch.tensor(short).long(),
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=[1, 2],
        pad_token_id=2,
    ).numpy()[:, 12:]
    whole = np.full((2, NEW), 2)
    whole[:, : generated.shape[1]] = generated
    mine = greedy(loaded, short, short_pad)
    assert (mine == whole).all(), (name, mine, whole)
    again = folder.parent / f"{name}-again"
    pretrained.save(again, *loaded)
    exported = their_logits(theirs(again), tokens, pad)
    assert greatest(exported, logits, pad) < 1e-5, name
    reader = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    rendered = loaded.chat_template.render(MESSAGES, tools=[{"é": 1}])
    expected = reader.apply_chat_template(
        MESSAGES, tools=[{"é": 1}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == expected, (rendered, expected)
    assert loaded.tokenizer.encode(rendered) == reader.encode(rendered, add_special_tokens=False)
    print(f"{name}: logits within {difference:.1e}, {NEW} greedy tokens, export, template")
    return {
        "logits": np.round(logits[:, -1, :40].astype(float), 6).tolist(),
        "greedy": whole.tolist(),
        "chat": expected,
    }


def main(argv: list[str]) -> None:
    """Runs from arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the logits for make test")
    write = parser.parse_args(argv).write
    with tempfile.TemporaryDirectory() as temporary:
        kept = {name: compare(name, Path(temporary) / name) for name in families.CONFIGS}
    if write:
        source = f"transformers {transformers.__version__}, torch {torch.__version__}"
        GOLDEN.write_text(json.dumps({"source": source, "families": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
