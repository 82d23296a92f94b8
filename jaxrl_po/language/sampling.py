"""Samples completions under jit: one prefill per group, and a loop until all rows have ended."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_po.config import with_field_docs
from jaxrl_po.language import kernels, unembedding
from jaxrl_po.language.stopping import Ends
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.language.unembedding import restricted
from jaxrl_po.types import PyTree

ROUNDING = 1e-6  # rounding error of a sum of probabilities, and relative error of a probability

# Smallest numbers of tokens and rows for which a narrower decode loop is worth its compile time.
NARROWING_STEPS, NARROWING_ROWS = 32, 64


def truncate_logits(
    logits: jax.Array, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> jax.Array:
    """Applies min-p, top-k and top-p.

    Keeps the fewest likely tokens, at most `top_k`, that reach `top_p`.

    Top-p is nucleus sampling (Holtzman et al. 2020, arXiv:1904.09751, eq. 2–3) over the
    distribution left by the other filters, renormalised. The most likely token is always kept. Ties
    are broken in favour of the lower index, so that no more tokens than necessary are kept.

    Args:
      logits: logits already divided by the temperature, `[…, V]`.
      top_k: number of most likely tokens to keep, in [0, V]; 0 disables the filter.
      top_p: probability that the kept tokens must reach, in (0, 1]; 1 disables the filter. If top-p
        and top-k are both disabled, logits are not sorted.
      min_p: share of the largest probability that a token needs to be kept, in [0, 1) (Nguyen et
        al. 2024, arXiv:2407.01082, eq. 1–2); 0 disables the filter.

    Returns:
      Logits, `[…, V]`, `-inf` for excluded tokens and unchanged for others; softmax renormalises.

    Example:
      >>> print(truncate_logits(jnp.array([-2.0, 1.0, -1.0, 0.0]), top_p=0.7))
      [-inf   1. -inf   0.]
    """
    vocabulary = logits.shape[-1]
    if min_p:
        least = jnp.max(logits, axis=-1, keepdims=True) + math.log(min_p) - ROUNDING
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_k == 0 and top_p == 1.0:
        return logits
    descending, index = largest(logits, top_k or vocabulary)
    probability = jax.nn.softmax(descending.astype(jnp.float32))
    # The token that makes the sum reach top_p, up to rounding, still belongs to the nucleus. At
    # top_p = 1 the test is omitted: rounding could let the sum reach 1 early.
    reached_before = jnp.cumsum(probability, axis=-1) - probability
    enough = top_p - ROUNDING if top_p < 1.0 else jnp.inf
    last = jnp.maximum(jnp.sum(reached_before < enough, axis=-1, keepdims=True) - 1, 0)
    edge, edge_index = (jnp.take_along_axis(x, last, axis=-1) for x in (descending, index))
    token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    kept = (logits > edge) | ((logits == edge) & (token <= edge_index))
    return jnp.where(kept, logits, -jnp.inf)


def largest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the largest values in descending order, and their indices.

    Of equal values, the lower index is first.

    `lax.top_k` alone orders by bits: −0 below +0, and also numbers that comparisons flush to 0.

    Args:
      logits: values to sort, `[…, V]`.
      count: number of values to return, at most V.

    Returns:
      Values and int32 indices, both `[…, count]`.

    Example:
      >>> largest(jnp.array([-0.0, 0.0, 1.0]), 2)[1].tolist()
      [2, 0]
    """
    values: tuple[jax.Array, jax.Array] = jax.lax.top_k(jnp.where(logits == 0, 0, logits), count)
    return values


@with_field_docs
class Decoding(NamedTuple):
    """Settings of sampling completions, shared by training, evaluation and a reward model.

    Attributes:
      max_new_tokens: token budget T, EOS included; 0 stands for the task's longest answer.
      temperature: divisor of the logits, above 0.
      top_k: number of most likely tokens to sample from, see `truncate_logits`; 0 disables the
        filter.
      top_p: probability that the tokens to sample from must reach, see `truncate_logits`; 1
        disables the filter.
      min_p: share of the largest probability that a token needs, see `truncate_logits`; 0 disables
        the filter.
    """

    max_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filters(self) -> bool:
        """True if some tokens are never drawn."""
        return bool(self.top_k or self.top_p < 1.0 or self.min_p)


PLAIN = Decoding()


