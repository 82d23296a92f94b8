"""Low-rank adapters of a transformer's matrices (Hu et al. 2021, arXiv:2106.09685)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.config import POSITIVE, ConfigError, check_number, check_size, static_value
from jaxrl_po.types import PyTree

ATTENTION = ("query", "key", "value", "out")
MLP = ("gate", "up", "down")
EVERY = (*ATTENTION, *MLP)

ADAPTERS = "lora"
"""Name of the collection of parameters."""
BASE = "params"
"""Name of the collection that they are over."""


class Lora(NamedTuple):
    """W + (α / r)·A·B in place of W; A `[inputs, r]` is drawn, B `[r, outputs]` is 0 at the start.

    The learning rate is about ten times that of full training; for RL a rank of 1 – 8 suffices.

    Attributes:
      rank: r.
      alpha: α.
      targets: names of the matrices of a block that have adapters, of `EVERY`.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = EVERY

    @property
    def scale(self) -> float:
        """α / r."""
        return self.alpha / self.rank

    def validate(self) -> None:
        """Raises ConfigError for a rank or alpha out of range, or a target that is no matrix."""
        check_size("rank", self.rank)
        check_number("alpha", static_value("alpha", self.alpha), POSITIVE)
        unknown = [name for name in self.targets if name not in EVERY]
        if unknown or not self.targets:
            raise ConfigError(
                "targets",
                f"must be some of {', '.join(EVERY)}, got {', '.join(unknown) or 'nothing'}",
            )


class Adapted(NamedTuple):
    """A model over variables that nothing trains: the base of its adapters, or constants.

    Attributes:
      model: a `Transformer` with `lora`, or a custom module with constants.
      base: `{"params": …}`, or the constants.
    """

    model: Any
    base: PyTree

    def apply(self, adapters: PyTree, *arguments: Any, **options: Any) -> Any:
        """As `Transformer.apply`, of the adapters `{"lora": …}`."""
        return self.model.apply({**self.base, **adapters}, *arguments, **options)

    @property
    def rows_over_devices(self) -> bool:
        """As `Transformer.rows_over_devices`."""
        return bool(getattr(self.model, "rows_over_devices", False))

    def for_decoding(self, adapters: PyTree, rows: int) -> PyTree:
        """As `Transformer.for_decoding`: the adapters, with other forms of the base."""
        prepare = getattr(self.model, "for_decoding", None)
        if prepare is None:
            return adapters
        held = prepare({**self.base, **adapters}, rows)
        return {name: x for name, x in held.items() if name not in self.base}

    def empty_cache(self, batch: int, length: int) -> Any:
        """As `Transformer.empty_cache`."""
        return self.model.empty_cache(batch, length)


def over(model: Any, frozen: PyTree, constants: PyTree = None) -> Any:
    """Returns the model as a function of what is trained, over a frozen base and constants."""
    base = {BASE: frozen[BASE]} if frozen and BASE in frozen else {}
    base = {**base, **(constants or {})}
    return Adapted(model, base) if base else model


def merge(model: Any, base: PyTree, adapters: PyTree) -> PyTree:
    """Parameters of the model without adapters that computes the same: W + (α / r)·A·B.

    Args:
      model: a `Transformer` with `lora`.
      base: `{"params": …}`.
      adapters: `{"lora": …}` of one seed.

    Returns:
      `{"params": …}`; what adapters change is float32 at least: rounded to bfloat16, most of a
      change would be lost.
    """
    blocks = dict(base["params"]["blocks"])
    for name, module in adapters[ADAPTERS]["blocks"].items():
        blocks[name] = dict(blocks[name])
        for target, pair in module.items():
            kernel = blocks[name][target]["kernel"]
            change = model.lora.scale * jnp.matmul(
                pair["a"], pair["b"], precision=jax.lax.Precision.HIGHEST
            )
            merged = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32)) + change
            blocks[name][target] = blocks[name][target] | {"kernel": merged}
    return {"params": base["params"] | {"blocks": blocks}}
