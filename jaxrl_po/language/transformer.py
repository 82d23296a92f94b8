"""Decoder-only transformer: RMSNorm, RoPE, gated MLP, grouped queries and a static cache.

The defaults suit small models; `architectures` has the settings of pretrained families.

Shape suffixes: B rows, N new positions, R ≤ N of them with outputs, M = B·N or B·R, S positions in
all, D width, H query heads, K key/value heads, G = H / K, C head size, F MLP width, V vocabulary,
L blocks, whose parameters are stacked.
`dtype` is the type of the matrix products; parameters are float32, softmax and outputs float32 at
least. Outside attention, rows and positions form one axis: the weight gradient of a product with
two leading axes is several times slower on a CPU.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_po import backend
from jaxrl_po.backend import Target
from jaxrl_po.language import blocks, kernels
from jaxrl_po.language.attention import AttentionMask, Kernel, kernel_for
from jaxrl_po.language.blocks import Attention, Block, Mlp, UnstackedBlocks, last_of, scaled
from jaxrl_po.language.lora import ADAPTERS, Lora
from jaxrl_po.language.rope import PLAIN, Rope, turns
from jaxrl_po.types import PyTree

ONE_HOT = 1024
"""Largest vocabulary that is embedded by a product with one-hot rows: the gradient of a lookup is a
scatter, which is slow on a CPU."""

UNROLLED = 4
"""Largest number of blocks that are compiled one by one, which makes decoding up to twice as fast
on a CPU. Deeper models scan their blocks, so that compile time does not depend on the number of
blocks."""

Cache = tuple[tuple[jax.Array, jax.Array], ...] | tuple[jax.Array, jax.Array]
"""Keys and values: `[B, K, S, C]` of each block, or of all blocks `[B, L, K, S, C]` if scanned.

