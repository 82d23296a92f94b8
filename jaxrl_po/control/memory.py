"""Builds a network's memory over an episode: a gated recurrent unit, or a gated transformer."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_po import backend
from jaxrl_po.backend import Target
from jaxrl_po.config import PythonObject
from jaxrl_po.control import recurrence
from jaxrl_po.types import PyTree

Initialization = Callable[[float], Callable[..., jax.Array]]
"""`(scale) -> initializer`, returns a kernel's initialiser, with the scale that suits its layer."""


class Memory(NamedTuple):
    """Memory of H units, as two functions. All numbers of a memory are zero before an episode.

    Attributes:
      start: `start(B) -> memory`, returns leaves `[B, …]`, all zero.
      run: `run(memory, features, begins, final) -> (memory, outputs, final_outputs)`, runs T steps
        of features `[T, B, D]`; the memory is reset before a step where `begins` `[T, B]` is True.
        Outputs of `run` are `[T, B, H]`. The argument `final` `[T, B, D]`, or None, holds features
        that may follow each step; their outputs do not change the memory. A Flax module calls
        `run`, which creates parameters in the module.
      hidden_matrices: `hidden_matrices(layers, features_are_hidden) -> tree of bool`, returns True
        for each matrix from hidden units to hidden units among the parameters that `run` creates;
        None if unknown.
    """

    start: Callable[[int], PyTree]
    run: Callable[..., tuple[PyTree, jax.Array, jax.Array | None]]
    hidden_matrices: Callable[[PyTree, bool], PyTree] | None = None


