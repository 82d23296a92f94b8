"""Tests the profile of an iteration: operations counted in a program, and operations executed."""

import jax
import jax.numpy as jnp
import pytest
import xla_profile
from tables import cases

from experiments.benchmarks import language
from jaxrl_po.config import ConfigError


def chain(x):
    """Computes seven products, one after another, and a sort."""
    product, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=7)
    return jnp.sort(product, axis=0)


def test_operations_are_counted_once_per_run():
    program = xla_profile.program(chain, jnp.full((64, 64), 0.01))
    kinds = [each.kind for each in xla_profile.operations(program.compiled.as_text()).values()]
    assert (kinds.count("while"), kinds.count("sort"), kinds.count("all-reduce")) == (1, 1, 0)
    run = xla_profile.executed(program)
    assert sum(each.runs * each.flops for each in run) == 7 * 2 * 64**3
    assert all(each.seconds > 0 for each in run)
    assert xla_profile.kernels(program) == sum(each.runs for each in run)
    totals = xla_profile.totals(run, lambda each: each.kind)
    # a product and its activation may be one operation or two
    parts = [totals[kind].number for kind in totals if kind in ("dot", "fusion")]
    assert 7 <= sum(parts) <= 21
    assert totals["sort"].number == 1


def test_products_are_told_apart_by_their_sizes():
    def kinds(*sizes: tuple[int, ...]) -> str:
        operation = xla_profile.Operation("fusion", "jit(step)/dot_general", sizes, 1.0, 1e-3)
        return language.categories(vocabulary=50)(operation)

    assert kinds((512, 1, 64, 64)) == "products with other kernels"
    assert kinds((512, 50, 64)) == "products with the embedding"
    assert kinds((8, 4, 10, 10, 16)) == "products of attention"


@pytest.mark.slow
def test_lengths_are_those_asked_for():
    """When decoding, each step ends a completion with probability 1 / (share · budget).

    The probabilities of other tokens and training are unchanged.
    """
    none = language.Adapters()
    for lengths, wanted in (("geometric:0.2", 1 / 4), ("equal", 0.0)):
        options = language.Options(width=8, layers=1, heads=2, new_tokens=20, lengths=lengths)
        task, model, _ = language.of(options, none)
        given = jnp.full((2, 3), 4), jnp.zeros(2, jnp.int32)
        params = model.init(jax.random.key(0), *given)
        (free, _), (ending, _) = (
            model.apply(params, *given, cache) for cache in (None, model.empty_cache(2, 3))
        )
        shares = jax.nn.softmax(ending)
        eos = task.tokenizer.eos
        assert jnp.allclose(shares[..., eos], wanted)
        others = jnp.arange(task.tokenizer.size) != eos
        assert jnp.allclose((ending - free)[..., others], 0.0, atol=1e-5)
    for lengths in ("geometric:0", "geometric:0.01", "geometric", "geometric:x", "even"):
        with pytest.raises(ConfigError, match="lengths: must be sampled, equal, or geometric:"):
            language.probability_of(lengths, 20)
    task, model, _ = language.of(language.Options(shape="smollm2-135m", lengths="equal"), none)
    assert (model.end, model.probability) == (task.tokenizer.eos, 0.0)


@pytest.mark.slow
def test_transformer_account_has_all_its_products():
    options = language.Options(
        width=16, layers=1, num_prompts=4, group_size=2, updates=1, iterations=1, profile=True
    )
    row = language.account(options, language.Adapters())
    for name in ("sampling", "training"):
        assert len([key for key in row if key.startswith(f"{name}: products")]) == 3
        assert 0 < row[f"{name}_products_at_peak_ms"] <= row[f"{name}_ms"]


@cases(
    "flags, message",
    (["--profile"], "profile: needs width or shape"),
    (["--profile", "--width=16", "--seeds=2"], "profile: takes one seed, on one device"),
    (["--profile", "--width=16", "--devices=2"], "profile: takes one seed, on one device"),
)
def test_an_account_of_what_has_none_is_refused(monkeypatch, flags, message):
    monkeypatch.setattr(language.os, "sched_setaffinity", lambda process, cores: None)
    with pytest.raises(ConfigError, match=message):
        language.main(flags)