The axes are in the order of the products, so that a decoding step needs no transpose. A step
updates both forms in place, but with the second form the step copies the block that it reads.
"""

LOGICAL_AXES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("params", "embedding"): ("vocab", "embed"),
    ("query", "kernel"): ("layers", "embed", "heads"),
    ("key", "kernel"): ("layers", "embed", "kv_heads"),
    ("value", "kernel"): ("layers", "embed", "kv_heads"),
    ("query", "bias"): ("layers", "heads"),
    ("key", "bias"): ("layers", "kv_heads"),
    ("value", "bias"): ("layers", "kv_heads"),
    ("out", "kernel"): ("layers", "heads", "embed"),
    ("up", "kernel"): ("layers", "embed", "mlp"),
    ("gate", "kernel"): ("layers", "embed", "mlp"),
    ("down", "kernel"): ("layers", "mlp", "embed"),
    ("output", "kernel"): ("embed", "vocab"),
}
"""Logical axes of a parameter by the last two names of its path; norm scales are replicated."""


Layer = Callable[..., tuple[jax.Array, Any]]
"""`layer(variables, window, x_MxD, cache, number, read) -> (x_MxD, cache)`, applies a block."""


class Transformer(nn.Module):
    """Decoder-only transformer; `outputs` is the vocabulary for a policy and 1 for a critic.

    Attributes:
      vocabulary: size V of the input embedding.
      outputs: size of the output; 0 stands for the vocabulary.
      width: width D of the residual stream.
      layers: number of blocks.
      heads: number H of query heads.
      kv_heads: number K of key/value heads, a divisor of H; 0 stands for H.
      head_size: size C of a head, an even number; 0 stands for width / heads.
      mlp_width: width F of the MLP's hidden layer; 0 stands for 4·D.
      gated: True if the MLP is gated, W₃(f(W₁x) ∘ W₂x), in place of W₃f(W₂x).
      activation: activation f of the MLP; None stands for SiLU if the MLP is gated, otherwise for
        GELU, by its tanh formula.
      tied: True if the output reuses the embedding matrix.
      tied_scale: scale of the logits if `tied`; 0 stands for 1/√D.
      embedding_scale: scale of the embedded tokens.
      qkv_bias: True if queries, keys and values have biases.
      qk_norm: True if each head's queries and keys pass an RMSNorm before they are rotated.
      query_scale: scale of the attention scores; 0 stands for 1/√C.
      post_norms: True if attention and MLP also pass an RMSNorm before they are added to the
        residual stream.
      epsilon: epsilon of every RMSNorm.
      rope: rotary position embedding.
      windows: for each layer, the number of positions that a position attends to, its own included;
        0 for all positions. Empty windows mean that every layer attends to all positions.
      window_rope: rotary position embedding of layers with a window; None for `rope`.
      lora: low-rank adapters, in a separate collection beside `params`; None disables adapters.
      dtype: type of the matrix products: float32, bfloat16, or float64 if JAX enables it.
      remat: True to recompute the activations inside blocks in the backward pass, with less memory
        and a third more time. Microbatches bound the same memory without the additional time; remat
        pays if the activations of one row, or one group, are still too large. On a CPU, XLA's
        default schedule undoes most of the saving if blocks are not scanned; without
        `concurrency_optimized_scheduler` the saving remains.
      fused_attention: True to attend, without a cache, in one fused kernel if the target has one:
        the kernel never stores all scores. A fused kernel does not have a forward derivative.
      constrain: sharding constraint on the activations `[M, D]` between blocks; the default leaves
        them unconstrained.
      over_rows: `over_rows(f)(params, rows)`, computes `f(params, rows)` on the devices of the
        rows; the default calls f.
      target: hardware that the model is compiled for; None for `backend.here()`.
    """

    vocabulary: int
    outputs: int = 0
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 0
    head_size: int = 0
    mlp_width: int = 0
    gated: bool = True
    activation: Callable[[jax.Array], jax.Array] | None = None
    tied: bool = False
    tied_scale: float = 0.0
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    qk_norm: bool = False
    query_scale: float = 0.0
    post_norms: bool = False
    epsilon: float = 1e-6
    rope: Rope = PLAIN
    windows: tuple[int, ...] = ()
    window_rope: Rope | None = None
    lora: Lora | None = None
    dtype: jnp.dtype = jnp.dtype("float32")
    remat: bool = False
    fused_attention: bool = False
    constrain: Callable[[jax.Array], jax.Array] = lambda x_MxD: x_MxD
    over_rows: Callable[..., Any] = lambda function: function
    target: Target | None = None

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        pad: jax.Array,
        cache: Cache | None = None,
        start: jax.Array | int = 0,
        *,
        last: int = 0,
        unembed: bool = True,
        prompt: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Computes the logits after each new token.

        Args:
          tokens: new tokens, `[B, N]`, int32, left-padded. Positions are relative, so padding does
            not change the outputs.
          pad: padding tokens on the left, `[B]`, int32.
          cache: keys and values of earlier columns, which the call extends; None attends to the new
            tokens only.
          start: column of the first new token, 0 without a cache.
          last: number of last tokens to compute outputs for; 0 for all. For all other tokens the
            last block computes keys and values only.
          unembed: True to compute the outputs; False returns the vectors `[…, D]` whose product
            with `unembedding` gives the outputs.
          prompt: prompt of each group of B / P consecutive rows, `[P, L]`, int32, left-padded by
            `pad` `[P]`; computed once per group. The argument `prompt` needs scanned blocks and no
            cache. With `prompt` the first output of a row is the output after its prompt.

        Returns:
          Outputs `[B, N or last, V]` in float32 at least, and the extended cache (None without a
          cache).
        """
        chex.assert_rank([tokens, pad], [2, 1])
        batch, new = tokens.shape
        shared = 0
        tokens_M = tokens.reshape(-1)
        if prompt is not None:
            assert self.scanned, "prompts are read once a group where blocks are scanned"
            assert cache is None, "prompts that are read once a group are not cached"
            shared = prompt.shape[1]
            new += shared
            tokens_M = jnp.concatenate([prompt.reshape(-1), tokens_M])
            pad = jnp.repeat(pad, batch // prompt.shape[0])
        embedding_VxD = self.param(
            "embedding", nn.initializers.normal(1.0), (self.vocabulary, self.width)
        )
        x_MxD = self.constrain(_embed(embedding_VxD, tokens_M, self.dtype))
        if self.embedding_scale != 1.0:
            x_MxD = x_MxD * jnp.asarray(self.embedding_scale, self.dtype)
        total = new if cache is None else jax.tree.leaves(cache)[0].shape[-2]
        columns_N, keys_S = start + jnp.arange(new), jnp.arange(total)
        behind_NxS = columns_N[:, None] - keys_S[None, :]
        mask_BxNxS = (behind_NxS >= 0)[None] & (keys_S[None, None, :] >= pad[:, None, None])
        # The tables are constants of the program: computed inside the program, sines would be fused
        # and recomputed for every element that they rotate.
        turns_Nxh, window_turns_Nxh = (
            [
                jax.lax.dynamic_slice_in_dim(table, start, new)
                for table in turns(total, self.size, rope)
            ]
            for rope in (self.rope, self.window_rope or self.rope)
        )
        block = self._block()
        kernel = None if cache is not None or self.is_initializing() else self.kernel

        def layer(
            variables: PyTree, window: Any, x_MxD: jax.Array, cache: Any, number: Any, read: int
        ) -> tuple[jax.Array, Any]:
            seen_BxNxS, turned_Nxh = mask_BxNxS, turns_Nxh
            if any(self.windows):
                seen_BxNxS &= ((behind_NxS < window) | (window == 0))[None]
                turned_Nxh = [
                    jnp.where(window == 0, *pair)
                    for pair in zip(turns_Nxh, window_turns_Nxh, strict=True)
                ]
            # In unrolled models, each block is compiled with its own window.
            windows = tuple(sorted({*self.windows} or {0})) if self.scanned else (window,)
            sight = AttentionMask(seen_BxNxS[:, new - read :], pad, window, windows, kernel)
            out: tuple[jax.Array, Any] = block.apply(
                variables, x_MxD, turned_Nxh, sight, cache, start, number, shared
            )
            return out

        run = self._scanned if self.scanned else self._unrolled
        x_MxD, cache = run(layer, self._blocks(block), x_MxD, cache, new, last)
        x_MxD = (
            last_of(x_MxD, batch, last or new)
            if prompt is None
            else _after_prompts(x_MxD, batch, *prompt.shape)
        )
        x_MxD = self._norm(dtype=blocks.at_least_float32(self.dtype), name="final_norm")(x_MxD)
        if self.ties_output:
            x_MxD = x_MxD * (self.tied_scale or 1 / math.sqrt(self.width))
        out_MxV = self._outputs(x_MxD, embedding_VxD, cache is not None) if unembed else x_MxD
        return out_MxV.reshape(batch, -1, out_MxV.shape[-1]), cache

    def _outputs(self, x_MxD: jax.Array, embedding_VxD: jax.Array, cached: bool) -> jax.Array:
        if not self.ties_output:
            start, outputs = scaled(0.1, self.width), self.outputs or self.vocabulary
            return nn.Dense(outputs, use_bias=False, kernel_init=start, name="output")(x_MxD)
        if self.scanned and cached and kernels.few(x_MxD.shape[0], self.target):
            return kernels.left_product(x_MxD, embedding_VxD)
        return x_MxD @ embedding_VxD.T

    def _block(self) -> Block:
        return Block(
            functools.partial(
                Attention,
                self.heads,
                self.kv_heads or self.heads,
                self.size,
                self.dtype,
                self.qkv_bias,
                self.epsilon if self.qk_norm else None,
                self.query_scale or 1 / math.sqrt(self.size),
                self.lora,
            ),
            functools.partial(
                Mlp,
                self.mlp_width or 4 * self.width,
                self.gated,
                self.activation or (nn.silu if self.gated else nn.gelu),
                self.dtype,
                self.lora,
            ),
            self._norm,
            self.post_norms,
            self.constrain,
            parent=None,
        )

    def _blocks(self, block: Block) -> PyTree:
        """Returns the variables of all blocks, leaves `[L, …]`; draws them in `init`."""

        def draw(key: jax.Array, collection: str) -> PyTree:
            x_1xD, turned_1xh = jnp.zeros((1, self.width)), [jnp.zeros((1, self.size // 2))] * 2
            mask = AttentionMask(jnp.ones((1, 1, 1), bool), jnp.zeros(1, jnp.int32))
            inputs = x_1xD, turned_1xh, mask
            stacked: dict[str, PyTree] = jax.vmap(
                lambda key: block.init(key, *inputs).get(collection, {})
            )(jax.random.split(key, self.layers))
            if self.scanned:
                return stacked
            # Parameters are drawn block by block, so that a seed gives the same parameters as
            # separate modules.
            assert self.scope is not None
            apart = UnstackedBlocks(block.attention, block.mlp, self.layers, parent=None)
            drawn = apart.init(self.scope.rngs["params"].rng, *inputs).get(collection, {})
            return {
                role: jax.tree.map(
                    lambda *each: jnp.stack(each),
                    *(drawn[f"{role}_{number}"] for number in range(self.layers)),
                )
                if f"{role}_0" in drawn
                else leaves
                for role, leaves in stacked.items()
            }

        if self.is_initializing():
            self.param("blocks", draw, "params")
            if self.lora is not None:
                # Adapters are a separate collection, so that the frozen base can live elsewhere.
                self.variable(ADAPTERS, "blocks", lambda: draw(self.make_rng("params"), ADAPTERS))
        # Parameters are read with `get_variable`: `param` draws them again in every trace, to
        # compare shapes.
        held = ("params", ADAPTERS, kernels.BY_OUTPUTS)
        blocks: PyTree = {name: self.get_variable(name, "blocks", {}) for name in held}
        chex.assert_tree_shape_prefix(blocks, (self.layers,))
        return blocks

    def _scanned(
        self, layer: Layer, blocks: PyTree, x_MxD: jax.Array, cache: Any, new: int, last: int
    ) -> tuple[jax.Array, Any]:
        """Applies all blocks, compiled once; every position passes through all of them."""
        del last

        def body(carry: Any, xs: Any) -> tuple[Any, None]:
            (variables, window, number), (x_MxD, cache) = xs, carry
            return layer(variables, window, x_MxD, cache, number, new), None

        numbers = jnp.arange(self.layers)
        xs = blocks, jnp.asarray(self.windows or (0,) * self.layers), numbers
        body = jax.checkpoint(body, prevent_cse=False) if self.remat else body
        (x_MxD, cache), _ = jax.lax.scan(body, (x_MxD, cache), xs)
        return x_MxD, cache

    def _unrolled(
        self, layer: Layer, blocks: PyTree, x_MxD: jax.Array, cache: Any, new: int, last: int
    ) -> tuple[jax.Array, Any]:
        """Applies the blocks one by one; the last block computes only the outputs that are used."""
        layer = jax.checkpoint(layer, static_argnums=(1, 4, 5)) if self.remat else layer
        apart: Any = self.get_variable(kernels.APART, "blocks")
        caches = []
        for number in range(self.layers):
            variables = jax.tree.map(lambda x, number=number: x[number], blocks)
            if apart is not None:
                variables["params"] = apart[number]
            held = None if cache is None else cache[number]
            window = self.windows[number] if self.windows else 0
            read = new if number < self.layers - 1 else last or new
            x_MxD, held = layer(variables, window, x_MxD, held, None, read)
            caches.append(held)
        return x_MxD, None if cache is None else tuple(caches)

    @property
    def scanned(self) -> bool:
        """True if blocks are scanned, see `UNROLLED`."""
        return self.layers > UNROLLED

    @property
    def rows_over_devices(self) -> bool:
        """True if the compiler places rows on devices, see `constrain`."""
        return self.constrain is not type(self).constrain

    @property
    def fused(self) -> Kernel | str:
        """Kernel for `fused_attention` on the target, or the reason why the target lacks one."""
        if self.rows_over_devices:
            return "shard_params and a model axis would divide what a kernel computes"
        return kernel_for(self.target or backend.here(), jnp.dtype(self.dtype), self.size)

    @property
    def kernel(self) -> Kernel | None:
        """Fused attention kernel of passes without a cache; None if disabled or unavailable."""
        found = self.fused if self.fused_attention else ""
        return None if isinstance(found, str) else found

    @property
    def ties_output(self) -> bool:
        """True if the output layer reuses the embedding matrix."""
        return self.tied and self.outputs in (0, self.vocabulary)

    def unembedding(self, params: PyTree) -> jax.Array:
        """Returns the matrix `[D, V]` of the outputs, from `{"params": …}`."""
        own = params["params"]
        matrix: jax.Array = own["embedding"].T if self.ties_output else own["output"]["kernel"]
        return matrix

    @property
    def size(self) -> int:
        """Size C of a head."""
        return self.head_size or self.width // self.heads

    @property
    def _norm(self) -> Callable[..., nn.RMSNorm]:
        return functools.partial(nn.RMSNorm, epsilon=self.epsilon, dtype=self.dtype)

    def parameter_shapes(self) -> PyTree:
        """Returns the shape and type of each parameter, without computing any values."""
        return _parameter_shapes(self, jnp.result_type(float))

    def for_decoding(self, params: PyTree, rows: int) -> PyTree:
        """Adds the blocks' parameters in a form that decodes faster, see `kernels`."""
        blocks = params["params"]["blocks"]
        if not self.scanned and (self.target or backend.here()).on_cpu:
            return {**params, kernels.APART: {"blocks": kernels.unstack(blocks, self.layers)}}
        if not (self.scanned and kernels.few(rows, self.target)):
            return params
        return {**params, kernels.BY_OUTPUTS: {"blocks": kernels.by_outputs(blocks, self.dtype)}}

    def empty_cache(self, batch: int, length: int) -> Cache:
        """Returns an empty cache for `batch` rows of `length` columns."""
        blocks = (self.layers,) if self.scanned else ()
        shape = (batch, *blocks, self.kv_heads or self.heads, length, self.size)
        pair = jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)
        return pair if self.scanned else (pair,) * self.layers


def mark_hidden_matrices(params: PyTree) -> PyTree:
    """Marks the matrices of all blocks, and both factors of their adapters, `[L, inputs, outputs]`.

    Embedding and output are not marked, nor the blocks' biases and scales, which are vectors,
    `[L, …]`.
    """
    return {
        collection: {
            name: jax.tree.map(lambda x, name=name: name == "blocks" and x.ndim == 3, layers)
            for name, layers in parts.items()
        }
        for collection, parts in params.items()
    }


def compiled_for(target: Target | None, model: Any) -> Any:
    """Returns the model compiled for a target.

    A custom model, or a model without target, is unchanged.
    """
    return model.clone(target=target) if target and isinstance(model, Transformer) else model


# A run calls the function several times, and tracing takes half a second.
@functools.lru_cache(maxsize=16)
def _parameter_shapes(model: Transformer, default: jnp.dtype) -> PyTree:
    del default  # part of the cache's key: the default type depends on `jax_enable_x64`
    return jax.eval_shape(
        model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    )


def _after_prompts(x_MxD: jax.Array, batch: int, prompts: int, columns: int) -> jax.Array:
    """Joins each row to its prompt's last position: `[P·L + B·N, D]` to `[B·(1 + N), D]`."""
    of_prompts_PxLxD, of_rows_BxNxD = (
        part.reshape(rows, -1, x_MxD.shape[-1])
        for part, rows in zip(jnp.split(x_MxD, [prompts * columns]), (prompts, batch), strict=True)
    )
    last_Bx1xD = jnp.repeat(of_prompts_PxLxD[:, -1:], batch // prompts, axis=0)
    return jnp.concatenate([last_Bx1xD, of_rows_BxNxD], 1).reshape(-1, x_MxD.shape[-1])


def _embed(embedding_VxD: jax.Array, tokens_M: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Looks up the embedding of each token, `[M, D]`."""
    vocabulary = embedding_VxD.shape[0]
    if vocabulary > ONE_HOT:
        return embedding_VxD[tokens_M].astype(dtype)
    return jax.nn.one_hot(tokens_M, vocabulary, dtype=dtype) @ embedding_VxD.astype(dtype)