def kept_tokens(logits: jax.Array, decoding: Decoding) -> jax.Array | None:
    """Returns the tokens that `truncate_logits` keeps for sampling; None if it keeps all tokens.

    Args:
      logits: logits already divided by the temperature, `[…, V]`.
      decoding: filters to apply. For a vocabulary above `unembedding.HELD`, top-p and min-p without
        top-k keep at most `unembedding.LISTED` tokens.

    Returns:
      Kept tokens as bool `[…, V]`, or, above `unembedding.HELD`, as int32 ids `[…, K]`, with -1 in
      unused slots.
    """
    if not decoding.filters:
        return None
    vocabulary, (_, _, top_k, top_p, min_p) = logits.shape[-1], decoding
    if vocabulary <= unembedding.HELD:
        return truncate_logits(logits, top_k=top_k, top_p=top_p, min_p=min_p) > -jnp.inf
    likely, token = largest(logits, top_k or min(unembedding.LISTED, vocabulary))
    return jnp.where(truncate_logits(likely, top_p=top_p, min_p=min_p) > -jnp.inf, token, -1)


def no_tokens(logits: jax.Array, decoding: Decoding, columns: int) -> jax.Array | None:
    """Allocates zeros for the kept tokens of N columns, `[…, N, …]`; None without filters."""
    kept = jax.eval_shape(lambda logits: kept_tokens(logits, decoding), logits)
    if kept is None:
        return None
    return jnp.zeros((*logits.shape[:-1], columns, kept.shape[-1]), kept.dtype)


class Completions(NamedTuple):
    """Generated completions, B = P·G rows in group-major order.

    Attributes:
      tokens: tokens with PAD after EOS, or after the token that completes a stop string, `[B, T]`,
        int32.
      log_prob: log-probability of each token under the distribution that it was drawn from, 0 after
        the end, `[B, T]`, nats.
      length: number of tokens generated, the last one included, `[B]`, int32.
      ended: True if the end came within the budget, `[B]`, bool.
      kept: tokens that each token was drawn from, see `kept_tokens`, zeros after the end, `[B, T,
        …]`; None if all tokens are possible, or if not requested.
    """

    tokens: jax.Array
    log_prob: jax.Array
    length: jax.Array
    ended: jax.Array
    kept: jax.Array | None = None


def member_keys(keys: jax.Array, group_size: int) -> jax.Array:
    """Returns keys `[P·G]`, group-major, from P prompts' keys: `fold_in(key, g)` for member g.

    Raw keys, which `jax.random.PRNGKey` returns, have one more axis, and remain raw.
    """
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return fold(keys, jnp.arange(group_size)).reshape(-1, *keys.shape[1:])


@jax.custom_batching.custom_vmap
def anywhere(condition: jax.Array) -> jax.Array:
    """Returns True, `[]`, if a condition holds in any row, or in any seed under `vmap` over seeds.

    Under `vmap`, a loop with a mapped condition selects between its old and new carry, including
    the cache, in each step, and its mapped counter turns slices into scatters. With this function
    all seeds run until the last seed has ended; until then the other seeds write padding.
    """
    return condition.any()


@anywhere.def_vmap
def _(size: int, mapped: Sequence[bool], condition: jax.Array) -> tuple[jax.Array, bool]:
    del size, mapped
    return anywhere(condition), False


def prefill(
    model: Transformer,
    params: Any,
    prompt: jax.Array,
    pad: jax.Array,
    columns: int,
    *,
    group_size: int,
) -> tuple[jax.Array, Any, jax.Array]:
    """Computes each prompt once and repeats the result for the members of its group.

    Args:
      model: transformer of the policy.
      params: parameters of the policy.
      prompt: tokens of the prompts, `[P, L]`, int32, left-padded.
      pad: padding tokens on the left, `[P]`, int32.
      columns: number of columns of the cache.
      group_size: number G of members in each group.

    Returns:
      Logits of the first token `[P·G, V]`, the cache, and the members' `pad` `[P·G]`.
    """
    chex.assert_rank([prompt, pad], [2, 1])
    cache = model.empty_cache(prompt.shape[0], columns)
    logits, filled = model.apply(params, prompt, pad, cache, 0, last=1)
    repeated: tuple[jax.Array, Any, jax.Array] = jax.tree.map(
        lambda x: jnp.repeat(x, group_size, axis=0), (logits[:, 0], filled, pad)
    )
    return repeated


def for_decoding(model: Any, params: Any, rows: int) -> Any:
    """Returns the parameters in the form that decodes `rows` rows fastest.

    The parameters of a custom module are unchanged.
    """
    prepare = getattr(model, "for_decoding", None)
    # A narrower loop receives parameters that are already prepared.
    return params if prepare is None or kernels.FORMS & set(params) else prepare(params, rows)