def gru(size: int, initialization: Initialization, target: Target | None = None) -> Memory:
    """Builds a gated recurrent unit, `h_t = GRU(h_{t−1}, x_t)`, see `recurrence.run_gru`.

    Args:
      size: number H of units.
      initialization: initialiser of the kernels, for scale 1.
      target: platform and devices of the compiled program; None stands for `backend.here()`.
    """

    def run(
        memory: jax.Array, features: jax.Array, begins: jax.Array, final: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        init = initialization(1.0)
        cell: Any = nn.GRUCell(size, kernel_init=init, recurrent_kernel_init=init)
        if cell.is_initializing():
            cell(memory, features[0])
        unroll = (target or backend.here()).unroll(8)
        read = memory, features, begins
        memories = recurrence.run_gru(cell.variables["params"], *read, unroll)
        return memories[-1], memories, None if final is None else cell(memories, final)[1]

    def hidden_matrices(layers: PyTree, features_are_hidden: bool) -> PyTree:
        def marked(path: Any, leaf: jax.Array) -> bool:
            # the kernels `ir`, `iz` and `in` multiply the features, `hr`, `hz` and `hn` the memory
            return leaf.ndim == 2 and (features_are_hidden or path[-2].key.startswith("h"))

        return jax.tree_util.tree_map_with_path(marked, layers)

    return Memory(lambda rows: jnp.zeros((rows, size)), run, hidden_matrices)


class Window(NamedTuple):
    """Past inputs of layers that a transformer remembers.

    Attributes:
      past: `[B, W, L, H]`, inputs of each layer in the last W steps, the oldest step first.
      steps: `[B]`, number of remembered steps that belong to the current episode.
    """

    past: jax.Array
    steps: jax.Array


def transformer(
    size: int,
    initialization: Initialization,
    target: Target | None = None,
    *,
    layers: int = 2,
    heads: int = 4,
    window: int = 16,
) -> Memory:
    """Builds a gated transformer (GTrXL) over a step and the W previous steps of the episode.

    The past consists of each layer's inputs, without a gradient to the steps before the first (Dai
    et al. 2019, arXiv:1901.02860), so that L layers reach L·W steps back. Layers and gates follow
    Parisotto et al. 2019 (arXiv:1910.06764), see `MemoryLayer`.

    Args:
      size: number H of units, a multiple of `heads`.
      initialization: initialiser of the kernels.
      target: unused argument, as a gated recurrent unit takes it.
      layers: number L of layers.
      heads: number of attention heads.
      window: number W of past steps that a layer attends to.
    """
    del target

    def run(
        memory: Window, features: jax.Array, begins: jax.Array, final: jax.Array | None
    ) -> tuple[Window, jax.Array, jax.Array | None]:
        steps = begins.shape[0]
        # Position W + t is step t; an empty position has episode −1.
        numbers = jnp.cumsum(begins, axis=0)
        past = jnp.where(jnp.arange(window)[:, None] < (window - memory.steps)[None], -1, 0)
        episode = jnp.concatenate([past, numbers])
        ago = window + jnp.arange(steps)[:, None] - jnp.arange(window + steps)[None]
        if final is not None:
            features = jnp.concatenate([features, final])
            numbers, ago = jnp.concatenate([numbers] * 2), jnp.concatenate([ago, ago + 1])
        visible = (numbers[:, None] == episode[None]) & ((ago > 0) & (ago <= window))[..., None]

        x, kept = nn.Dense(size, kernel_init=initialization(1.0))(features), []
        valid = episode[-window:] == episode[-1:]
        for layer in range(layers):
            context = jnp.concatenate([jnp.swapaxes(memory.past[:, :, layer], 0, 1), x[:steps]])
            kept.append(jnp.where(valid[..., None], context[-window:], 0.0))
            named = MemoryLayer(size, heads, window, initialization, name=f"Layer_{layer}")
            x = named(x, context, visible, ago)
        after = Window(jnp.stack(kept, axis=2).swapaxes(0, 1), valid.sum(0).astype(x.dtype))
        return after, x[:steps], None if final is None else x[steps:]

    def start(rows: int) -> Window:
        return Window(jnp.zeros((rows, window, layers, size)), jnp.zeros(rows))

    def hidden_matrices(layers: PyTree, features_are_hidden: bool) -> PyTree:
        def marked(path: Any, leaf: jax.Array) -> bool:
            names = [each.key for each in path]
            # The only table of a layer holds position biases; `Dense_0` multiplies the features.
            inner = names[0] != "Dense_0" or features_are_hidden
            return leaf.ndim == 2 and inner and names[1:] != ["bias"]

        return jax.tree_util.tree_map_with_path(marked, layers)

    return Memory(start, run, hidden_matrices)


class MemoryKind(NamedTuple):
    """Entry of the table `MEMORIES`.

    Attributes:
      make: `make(size, initialization, target, **sizes) -> Memory`, builds the memory.
      summary: description for `--help`.
      sizes: names of keywords of `make`; the field `memory_<keyword>` of `NetworkSettings` has the
        keyword's value.
      divisors: names in `sizes` whose values must divide the width of the network.
      needs_early_stop: True if a method with early stopping must enable it by default.
    """

    make: Callable[..., Memory]
    summary: str
    sizes: tuple[str, ...] = ()
    divisors: tuple[str, ...] = ()
    needs_early_stop: bool = False


# the entry None is a network without memory
MEMORIES: dict[str, MemoryKind | None] = {
    "none": None,
    "gru": MemoryKind(gru, "a gated recurrent unit"),
    # Without an early stop, one unbounded update can halve the return on a solved task (at a KL of
    # 5 to 9 nats).
    "transformer": MemoryKind(
        transformer,
        "a gated transformer (GTrXL)",
        sizes=("window", "layers", "heads"),
        divisors=("heads",),
        needs_early_stop=True,
    ),
}


def kind_of(name: str) -> MemoryKind | None:
    """Returns the entry with a name; a `PythonObject` holds a `MemoryKind` or the kind's `make`."""
    if not isinstance(name, PythonObject):
        return MEMORIES[name]
    return name.value if isinstance(name.value, MemoryKind) else MemoryKind(name.value, name)


class MemoryLayer(nn.Module):
    """Layer `y = g(x, relu(attend(norm(x), norm(context))))`, then `g(y, relu(mlp(norm(y))))`.

    Norms come before a layer, gates after it (Parisotto et al. 2019, sections 3.1 and 3.2). The
    score of the position k steps back is `q·k / √d + b_k`, with a learned b for each head (Raffel
    et al. 2020, arXiv:1910.10683).

    Attributes:
      size: number H of units.
      heads: number of attention heads, each of d = H / heads units.
      window: largest number W of steps back.
      initialization: initialiser of the kernels.
    """

    size: int
    heads: int
    window: int
    initialization: Initialization

    @nn.compact
    def __call__(
        self, x: jax.Array, context: jax.Array, visible: jax.Array, ago: jax.Array
    ) -> jax.Array:
        """Maps steps `[Q, B, H]` to `[Q, B, H]`.

        Each step attends to itself and its visible context.

        Args:
          x: `[Q, B, H]`, inputs of the steps.
          context: `[S, B, H]`, inputs of the positions that steps may attend to.
          visible: `[Q, S, B]`, bool, True if a step attends to a position.
          ago: `[Q, S]`, number of steps from a position of the context to the step.
        """
        chex.assert_rank((x, context, visible, ago), (3, 3, 3, 2))
        dense = functools.partial(nn.Dense, self.size, kernel_init=self.initialization(1.0))
        norm = nn.LayerNorm()
        attended = dense()(self._attend(norm(x), norm(context), visible, ago))
        y = Gate(self.size, self.initialization)(x, jax.nn.relu(attended))
        wide = nn.Dense(self.size, kernel_init=self.initialization(2.0**0.5))
        changed = dense()(jax.nn.relu(wide(nn.LayerNorm()(y))))
        return Gate(self.size, self.initialization)(y, jax.nn.relu(changed))

    def _attend(
        self, x: jax.Array, context: jax.Array, visible: jax.Array, ago: jax.Array
    ) -> jax.Array:
        width = self.size // self.heads
        init = self.initialization(1.0)
        query, key, value = (
            self.param(name, init, (self.size, self.size)).reshape(self.size, self.heads, width)
            for name in ("query", "key", "value")
        )
        bias = self.param("bias", nn.initializers.zeros, (self.heads, self.window + 1))
        q = jnp.einsum("qbm,mhd->qbhd", x, query) / width**0.5
        # Product of three factors: for one step the keys are never formed, for many steps they are.
        scores = jnp.einsum("qbhd,mhd,sbm->qbhs", q, key, context)
        scores += jnp.moveaxis(bias[:, ago.clip(0, self.window)], 0, 1)[:, None]
        scores = jnp.where(jnp.swapaxes(visible, 1, 2)[:, :, None], scores, -jnp.inf)
        own = jnp.einsum("qbhd,mhd,qbm->qbh", q, key, x) + bias[None, None, :, 0]
        weights = jax.nn.softmax(jnp.concatenate([scores, own[..., None]], axis=-1))
        read = jnp.einsum("qbhs,sbm,mhd->qbhd", weights[..., :-1], context, value)
        read += weights[..., -1:] * jnp.einsum("qbm,mhd->qbhd", x, value)
        return read.reshape(x.shape)


class Gate(nn.Module):
    """Gate `(1 − z) ⊙ x + z ⊙ n`, near x at first: Parisotto et al. 2019, section 3.2, as a GRU.

    The gate computes `r = σ(W_r y + U_r x)`, `z = σ(W_z y + U_z x − b)`, `n = tanh(W_n y + U_n (r ⊙
    x))`, with the parameter b, which is initialised to 2.

    Attributes:
      size: number H of units.
      initialization: initialiser of the kernels, for scale 1.
    """

    size: int
    initialization: Initialization

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Updates the stream x `[E*, H]` by the output y `[E*, H]` of a layer."""
        init = self.initialization(1.0)
        dense = functools.partial(nn.Dense, self.size, use_bias=False, kernel_init=init)
        r = jax.nn.sigmoid(dense()(y) + dense()(x))
        opened = dense(use_bias=True, bias_init=nn.initializers.constant(-2.0))
        z = jax.nn.sigmoid(opened(y) + dense()(x))
        return (1.0 - z) * x + z * jnp.tanh(dense()(y) + dense()(r * x))
