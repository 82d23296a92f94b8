"""A decoder-only transformer: RMSNorm, RoPE, gated MLP, grouped queries and a static cache.

The defaults suit small models; `architectures` has the settings of pretrained families.

Shape suffixes: B rows, N new positions, R ≤ N of them with outputs, M = B·N or B·R, S positions in
all, D width, H query heads, K key/value heads, G = H / K, C head size, F MLP width, V vocabulary,
L blocks, of which all parameters are stacked.
`dtype` is that of the matrix products; parameters are float32, softmax and outputs float32 at
least. Outside attention, rows and positions are one axis: the weight gradient of a product with two
leading axes is several times slower on a CPU.
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
from jaxrl_po.language import kernels
from jaxrl_po.language.attention import Kernel, Sight, kernel_for
from jaxrl_po.language.blocks import Apart, Attention, Block, Mlp, last_of, scaled, wide
from jaxrl_po.language.lora import ADAPTERS, Lora
from jaxrl_po.language.rope import PLAIN, Rope, turns
from jaxrl_po.types import PyTree

ONE_HOT = 1024
"""Vocabularies up to this are embedded by a product: the gradient of a lookup is a scatter, which
is slow on a CPU."""

UNROLLED = 4
"""Models up to this many blocks are compiled block by block: their decoding is up to twice as fast
on a CPU. The blocks of deeper ones are scanned: compile time does not depend on their number."""

Cache = tuple[tuple[jax.Array, jax.Array], ...] | tuple[jax.Array, jax.Array]
"""Keys and values: `[B, K, S, C]` of each block, or of all blocks `[B, L, K, S, C]` if scanned.

The order of axes is that of the products, so that a decoding step needs no transpose; it updates
either in place, but has to copy what it reads of the second.
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
"""`layer(variables, window, x_MxD, cache, number, read) -> (x_MxD, cache)`."""


