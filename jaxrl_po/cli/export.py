"""Writes the policy that a run trained: `jaxrl-po export --run=runs/first --out=trained`.

A run of `jaxrl-po control` gives `policy.npz`, arrays for `numpy.load`, see `ControlPolicy.save`.
`transformers` and `--init_from` can read the folder of a run of `jaxrl-po language`; adapters are
merged into the matrices. A parameter that training did not change keeps the dtype of the base
model; a changed parameter is float32, which preserves the training result exactly.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import config as config_lib
from jaxrl_po.config import NON_NEGATIVE, ConfigError, static
from jaxrl_po.language import pretrained
from jaxrl_po.language.pretrained import weights
from jaxrl_po.run.devices.seeds import select_seed
from jaxrl_po.run.experiment import earlier, flags, language, models, policies
from jaxrl_po.run.experiment.experiment import DOMAINS
from jaxrl_po.run.store import folder
from jaxrl_po.types import PyTree


@config_lib.record
class ExportOptions:
    """Options of an export."""

    run: str = static(
        "",
        "folder of a run of jaxrl-po control, or of a run of jaxrl-po language that began with a "
        "pretrained model",
    )
    out: str = static("", "the folder to write, new or empty")
    checkpoint: str = static(
        "best", f"checkpoint to write; {earlier.WHICH}", choices=earlier.CHECKPOINTS
    )
    seed_index: int = static(
        0,
        "index of the seed whose parameters are written, from 0",
        within=NON_NEGATIVE,
        was=("seed",),
    )
    dtype: str = static(
        "",
        "dtype of all parameters; empty for float32, except that unchanged parameters keep the "
        "dtype of the base model",
        choices=("", "float32", "bfloat16", "float16"),
    )


def as_base(params: PyTree, base: PyTree) -> PyTree:
    """Returns the parameters; a parameter that equals the base model's gets the base's dtype."""

    def kept(x: jax.Array, before: jax.Array) -> jax.Array:
        return before if np.array_equal(x, before.astype(x.dtype)) else x

    return jax.tree.map(kept, params, base)


def rounded_away(params: PyTree, base: PyTree, dtype: str) -> tuple[int, int]:
    """Counts the numbers that training changed, and the changed numbers that `dtype` rounds back.

    Example:
      >>> base, params = np.array([1.0, 1.0]), np.array([1.0, 1.0001])
      >>> rounded_away(params, base, "bfloat16")
      (1, 1)
    """
    changed = lost = 0
    for x, before in zip(jax.tree.leaves(params), jax.tree.leaves(base), strict=True):
        x, before = np.asarray(x), np.asarray(before)
        differs = x != before.astype(x.dtype)
        changed += int(differs.sum())
        same = x.astype(jnp.dtype(dtype)) == before.astype(jnp.dtype(dtype))
        lost += int((differs & same).sum())
    return changed, lost


def main(argv: Sequence[str]) -> int:
    """Runs the command `export`; returns the exit status."""
    summary = "Writes the policy of a run for numpy, or the model of a run for transformers."
    options = flags.ask(argv, "jaxrl-po export", summary, ExportOptions)
    if options is None:
        return 0
    domain, found = earlier.read_any(DOMAINS.values(), "run", options.run)
    config: Any = found
    folder.require_name(options.out)
    out = Path(options.out)
    if not options.out:
        raise ConfigError("out", "must name a folder, e.g. trained")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError("out", f"must be a folder that is new or empty, got {options.out}")
    earlier.require_seed("seed_index", options.seed_index, config.run.seeds, "run", options.run)
    if domain is language:
        return _export_model(config, out, options)
    if options.dtype:
        raise ConfigError("dtype", f"must be left out: {options.run} is a run of control")
    _, iteration, state = earlier.state(domain, config, "run", options.run, options.checkpoint)
    acting = policies.acting_of(config, select_seed(state, options.seed_index))
    with folder.writing(out / "policy.npz"):
        acting.save(out / "policy.npz")
    print(f"{domain.title(config)}, seed {options.seed_index}, iteration {iteration}")
    print(f"see {out / 'policy.npz'}")
    return 0


def _export_model(config: Any, out: Path, options: ExportOptions) -> int:
    """Writes the folder of a language run's model; see `main`."""
    try:
        base = models.read_base(config.initial.pretrained, config.model)
        before = base and weights.read(base.files, base.model, dtype=None, place=models.on_host)
    except ConfigError as error:
        raise earlier.unsuitable("run", options.run, error) from None
    if base is None:
        raise ConfigError(
            "run",
            f"{options.run} has a tokenizer that transformers cannot read: load it "
            "by jaxrl_po.run.load, or start another run from it by init_from",
        )
    _, iteration, state = earlier.state(language, config, "run", options.run, options.checkpoint)
    policy = base.model.clone(lora=config.lora.lora)
    params = models.merge_policy(policy, select_seed(state, options.seed_index).params)
    text, context, dtype = base.text, base.text.context, options.dtype or None
    if dtype is None:
        params = as_base(params, before)
    else:
        changed, lost = rounded_away(params, before, dtype)
    try:
        with folder.writing(out / "config.json"):
            pretrained.save(
                out,
                base.model,
                params,
                text.tokenizer,
                text.template,
                dtype=dtype and jnp.dtype(dtype),
                context=context,
            )
    except ConfigError as error:
        raise ConfigError("run", f"{options.run}: {error.message}") from None
    which = f"{options.checkpoint} checkpoint (iteration {iteration})"
    print(f"{language.title(config)}, seed {options.seed_index}, {which}")
    if dtype is not None and changed and jnp.dtype(dtype).itemsize < 4:
        print(f"{lost / changed:.1%} of the changed numbers round back to the base's in {dtype}")
    print(f"see {out}")
    return 0