def draw(
    logits: jax.Array,
    keys: jax.Array,
    t: jax.Array,
    decoding: Decoding,
    *,
    greedy: bool,
    noise: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Draws token t of each row; returns the token, its log-probability `[B]` and the kept tokens.

    `keys` `[B]` are folded with t, `[]` or `[B]`, and consumed. Unless `greedy`, Gaussian noise of
    std `noise` is added to the logits, before the temperature. Greedy decoding takes the most
    likely token without random numbers or filters. Kept tokens are `[B, …]`, see `kept_tokens`.
    """
    step_keys = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(t, keys.shape[:1]))
    if noise and not greedy:
        step_keys, noise_keys = jnp.moveaxis(jax.vmap(jax.random.split)(step_keys), 1, 0)
        drawn = jax.vmap(lambda row, key: jax.random.normal(key, row.shape, row.dtype))(
            logits, noise_keys
        )
        logits = logits + noise * drawn
    logits = logits / decoding.temperature
    kept = None if greedy else kept_tokens(logits, decoding)
    policy = restricted(logits, kept)
    if greedy:
        token = policy.mode()
    else:
        token = jax.vmap(lambda row, key: row.sample(key))(policy, step_keys)
    return token, policy.log_prob(token), kept


class DecodeRows(NamedTuple):
    """Rows of a decode loop between two steps, B in number.

    Attributes:
      token: last token of each row, which is fed next, `[B]`, int32.
      pad: padding tokens on the left of the prompt, `[B]`, int32.
      keys: keys `[B]`, typed or raw; token t is drawn with `fold_in(key, t)`.
      cache: keys and values of the earlier tokens.
      own: state that belongs to the caller of `decode` and is returned; leaves `[B, …]`.
    """

    token: jax.Array
    pad: jax.Array
    keys: jax.Array
    cache: Any
    own: PyTree


def in_columns(model: Transformer, first: int) -> Callable[..., tuple[jax.Array, DecodeRows]]:
    """Builds a `feed` for `decode` that puts token t of every row in column `first + t`."""

    def feed(params: Any, t: jax.Array, rows: DecodeRows) -> tuple[jax.Array, DecodeRows]:
        column = first + t - 1
        logits, cache = model.apply(params, rows.token[:, None], rows.pad, rows.cache, column)
        return logits[:, 0], rows._replace(cache=cache)

    return feed


def write_column(buffer: jax.Array, column: jax.Array, t: jax.Array) -> jax.Array:
    """Writes column t of a buffer `[B, T, …]`."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, column[:, None], t, axis=1)


def write_kept_tokens(
    buffer: jax.Array | None, kept: jax.Array | None, drawn: jax.Array, t: jax.Array
) -> jax.Array | None:
    """Writes the kept tokens `[B, …]` into column t of a buffer.

    0 in rows that did not draw a token.
    """
    if buffer is None or kept is None:
        return buffer
    return write_column(buffer, jnp.where(drawn[:, None], kept, jnp.zeros_like(kept)), t)


def widths_of(rows: int, steps: int) -> list[int]:
    """Returns the widths of the decode loops for a number of rows and steps, see `decode`."""
    widths = [rows]
    while steps >= NARROWING_STEPS and widths[-1] >= NARROWING_ROWS:
        widths.append(widths[-1] // 4)
    return widths


def decode(
    model: Transformer,
    params: Any,
    feed: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
    emit: Callable[[jax.Array, jax.Array, Any], Any],
    live: Callable[[Any], jax.Array],
    logits: jax.Array,
    rows: Any,
    *,
    steps: int,
) -> Any:
    """Runs the decode loop, which emits tokens until no row is alive, in any seed under `vmap`.

    Once only a quarter of the rows are alive, they continue in a loop of a quarter of the width,
    and so on: the cost of a step grows with its width.

    Args:
      model: transformer of the policy.
      params: parameters of the policy.
      feed: `feed(params, t, rows) -> (logits [B, V], rows)`, reads token t − 1 of every row.
      emit: `emit(t, logits, rows) -> rows`, appends token t to every row that is alive; other rows
        do not change.
      live: `live(rows) -> [B]`, bool, True for rows that have not ended.
      logits: logits of token 0, `[B, V]`.
      rows: tuple with leaves `[B, …]`, such as `DecodeRows`.
      steps: largest number of tokens of a row.

    Returns:
      Last element of the tuple `rows`.
    """

    def run(params: Any, t: jax.Array, rows: Any, widths: Sequence[int]) -> Any:
        width, *narrower = widths
        params, fewer = for_decoding(model, params, width), narrower[0] if narrower else 0

        def unfinished(loop: tuple[jax.Array, Any]) -> jax.Array:
            t, rows = loop
            return (t < steps) & anywhere(live(rows).sum() > fewer)

        def narrowed(t: jax.Array, rows: Any) -> Any:
            front = jnp.argsort(~live(rows), stable=True)[:fewer]
            ended = run(params, t, jax.tree.map(lambda x: x[front], rows), narrower)
            return jax.tree.map(lambda x, new: x.at[front].set(new), rows[-1], ended)

        t, rows = jax.lax.while_loop(
            unfinished, lambda loop: (loop[0] + 1, emit(loop[0], *feed(params, *loop))), (t, rows)
        )
        if not narrower:
            return rows[-1]
        going_on = (t < steps) & anywhere(live(rows))
        return jax.lax.cond(going_on, narrowed, lambda _, rows: rows[-1], t, rows)

    placed = getattr(model, "rows_over_devices", False)
    widths = [logits.shape[0]] if placed else widths_of(logits.shape[0], steps)
    return run(params, jnp.int32(1), emit(jnp.int32(0), logits, rows), widths)


def generate(
    model: Transformer,
    params: Any,
    prompt: jax.Array,
    pad: jax.Array,
    keys: jax.Array,
    *,
    group_size: int,
    decoding: Decoding,
    eos: int | Sequence[int] | Ends,
    pad_token: int,
    greedy: bool = False,
    noise: float = 0.0,
    with_kept: bool = False,
) -> Completions:
    """Samples `group_size` completions of each prompt.

    The prefill of a prompt is computed once per group, and the prefill's cache is repeated for the
    members.

    With a filter, a token is drawn from μ(a) = π(a) 1[a ∈ S] / π(S), where S are the tokens that
    `truncate_logits` keeps; `log_prob` is log μ(a). If S is recorded, the learner's policy is
    restricted to the same S whatever its parameters (`restricted`): the ratio is 1 at the first
    update and stays finite, and the gradient has no bias −E_μ[A] ∇ log π(S), unlike with log π(a).

    Args:
      model: transformer of the policy.
      params: parameters of the policy.
      prompt: tokens of the prompts, `[P, L]`, int32, left-padded.
      pad: padding tokens on the left, `[P]`, int32.
      keys: keys `[P]`, typed or raw, consumed; member g of a group samples token t with
        `fold_in(fold_in(key, g), t)`.
      group_size: number G of completions per prompt.
      decoding: budget, above 0, temperature and filters of sampling.
      eos: id that ends a completion, several such ids, or `Ends` with stop strings.
      pad_token: id that fills the rest.
      greedy: True to take the most likely token; `log_prob` still uses the temperature.
      noise: std of the noise on the logits, see `draw`.
      with_kept: True to record the tokens that each token was drawn from.

    Returns:
      Sampled `Completions`.
    """
    prompt_length, budget = prompt.shape[1], decoding.max_new_tokens
    ends = eos if isinstance(eos, Ends) else Ends((eos,) if isinstance(eos, int) else tuple(eos))
    row_keys = member_keys(keys, group_size)
    rows = row_keys.shape[0]
    # The last token is never fed back, so it does not need a column.
    columns = prompt_length + budget - 1
    logits, cache, pad = prefill(model, params, prompt, pad, columns, group_size=group_size)

    def emit(t: jax.Array, logits: jax.Array, rows: DecodeRows) -> DecodeRows:
        """Draws token t of every row that has not ended."""
        said, matched = rows.own
        token, log_prob, kept = draw(logits, rows.keys, t, decoding, greedy=greedy, noise=noise)
        log_prob = jnp.where(said.ended, 0.0, log_prob)
        token = jnp.where(said.ended, pad_token, token)
        matched, ends_here = ends.after(matched, token)
        said = Completions(
            write_column(said.tokens, token, t),
            write_column(said.log_prob, log_prob, t),
            said.length + ~said.ended,
            said.ended | ends_here,
            write_kept_tokens(said.kept, kept, ~said.ended, t),
        )
        return rows._replace(token=token, own=(said, matched))

    def live(rows: DecodeRows) -> jax.Array:
        return ~rows.own[0].ended

    tokens = jnp.full((rows, budget), pad_token, jnp.int32)
    log_prob, length = jnp.zeros((rows, budget), logits.dtype), jnp.zeros(rows, jnp.int32)
    kept = no_tokens(logits, decoding, budget) if with_kept else None
    said = Completions(tokens, log_prob, length, jnp.zeros(rows, bool), kept)
    begun = DecodeRows(length, pad, row_keys, cache, (said, ends.begin(rows)))
    feed = in_columns(model, prompt_length)
    said, _ = decode(model, params, feed, emit, live, logits, begun, steps=budget)
    return said
