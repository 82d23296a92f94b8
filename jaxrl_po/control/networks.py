"""Flax actors and critics for control: orthogonal initialisation without LAPACK, torsos, heads."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_po import backend
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError
from jaxrl_po.control.memory import Initialization, Memory, gru
from jaxrl_po.distributions import Categorical, DiagonalGaussian, MultiCategorical, TanhGaussian
from jaxrl_po.types import Distribution, PyTree
from jaxrl_po.variables import class_of, is_flax

Activation = Callable[[jax.Array], jax.Array]
Initializer = Callable[..., jax.Array]


# Flax asks an initialiser for its shape whenever a module is applied. As a separate jitted function
# the initialiser is traced once; before, tracing it took 20 to 45 % of the time that JAX needs to
# trace PPO.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _haar(
    key: jax.Array, rows: int, columns: int, tolerance: float, max_iterations: int
) -> jax.Array:
    x = jax.random.normal(key, (max(rows, columns), min(rows, columns)), jnp.float32)
    x = x / jnp.linalg.norm(x)  # the Frobenius norm is 1, so the spectral norm is at most 1 < √3
    identity = jnp.eye(x.shape[1])

    # A GPU multiplies float32 matrices in TF32 by default, which would never reach the tolerance.
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def residual(x: jax.Array) -> jax.Array:
        return jnp.abs(product(x.T, x) - identity).max()

    def unfinished(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, iteration = carry
        return (residual(x) > tolerance) & (iteration < max_iterations)

    def newton_schulz(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, iteration = carry
        return 1.5 * x - 0.5 * product(x, product(x.T, x)), iteration + 1

    x, _ = jax.lax.while_loop(unfinished, newton_schulz, (x, jnp.int32(0)))
    return x if rows >= columns else x.T


def orthogonal(
    scale: float = 1.0, *, tolerance: float = 1e-5, max_iterations: int = 100
) -> Initializer:
    """Builds an initialiser of Haar-distributed orthogonal matrices that uses matrix products only.

    The polar factor of a Gaussian matrix X is Haar-distributed; Newton–Schulz, `X ← 1.5 X − 0.5 X
    XᵀX`, converges to the polar factor from any X with spectral norm below √3. A QR factorisation
    would give the same distribution, but several factorisations in one vmapped program deadlock on
    the CPU.

    Args:
      scale: norm of the orthogonal vectors, which are the rows or the columns, whichever are fewer.
      tolerance: largest element of `XᵀX − I` at which the iteration stops.
      max_iterations: bound for the rare ill-conditioned draw (a 64 × 64 matrix takes 21 in the
        median, 38 at worst).

    Returns:
      Initialiser `init(key, shape, dtype)`, which consumes `key`; axes before the last are merged
      into one.

    Example:
      >>> import jax
      >>> w = orthogonal(2.0)(jax.random.key(0), (4, 2), jnp.float32)
      >>> bool(jnp.allclose(w.T @ w, 4.0 * jnp.eye(2), atol=1e-3))
      True
    """

    def init(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        x = _haar(key, math.prod(shape[:-1]), shape[-1], tolerance, max_iterations)
        return (scale * x).reshape(shape).astype(dtype)

    return init


def lecun_normal(scale: float = 1.0) -> Initializer:
    """Returns Flax's default initialiser, N(0, 1 / fan-in), for every layer; `scale` is ignored."""
    del scale
    return nn.initializers.lecun_normal()


# Largest number of columns of a kernel whose derivative `product` computes column by column.
NARROW = 8
TALL = 2  # smallest ratio of rows to columns of a kernel whose gradient is computed transposed


def product_for(target: Target | None) -> Callable[..., jax.Array] | None:
    """Returns the `dot_general` of a `nn.Dense`; `product` on a CPU, otherwise None for XLA's own.

    Args:
      target: platform and devices of the compiled program; None stands for `backend.here()`.
    """
    return product if (target or backend.here()).on_cpu else None


def product(
    x: jax.Array, kernel: jax.Array, dimensions: Any = None, precision: Any = None
) -> jax.Array:
    """Computes `x @ kernel`, `[E*, D]` and `[D, A]` to `[E*, A]`, for a CPU.

    Where XLA's CPU code is slow, the gradient of the kernel is another product than XLA would
    choose. For a policy's head, `[D, E]` times `[E, 2]` takes three to nine times as long as two
    products of the matrix with a vector: a derivative with respect to a narrow kernel is therefore
    taken column by column. For a layer with many inputs and few outputs, `[D, E]` times `[E, A]`
    takes up to five times as long as `[A, E]` times `[E, D]`, whose result is then transposed, and
    the difference is largest with several seeds at once.

    Args:
      x: `[E*, D]`, inputs of the layer.
      kernel: `[D, A]`, kernel of the layer.
      dimensions: unused; always the contraction of a dense layer.
      precision: precision of the product, see `jax.lax.dot_general`.
    """
    size, columns = kernel.shape
    if precision is not None:
        return jnp.matmul(x, kernel, precision=precision)
    if columns <= NARROW:
        return _product(_by_columns, x, kernel)
    # With few rows the transpose would take longer than the faster product saves.
    if size >= TALL * columns and math.prod(x.shape[:-1]) >= 4 * columns:
        return _product(_transposed, x, kernel)
    return x @ kernel


