"""Tests a sampler that differs from the learner: its settings, metrics and corrections."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import imprecise, tabular_problem
from tiny import MODEL

from jaxrl_po import language
from jaxrl_po.algorithms import actor_critic, dapo, grpo
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError, as_arrays
from jaxrl_po.language import sampling
from jaxrl_po.learner import EARLIER_POLICIES, recompute_log_prob
from jaxrl_po.run.store.metrics import read
from jaxrl_po.types import Samples

TASK = language.tasks.addition(1)
NETWORK = language.Transformer(TASK.tokenizer.size, width=8, layers=1, heads=2, gated=False)


def problem(**changes):
    return language.make_problem(
        TASK, NETWORK, num_prompts=16, group_size=4, sampler=language.Sampler(**changes)
    )


def test_noise_has_given_size_and_sampler_reports_it():
    """The odds of two tokens reveal the noise: log π / (1 − π) moves by two draws, a std of √2
    σ."""
    rows, decoding = 4000, sampling.Decoding(1, 2.0)
    keys, logits = jax.random.split(jax.random.key(0), rows), jnp.zeros((rows, 2))

    @jax.jit
    def draw(column):
        return sampling.draw(logits, keys, column, decoding, greedy=False, noise=0.5)

    token, log_prob = map(np.asarray, draw(3)[:2])
    odds = (2 * token - 1) * (log_prob - np.log1p(-np.exp(log_prob)))
    assert float(odds.std()) == pytest.approx(np.sqrt(2.0) * 0.5 / 2.0, rel=0.05)
    assert abs(float(odds.mean())) < 0.03
    # The sampler drew its actions from the noisy policy.
    assert float(np.exp(log_prob).mean()) > 0.5
    _, other, _ = draw(4)
    assert abs(np.corrcoef(log_prob, other)[0, 1]) < 0.1


@functools.cache
def begun():
    """Returns a state of the learner of every sampler."""
    return jax.jit(grpo.make(as_arrays(grpo.Config(use_reference=False)), problem()).init)(
        jax.random.key(0)
    )


def first_metrics(**changes):
    learner = grpo.make(as_arrays(grpo.Config(use_reference=False)), problem(**changes))
    return jax.jit(lambda state: learner.sample(state)[1].metrics)(begun())


def test_distance_grows_with_noise_from_zero():
    assert problem().log_prob_matches_sampler
    found = [first_metrics(noise=noise) for noise in (0.1, 0.3)]
    for name in ("sampler_kl", "learner_kl", "sampler_max_ratio"):
        small, large = (float(metrics[name].value()) for metrics in found)
        assert 0 < small < large
    # the KL is of second order in the noise
    for name in ("sampler_kl", "learner_kl"):
        small, large = (float(metrics[name].value()) for metrics in found)
        assert 4 < large / small < 20


def test_dialogues_have_the_same_knobs():
    dialogue = language.dialogues.higher_lower()
    network = NETWORK.clone(vocabulary=dialogue.tokenizer.size)
    sizes = {"num_prompts": 4, "group_size": 2}
    assert language.dialogues.make_problem(dialogue, network, **sizes).log_prob_matches_sampler
    noisy = language.dialogues.make_problem(
        dialogue, network, **sizes, sampler=language.Sampler(noise=0.3, staleness=1)
    )
    learner = grpo.make(as_arrays(grpo.Config(use_reference=False)), noisy)
    state, batch = jax.jit(lambda key: learner.sample(learner.init(key)))(jax.random.key(0))
    assert 1e-3 < float(batch.metrics["sampler_kl"].value()) < 0.3
    assert EARLIER_POLICIES in state.collector.replicated


def test_both_kls_are_estimated_from_the_samplers_actions():
    """The estimates approach the exact values of two categorical policies, where the first policy
    has drawn the actions."""
    table = tabular_problem(num_prompts=8192, num_steps=8)

    @jax.jit
    def measured():
        params, collector = table.init(jax.random.key(0))
        stale = jax.tree.map(lambda x: 2.0 * x, table.init(jax.random.key(1))[0])
        _, batch = table.collect(stale, collector, jax.random.key(2))
        batch = batch._replace(columns={"sampler_log_prob": batch.log_prob})
        _, metrics = recompute_log_prob(table, params, batch, num_parts=1, axis_name=None)
        mine, its = (table.apply(p, batch.inputs)[0] for p in (params, stale))
        return metrics, batch.mask, {"sampler_kl": its.kl(mine), "learner_kl": mine.kl(its)}

    metrics, mask, exact = measured()
    for name, kl in exact.items():
        mean = np.asarray(kl)[np.asarray(mask)].mean()
        assert float(metrics[name].value()) == pytest.approx(mean, rel=0.05)


def test_update_kl_is_of_old_policy_not_sampler():
    """The estimate approaches the exact value of two categorical policies, on actions of a third
    policy."""
    table = tabular_problem(num_prompts=8192, num_steps=8)

    @jax.jit
    def measured():
        old, collector = table.init(jax.random.key(0))
        stale, new = (
            jax.tree.map(lambda x: 2.0 * x, table.init(jax.random.key(seed))[0]) for seed in (1, 3)
        )
        _, batch = table.collect(stale, collector, jax.random.key(2))
        mine, its = (table.apply(params, batch.inputs)[0] for params in (old, new))
        samples = Samples(
            inputs=batch.inputs,
            action=batch.action,
            log_prob=mine.log_prob(batch.action),
            advantage=batch.reward,
            mask=batch.mask,
            columns={"sampler_log_prob": batch.log_prob},
        )
        return actor_critic.update_kl(table, new, samples)["kl"], mine.kl(its), batch.mask

    found, exact, mask = measured()
    mean = np.asarray(exact)[np.asarray(mask)].mean()
    assert float(found.value()) == pytest.approx(mean, rel=0.05)


def test_sampler_precision_leaves_learner_precision():
    assert language.Sampler(dtype="bfloat16").of(NETWORK).dtype == jnp.bfloat16
    assert language.Sampler(dtype="float32").of(NETWORK) is NETWORK
    assert not problem(dtype="bfloat16").log_prob_matches_sampler
    assert problem(dtype="float32").log_prob_matches_sampler
    metrics = first_metrics(dtype="bfloat16")
    assert 0 < float(metrics["sampler_kl"].value()) < 1e-3


@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_batches_come_from_policy_of_given_iterations_ago(staleness):
    table = tabular_problem(num_prompts=8, group_size=4, dense=False)
    table = imprecise(table, size=0.0, staleness=staleness)
    learner = grpo.make(as_arrays(grpo.Config(use_reference=False, learning_rate=0.1)), table)
    state, policies = jax.jit(learner.init)(jax.random.key(0)), []
    sample, update = jax.jit(learner.sample), jax.jit(learner.update)
    score = jax.jit(
        lambda params, batch: table.apply(params, batch.inputs)[0].log_prob(batch.action)
    )
    for iteration in range(6):
        policies.append(state.params)
        state, batch = sample(state)
        old = policies[max(iteration - staleness, 0)]
        sampled = batch.columns["sampler_log_prob"]
        for params, log_prob in ((old, sampled), (state.params, batch.log_prob)):
            want = np.where(batch.mask, score(params, batch), 0.0)
            np.testing.assert_allclose(log_prob, want, atol=1e-5)
        assert (float(batch.metrics["sampler_kl"].value()) > 1e-6) == (iteration > 0)
        state, metrics = update(state, batch)
    assert jax.tree.leaves(state.collector.replicated[EARLIER_POLICIES])[0].shape[0] == staleness
    assert float(metrics["skipped"].value()) == 0.0


def test_a_correction_gives_the_gradient_without_mismatch():
    """Each response has one token, so that the weights are unbiased: E_μ[ρ A ∇ log π] = E_π[A ∇ log
    π]."""
    table = imprecise(tabular_problem(num_prompts=8192, group_size=2, num_steps=1), size=0.0)
    other = jax.jit(table.init)(jax.random.key(1))[0]

    def collect(params, collector, key):
        return table.collect(params._replace(policy=other.policy), collector, key)

    def gradient(problem, **changes):
        config = grpo.Config(use_reference=False, scale="none", **changes)
        learner = grpo.make(as_arrays(config), problem, optax.sgd(1.0))
        state = learner.init(jax.random.key(0))
        after, metrics = learner.step(state)
        change = jax.tree.map(jnp.subtract, state.params.policy, after.params.policy)
        return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(change)]), metrics

    stale = table._replace(collect=collect)

    @jax.jit
    def capped(highest):
        return gradient(stale, correction="truncate", correction_high=highest)

    (want, _), (uncorrected, _) = jax.jit(lambda: (gradient(table), gradient(stale)))()
    (corrected, metrics), (truncated, _) = capped(1e6), capped(1.0)
    assert np.linalg.norm(corrected - want) < 0.1 * np.linalg.norm(want)
    for biased in (uncorrected, truncated):
        assert np.linalg.norm(biased - want) > 0.15 * np.linalg.norm(want)
    assert float(metrics["sampler_weight"].value()) == pytest.approx(1.0, abs=0.02)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"noise: must lie in \[0, inf\) nats, got -1"):
        problem(noise=-1.0)
    with pytest.raises(ConfigError, match="dtype: must be one of same, float32, bfloat16"):
        problem(dtype="float16")
    with pytest.raises(ConfigError, match="carry_surplus: must be off with staleness = 2"):
        dapo.make(dapo.Config(carry_surplus=True), problem(staleness=2))


@pytest.mark.usefixtures("trace_only")
def test_the_knobs_are_flags(tmp_path):
    out = tmp_path / "run"
    argv = [
        *("--seeds=1", "--devices=1", "--eval_prompts=4", "--show=0", "--task.num_digits=1"),
        *("--problem.num_prompts=4", "--problem.group_size=2", "--log_every=1", "--eval_every=2"),
        *("--warm_start.steps=0", *MODEL, "--algorithm=grpo", "--total_steps=16"),
        *("--sampler.noise=0.2", "--sampler.staleness=1", "--sampler.dtype=bfloat16"),
        *("--config.correction=mask", f"--out={out}"),
    ]
    assert launch.language(argv) == 0
    line = read(out / "metrics.jsonl")[-1]
    assert {"learner_kl", "sampler_max_ratio", "sampler_weight"} <= line.keys()
    kept = json.loads((out / "config.json").read_text())
    knobs = {"sampler.dtype": "bfloat16", "sampler.noise": 0.2, "sampler.staleness": 1}
    assert knobs.items() <= kept.items()
    with pytest.raises(ConfigError, match="correction: has no effect unless the sampler differs"):
        launch.language(
            [flag for flag in argv if "sampler" not in flag and "--out" not in flag]
            + [f"--out={tmp_path / 'other'}"]
        )