class Transformer(nn.Module):
    """Decoder-only transformer; `outputs` is the vocabulary for a policy and 1 for a critic.

    Attributes:
      vocabulary: size of the input embedding, V.
      outputs: size of the output; 0 takes the vocabulary.
      width: D.
      layers: number of blocks.
      heads: H query heads.
      kv_heads: K key/value heads, a divisor of H; 0 takes H.
      head_size: C, an even number; 0 takes width / heads.
      mlp_width: F; 0 takes 4·D.
      gated: a gated MLP, W₃(f(W₁x) ∘ W₂x), in place of W₃f(W₂x).
      activation: f; None takes SiLU where the MLP is gated and else GELU, by its tanh formula.
      tied: the output reuses the embedding.
      tied_scale: of the logits where it does; 0 takes 1/√D.
      embedding_scale: of the embedded tokens.
      qkv_bias: biases on queries, keys and values.
      qk_norm: RMSNorm of each head's queries and keys, before they are rotated.
      query_scale: of the scores; 0 takes 1/√C.
      post_norms: RMSNorm after attention and MLP too, before they are added to the stream.
      epsilon: of every RMSNorm.
      rope: the rotary positions.
      windows: for each layer, how many positions it sees, its own included; 0 for all of them.
        Empty for all in every layer.
      window_rope: the rotary positions of layers with a window; None for `rope`.
      lora: adapters, in a collection of their own beside `params`; None for none.
      dtype: of the matrix products: float32, bfloat16, or float64 where JAX has it on.
      remat: recompute the activations inside blocks in the backward pass: less memory, a third more
        time. Microbatches bound the same memory at no such price; it pays where the activations of
        one row, or one group, are still too many. On a CPU XLA's default schedule undoes most of
        the saving where blocks are not scanned; without `concurrency_optimized_scheduler` it does
        not.
      fused_attention: without a cache, attend in one kernel where the target has one: scores are
        not held. It has no forward derivative.
      constrain: sharding constraint on the activations `[M, D]` between blocks; the default has
        none.
      over_rows: `over_rows(f)(params, rows)` is `f(params, rows)` where the rows are; by default f.
      target: what it is compiled for; None for `backend.here()`.
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
        """Logits after each new token.

        Args:
          tokens: `[B, N]`, int32, left-padded. Positions are relative, so that padding does not
            change the outputs.
          pad: `[B]`, int32, padding tokens on the left.
          cache: keys and values of earlier columns, to be extended; None attends to the new tokens
            only.
          start: column of the first new token, 0 without a cache.
          last: number of last tokens to compute outputs for; 0 for all. For the others the last
            block computes keys and values only.
          unembed: compute the outputs; otherwise the vectors `[…, D]` are returned of which they
            are the product with `unembedding`.
          prompt: `[P, L]`, int32, left-padded by `pad` `[P]`: the prompt of each group of B / P
            consecutive rows, computed once per group. Needs scanned blocks and no cache. Outputs
            then begin with one after the prompt.

        Returns:
          Outputs `[B, N or last, V]` in float32 at least, and the extended cache (None without
          one).
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
        # A constant of the program: fused into it, sines would be recomputed for every element that
        # they rotate.
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
            # Unrolled, each block has a window of its own.
            windows = tuple(sorted({*self.windows} or {0})) if self.scanned else (window,)
            sight = Sight(seen_BxNxS[:, new - read :], pad, window, windows, kernel)
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
        x_MxD = self._norm(dtype=wide(self.dtype), name="final_norm")(x_MxD)
        if self.ties_output:
            x_MxD = x_MxD * (self.tied_scale or 1 / math.sqrt(self.width))
        out_MxV = self._outputs(x_MxD, embedding_VxD, cache is not None) if unembed else x_MxD
        return out_MxV.reshape(batch, -1, out_MxV.shape[-1]), cache

    def _outputs(self, x_MxD: jax.Array, embedding_VxD: jax.Array, cached: bool) -> jax.Array:
        if not self.ties_output:
            start, outputs = scaled(0.1, self.width), self.outputs or self.vocabulary
            return nn.Dense(outputs, use_bias=False, kernel_init=start, name="output")(x_MxD)
        if self.scanned and cached and kernels.few(x_MxD.shape[0], self.target):
            return kernels.product(x_MxD, embedding_VxD)
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
        """The variables of all blocks, leaves `[L, …]`; drawn where the model is initialised."""

        def draw(key: jax.Array, collection: str) -> PyTree:
            x_1xD, turned_1xh = jnp.zeros((1, self.width)), [jnp.zeros((1, self.size // 2))] * 2
            inputs = x_1xD, turned_1xh, Sight(jnp.ones((1, 1, 1), bool), jnp.zeros(1, jnp.int32))
            stacked: dict[str, PyTree] = jax.vmap(
                lambda key: block.init(key, *inputs).get(collection, {})
            )(jax.random.split(key, self.layers))
            if self.scanned:
                return stacked
            # Drawn block by block, so that a seed gives the same parameters as named blocks would.
            assert self.scope is not None
            apart = Apart(block.attention, block.mlp, self.layers, parent=None)
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
                # A collection of their own: the base can be held apart and left untrained.
                self.variable(ADAPTERS, "blocks", lambda: draw(self.make_rng("params"), ADAPTERS))
        # Not what `param` returns: to compare shapes it draws all of them again in every trace.
        held = ("params", ADAPTERS, kernels.BY_OUTPUTS)
        blocks: PyTree = {name: self.get_variable(name, "blocks", {}) for name in held}
        chex.assert_tree_shape_prefix(blocks, (self.layers,))
        return blocks

    def _scanned(
        self, layer: Layer, blocks: PyTree, x_MxD: jax.Array, cache: Any, new: int, last: int
    ) -> tuple[jax.Array, Any]:
        """All blocks, compiled once; every position goes through all of them."""
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
        """Block by block; of the last one only what is read."""
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
        """Whether blocks are scanned, see `UNROLLED`."""
        return self.layers > UNROLLED

    @property
    def rows_over_devices(self) -> bool:
        """Whether the compiler places rows on devices, see `constrain`."""
        return self.constrain is not type(self).constrain

    @property
    def fused(self) -> Kernel | str:
        """The kernel for `fused_attention` on the target, or why there is none."""
        if self.rows_over_devices:
            return "shard_params and a model axis would divide what a kernel computes"
        return kernel_for(self.target or backend.here(), jnp.dtype(self.dtype), self.size)

    @property
    def kernel(self) -> Kernel | None:
        """The fused kernel that passes without a cache attend with; None without one."""
        found = self.fused if self.fused_attention else ""
        return None if isinstance(found, str) else found

    @property
    def ties_output(self) -> bool:
        """Whether the outputs are read off the embedding."""
        return self.tied and self.outputs in (0, self.vocabulary)

    def unembedding(self, params: PyTree) -> jax.Array:
        """The matrix `[D, V]` of the outputs, from `{"params": …}`."""
        own = params["params"]
        matrix: jax.Array = own["embedding"].T if self.ties_output else own["output"]["kernel"]
        return matrix

    @property
    def size(self) -> int:
        """The head size C."""
        return self.head_size or self.width // self.heads

    @property
    def _norm(self) -> Callable[..., nn.RMSNorm]:
        return functools.partial(nn.RMSNorm, epsilon=self.epsilon, dtype=self.dtype)

    def parameter_shapes(self) -> PyTree:
        """Shape and type of each parameter; nothing is computed."""
        return _parameter_shapes(self, jnp.result_type(float))

    def for_decoding(self, params: PyTree, rows: int) -> PyTree:
        """The parameters, and those of blocks in a form that decodes faster; see `kernels`."""
        blocks = params["params"]["blocks"]
        if not self.scanned and (self.target or backend.here()).on_cpu:
            return {**params, kernels.APART: {"blocks": kernels.apart(blocks, self.layers)}}
        if not (self.scanned and kernels.few(rows, self.target)):
            return params
        return {**params, kernels.BY_OUTPUTS: {"blocks": kernels.by_outputs(blocks, self.dtype)}}

    def empty_cache(self, batch: int, length: int) -> Cache:
        """A cache for `batch` rows of `length` columns."""
        blocks = (self.layers,) if self.scanned else ()
        shape = (batch, *blocks, self.kv_heads or self.heads, length, self.size)
        pair = jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)
        return pair if self.scanned else (pair,) * self.layers


def hidden_matrices(params: PyTree) -> PyTree:
    """Marks the matrices of all blocks, and both factors of their adapters, `[L, inputs, outputs]`.

    Embedding and output are not hidden; biases and scales of the blocks are vectors, `[L, …]`.
    """
    return {
        collection: {
            name: jax.tree.map(lambda x, name=name: name == "blocks" and x.ndim == 3, layers)
            for name, layers in parts.items()
        }
        for collection, parts in params.items()
    }


def compiled_for(target: Target | None, model: Any) -> Any:
    """The model for a target, or as it is without one; a custom module need not know of targets."""
    return model.clone(target=target) if target and isinstance(model, Transformer) else model


@functools.lru_cache(maxsize=16)  # a run asks several times, and tracing takes half a second
def _parameter_shapes(model: Transformer, default: jnp.dtype) -> PyTree:
    del default  # part of the cache's key: the default type depends on `jax_enable_x64`
    return jax.eval_shape(
        model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    )


def _after_prompts(x_MxD: jax.Array, batch: int, prompts: int, columns: int) -> jax.Array:
    """Of each row the prompt's last position and its own: `[P·L + B·N, D]` to `[B·(1 + N), D]`."""
    of_prompts_PxLxD, of_rows_BxNxD = (
        part.reshape(rows, -1, x_MxD.shape[-1])
        for part, rows in zip(jnp.split(x_MxD, [prompts * columns]), (prompts, batch), strict=True)
    )
    last_Bx1xD = jnp.repeat(of_prompts_PxLxD[:, -1:], batch // prompts, axis=0)
    return jnp.concatenate([last_Bx1xD, of_rows_BxNxD], 1).reshape(-1, x_MxD.shape[-1])


def _embed(embedding_VxD: jax.Array, tokens_M: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The row of each token, `[M, D]`."""
    vocabulary = embedding_VxD.shape[0]
    if vocabulary > ONE_HOT:
        return embedding_VxD[tokens_M].astype(dtype)
    return jax.nn.one_hot(tokens_M, vocabulary, dtype=dtype) @ embedding_VxD.astype(dtype)