Product = Callable[[jax.Array, jax.Array], jax.Array]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(of_kernel: Product, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes `x @ kernel`, whose derivative in the kernel is computed by `of_kernel`."""
    del of_kernel
    return x @ kernel


@_product.defjvp
def _product_jvp(of_kernel: Product, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, kernel), (dx, d_kernel) = primals, tangents
    return _product(of_kernel, x, kernel), dx @ kernel + of_kernel(x, d_kernel)


def _by_columns(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.stack([x @ column for column in kernel.T], axis=-1)


def _transposed(x: jax.Array, kernel: jax.Array) -> jax.Array:
    # The barrier, also in the gradient, prevents XLA from fusing the transpose into the product.
    return x @ jax.lax.optimization_barrier(kernel.T).T


class Convolution(nn.Module):
    """Convolution without padding, as one matrix product over shifted views of blocks.

    Vmapped over seeds, XLA's own convolution becomes a grouped convolution, which is far slower on
    a CPU.

    Attributes:
      channels: number of output channels.
      kernel: height and width of the kernel, a multiple of the stride.
      stride: step between neighbouring positions of the kernel, in both directions.
      initialization: initialiser of the kernel, for scale √2.
      target: platform and devices of the program, see `product_for`.
    """

    channels: int
    kernel: int = 3
    stride: int = 1
    initialization: Initialization = orthogonal
    target: Target | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[E*, H, W, C]` to `[E*, (H − k) // s + 1, (W − k) // s + 1, channels]`."""
        step, places = self.stride, self.kernel // self.stride
        rows, columns = x.shape[-3] // step, x.shape[-2] // step
        blocks = x[..., : rows * step, : columns * step, :].reshape(
            *x.shape[:-3], rows, step, columns, step, x.shape[-1]
        )
        blocks = jnp.moveaxis(blocks, -4, -3).reshape(*x.shape[:-3], rows, columns, -1)
        height, width = rows - places + 1, columns - places + 1
        # Columns come first, then rows, so that fewer and longer pieces are copied. All rows form
        # one axis, so that the gradient of the kernel is a plain product under vmap too.
        wide = jnp.concatenate([blocks[..., j : j + width, :] for j in range(places)], axis=-1)
        views = jnp.concatenate([wide[..., i : i + height, :, :] for i in range(places)], axis=-1)
        init = self.initialization(math.sqrt(2.0))
        dense = nn.Dense(self.channels, kernel_init=init, dot_general=product_for(self.target))
        return dense(views.reshape(-1, views.shape[-1])).reshape(*views.shape[:-1], -1)


# Channels, kernel and stride of each convolution over frames of a video game (Mnih et al. 2015,
# doi:10.1038/nature14236, methods): 84 × 84 × 4 pixels to 7 × 7 × 64 features.
FRAMES = ((32, 8, 4), (64, 4, 2), (64, 3, 1))


class Torso(nn.Module):
    """Layers before a head: convolutions (for images), then an MLP.

    Images of bytes are scaled to [0, 1].

    Attributes:
      hidden: width of each hidden layer.
      activation: function that is applied after each layer.
      observation_rank: number of axes of one observation; the axes are flattened for the MLP, after
        the convolutions if there are any.
      convolutions: channels, kernel and stride of each convolution, over observations `[H, W, C]`.
      layer_norm: True to normalise each hidden layer before its activation (Ba et al. 2016).
      initialization: initialiser of the kernels, for scale √2.
      target: platform and devices of the program, see `product_for`.
    """

    hidden: Sequence[int] = (64, 64)
    activation: Activation = nn.tanh
    observation_rank: int = 1
    convolutions: Sequence[tuple[int, int, int]] = ()
    layer_norm: bool = False
    initialization: Initialization = orthogonal
    target: Target | None = None

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Maps observations `[E*, …]` to features `[E*, hidden[-1]]`."""
        x = observation
        if x.dtype == jnp.uint8:
            x = x.astype(float) / 255.0
        for channels, kernel, stride in self.convolutions:
            layer = Convolution(channels, kernel, stride, self.initialization, self.target)
            x = self.activation(layer(x))
        x = x.reshape(*x.shape[: x.ndim - self.observation_rank], -1)
        for width in self.hidden:
            init = self.initialization(math.sqrt(2.0))
            x = nn.Dense(width, kernel_init=init, dot_general=product_for(self.target))(x)
            x = self.activation(nn.LayerNorm()(x) if self.layer_norm else x)
        return x


class SideBySide(nn.Module):
    """Body for a structured observation; a module for each array, joined, then a torso.

    Attributes:
      parts: modules that map to features `[E*, D]`, one for each array in the order of the leaves.
      torso: layers that read the joined features.
    """

    parts: Sequence[nn.Module]
    torso: nn.Module

    def __call__(self, observation: Any) -> jax.Array:
        """Maps observations, leaves `[E*, …]`, to features."""
        leaves = jax.tree.leaves(observation)
        features = [part(leaf) for part, leaf in zip(self.parts, leaves, strict=True)]
        return self.torso(jnp.concatenate(features, axis=-1))


def readout(
    size: int, initialization: Initialization, target: Target | None, **kwargs: Any
) -> nn.Dense:
    """Builds the last layer of a policy with scale 0.01, so that its output is near 0 at first."""
    init, dot_general = initialization(0.01), product_for(target)
    return nn.Dense(size, kernel_init=init, dot_general=dot_general, **kwargs)


class CategoricalHead(nn.Module):
    """Layer from features `[E*, D]` to a categorical distribution over `num_actions`."""

    num_actions: int
    initialization: Initialization = orthogonal
    target: Target | None = None

    @nn.compact
    def __call__(self, features: jax.Array) -> Categorical:
        """Returns the distribution, batch shape `E*`."""
        return Categorical(readout(self.num_actions, self.initialization, self.target)(features))


class MultiCategoricalHead(nn.Module):
    """Layer from features `[E*, D]` to several simultaneous choices, `sizes` options each."""

    sizes: tuple[int, ...]
    initialization: Initialization = orthogonal
    target: Target | None = None

    @nn.compact
    def __call__(self, features: jax.Array) -> MultiCategorical:
        """Returns the distribution, batch shape `E*`."""
        logits = readout(sum(self.sizes), self.initialization, self.target)(features)
        return MultiCategorical(logits, self.sizes)


class GaussianHead(nn.Module):
    """Layer from features `[E*, D]` to a diagonal Gaussian over actions.

    Attributes:
      action_size: number of components of an action.
      initial_log_std: log σ at the start, in nats.
      depends: True to compute log σ from the features; False for one vector that serves all states.
      distribution: class of the distribution, the Gaussian or the Gaussian squashed by tanh.
      initialization: initialiser of the kernels, for scale 0.01.
      target: platform and devices of the program, see `product_for`.
    """

    action_size: int
    initial_log_std: float = 0.0
    depends: bool = False
    distribution: type[DiagonalGaussian] | type[TanhGaussian] = DiagonalGaussian
    initialization: Initialization = orthogonal
    target: Target | None = None

    @nn.compact
    def __call__(self, features: jax.Array) -> DiagonalGaussian | TanhGaussian:
        """Returns the distribution, batch shape `E*`."""
        read = functools.partial(readout, self.action_size, self.initialization, self.target)
        mean = read()(features)
        start = nn.initializers.constant(self.initial_log_std)
        if self.depends:
            return self.distribution(mean, read(bias_init=start)(features))
        log_std = self.param("log_std", start, (self.action_size,))
        return self.distribution(mean, jnp.broadcast_to(log_std, mean.shape))


class ValueHead(nn.Module):
    """Layer from features `[E*, D]` to a value `[E*]`, in reward units."""

    initialization: Initialization = orthogonal

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        """Returns the values, `[E*]`."""
        return nn.Dense(1, kernel_init=self.initialization(1.0))(features)[..., 0]


class Recurrent(nn.Module):
    """Network from sequences of observations to the output of a head.

    It has torso, memory and head.

    Attributes:
      torso: layers that map observations to features.
      head: layers that map outputs of the memory to the network's output.
      size: number H of units in the memory.
      initialization: initialiser of the memory's kernels.
      target: platform and devices of the compiled program; None stands for `backend.here()`.
      memory: `memory(size, initialization, target)`, builds the memory, see `memory.Memory`.
    """

    torso: nn.Module
    head: nn.Module
    size: int
    initialization: Initialization = orthogonal
    target: Target | None = None
    memory: Callable[..., Memory] = gru

    def start(self, rows: int) -> PyTree:
        """Returns the memory of a number of rows before an episode, all zero."""
        return build_memory(self).start(rows)

    @nn.compact
    def __call__(
        self, memory: PyTree, observation: Any, begins: jax.Array, final: Any = None
    ) -> tuple[PyTree, Any, Any]:
        """Runs the network over T steps.

        Args:
          memory: memory before the first step, leaves `[B, …]`.
          observation: observations of the steps, leaves `[B, T, …]`.
          begins: `[B, T]`, bool, True if an episode begins with the step.
          final: observations that may follow each step, leaves `[B, T, …]`, or None.

        Returns:
          Memory after the last step, the head's output of batch shape `[B, T]`, and the head's
          output for each observation of `final`, which follows the step of the same index.
        """

        # Time comes first, so that a loop reads each step's rows in one piece.
        def features(observation: Any) -> Any:
            return self.torso(jax.tree.map(time_first, observation))

        read = features(observation), time_first(begins)
        after = None if final is None else features(final)
        memory, *outputs = build_memory(self).run(memory, *read, after)
        first, last = (None if x is None else self.head(time_first(x)) for x in outputs)
        return memory, first, last


def build_memory(network: Recurrent) -> Memory:
    """Returns the memory of a network.

    Raises ConfigError if the network's `memory` does not build one.
    """
    make, made = network.memory, None
    if callable(make) and not is_flax(make):
        made = make(network.size, network.initialization, network.target)
    if not (hasattr(made, "start") and hasattr(made, "run")):
        raise ConfigError(
            "memory",
            "must be a function (size, initialization, target) -> memory.Memory, got "
            f"{class_of(make)}: call a cell of Flax in the `run` of a Memory, and one of nnx there "
            "as flax.nnx.bridge.ToLinen",
        )
    return cast(Memory, made)


def time_first(x: jax.Array) -> jax.Array:
    """Transposes `[B, T, …]` to `[T, B, …]`, and back."""
    return jnp.swapaxes(x, 0, 1)


class Policy(nn.Module):
    """Policy network, observation `[E*, …]` to a distribution; it has a torso and a head."""

    torso: nn.Module
    head: nn.Module

    def __call__(self, observation: jax.Array) -> Distribution:
        """Returns the distribution, batch shape `E*`."""
        return self.head(self.torso(observation))


class Critic(nn.Module):
    """Critic network, observation `[E*, …]` to a value `[E*]`, reward units.

    It has a torso and a head.
    """

    torso: nn.Module
    initialization: Initialization = orthogonal

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Returns the value of each observation."""
        return ValueHead(self.initialization)(self.torso(observation))


class SharedActorCritic(nn.Module):
    """Network from an observation `[E*, …]` to a distribution and a value, with a shared torso."""

    torso: nn.Module
    head: nn.Module
    initialization: Initialization = orthogonal

    @nn.compact
    def __call__(self, observation: jax.Array) -> tuple[Distribution, jax.Array]:
        """Returns the distribution and the value of each observation."""
        features = self.torso(observation)
        return self.head(features), ValueHead(self.initialization)(features)


def hidden_matrices(network: Any) -> Callable[[PyTree], PyTree] | None:
    """Returns `params -> tree of bool`, True for each matrix from hidden units to hidden units.

    A hidden matrix is the kernel of a layer between the first layer, which reads the observation,
    and the head, which gives the output: in a torso all layers but its first; for a memory see
    `memory.Memory`. The input projection of a memory is the first layer if the torso has no layers.

    Args:
      network: Flax module of actor or critic. The result is None if the network, its torso or its
        memory is not of this package.
    """
    of_torso = _torso_matrices(getattr(network, "torso", None))
    if type(network) not in (Policy, Critic, SharedActorCritic, Recurrent) or of_torso is None:
        return None
    of_memory = None
    if isinstance(network, Recurrent):
        of_memory = build_memory(network).hidden_matrices
        if of_memory is None:
            return None

    def marked(params: PyTree) -> PyTree:
        layers = params["params"]
        found = {name: _mark(layers[name], False) for name in OUTPUTS if name in layers}
        if "torso" in layers:
            found["torso"] = of_torso(layers["torso"])
        if of_memory is not None:
            rest = {name: layer for name, layer in layers.items() if name not in found}
            found |= of_memory(rest, "torso" in layers)
        return {**_mark(params, False), "params": found}

    return marked


OUTPUTS = ("head", "ValueHead_0")


def _torso_matrices(torso: Any) -> Callable[[PyTree], PyTree] | None:
    if type(torso) is SideBySide:
        parts = {f"parts_{i}": _torso_matrices(part) for i, part in enumerate(torso.parts)}
        parts["torso"] = _torso_matrices(torso.torso)
        if None in parts.values():
            return None
        return lambda params: {name: cast(Any, parts[name])(part) for name, part in params.items()}
    if type(torso) is not Torso:
        return None
    first = "Convolution_0" if torso.convolutions else "Dense_0"
    return lambda params: {name: _mark(layer, name != first) for name, layer in params.items()}


def _mark(params: PyTree, hidden: bool) -> PyTree:
    """Marks the matrices; biases and scales are vectors and are not marked."""
    return jax.tree.map(lambda x: hidden and x.ndim == 2, params)
