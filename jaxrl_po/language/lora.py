"""Low-rank adapters for a transformer's matrices (Hu et al. 2021, arXiv:2106.09685)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.config import POSITIVE, ConfigError, check_number, check_size, static_value
from jaxrl_po.types import PyTree

ATTENTION = ("query", "key", "value", "out")
MLP = ("gate", "up", "down")
EVERY = (*ATTENTION, *MLP)

ADAPTERS = "lora"
"""Name of the collection with the adapters' parameters."""
BASE = "params"
"""Name of the collection with the base parameters that the adapters modify."""


class Lora(NamedTuple):
    """Adapters W + (α / r)·A·B in place of W.

    A `[inputs, r]` is drawn, B `[r, outputs]` starts at 0.

    Training adapters takes about ten times the learning rate of full training; for RL a rank of 1 –
    8 suffices.

    Attributes:
      rank: rank r of the adapters.
      alpha: numerator α of the scale α / r.
      targets: names of the matrices of a block that have adapters, a subset of `EVERY`.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = EVERY

    @property
    def scale(self) -> float:
        """Scale α / r of the adapters' product."""
        return self.alpha / self.rank

    def validate(self) -> None:
        """Raises ConfigError for a rank or alpha out of range, or for an unknown target."""
        check_size("rank", self.rank)
        check_number("alpha", static_value("alpha", self.alpha), POSITIVE)
        unknown = [name for name in self.targets if name not in EVERY]
        if unknown or not self.targets:
            raise ConfigError(
                "targets",
                f"must be some of {', '.join(EVERY)}, got {', '.join(unknown) or 'nothing'}",
            )


class AdaptedModel(NamedTuple):
    """Model with bound, untrained variables: the base of its adapters, or constants.

    Attributes:
      model: `Transformer` with `lora`, or a custom module with constants.
      base: base parameters `{"params": …}`, or the constants.
    """

    model: Any
    base: PyTree

    def apply(self, adapters: PyTree, *arguments: Any, **options: Any) -> Any:
        """Applies the model to the base and the adapters `{"lora": …}`, see `Transformer`."""
        return self.model.apply({**self.base, **adapters}, *arguments, **options)

    @property
    def rows_over_devices(self) -> bool:
        """True if the compiler places rows on devices, see `Transformer.rows_over_devices`."""
        return bool(getattr(self.model, "rows_over_devices", False))

    def for_decoding(self, adapters: PyTree, rows: int) -> PyTree:
        """Adds faster forms of the base to the adapters, see `Transformer.for_decoding`."""
        prepare = getattr(self.model, "for_decoding", None)
        if prepare is None:
            return adapters
        held = prepare({**self.base, **adapters}, rows)
        return {name: x for name, x in held.items() if name not in self.base}

    def empty_cache(self, batch: int, length: int) -> Any:
        """Returns an empty cache for `batch` rows of `length` columns."""
        return self.model.empty_cache(batch, length)


def over(model: Any, frozen: PyTree, constants: PyTree = None) -> Any:
    """Binds a frozen base and constants to the model, which then takes only trained variables."""
    base = {BASE: frozen[BASE]} if frozen and BASE in frozen else {}
    base = {**base, **(constants or {})}
    return AdaptedModel(model, base) if base else model


def merge_adapters(model: Any, base: PyTree, adapters: PyTree) -> PyTree:
    """Merges adapters into the base, W + (α / r)·A·B, for the same model without adapters.

    Args:
      model: `Transformer` that has `lora`.
      base: base parameters `{"params": …}`.
      adapters: adapters `{"lora": …}` of a single seed.

    Returns:
      Parameters `{"params": …}`; adapted matrices are float32 at least, because rounding to
      bfloat16 would lose most of a change.
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
