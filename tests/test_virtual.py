"""`--reproducible`: the same bits on any number of devices and cores."""

import functools
import operator
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scripts import everything, finish, start

from jaxrl_po import masked
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.virtual import VIRTUAL
from jaxrl_po.run.experiment import control, plan
from jaxrl_po.run.experiment.experiment import Experiment
from jaxrl_po.run.store import provenance
from jaxrl_po.run.store.metrics import read

ROWS, WIDTH, STEPS = 16, 24, 4


def descend(w, x, key):
    """Gradient steps, and every kind of communication and of control flow around one."""

    def loss(w, x):
        return (jnp.tanh(x @ w) @ w.T * x).sum() / (VIRTUAL * ROWS)

    def step(carry, key):
        w, seen = carry
        device = jax.lax.axis_index("data")
        noisy = x + jax.random.normal(jax.random.fold_in(key, device), x.shape)
        value, gradient = masked.psum(jax.value_and_grad(loss)(w, noisy), "data")
        return (w - 0.1 * gradient, seen + noisy.sum()), (value, noisy[0])

    keys = jax.random.split(key, STEPS)
    (w, seen), (values, first) = jax.lax.scan(step, (w, jnp.float32(0.0)), keys)
    mean, std = masked.moments(x @ w, axis_name="data")

    def halve(carry):
        trips, w = carry
        return trips + 1, w - 0.5 * masked.psum(x.T @ (x @ w), "data") / (VIRTUAL * ROWS)

    trips, w = jax.lax.while_loop(lambda carry: carry[0] < 3, halve, (0, w))
    both = jax.lax.cond(
        std > 0, lambda: masked.psum(seen, "data"), lambda: jax.lax.pmax(seen, "data")
    )
    everyone = jax.lax.all_gather(x[:, 0], "data", tiled=True)
    return (x - mean) / std, (w, values, both, trips, everyone.sum()), first[None], key


SPECS = (P(), P(None, "data"), P())
RESULTS = (P(None, "data"), P(), P("data"), P())


@functools.cache
def bits(devices, function=descend, in_specs=SPECS, out_specs=RESULTS, turns=True):
    """Of the results on some of the eight devices of this process."""
    placement = Placement(1, 1, VIRTUAL, turns=VIRTUAL // devices if turns else 0)

    def of_device(w, x, key):
        normal, shared, first, key = function(w, x[0], key)
        return normal[None], shared, first, key

    run = jax.jit(parallel.on_devices(of_device, placement, in_specs, out_specs))
    drawn = np.random.default_rng(0).normal(size=(WIDTH + VIRTUAL * ROWS, WIDTH))
    w, x = np.split(drawn.astype(np.float32), [WIDTH])
    *arrays, key = run(w, x[None], jax.random.key(1))
    return [np.asarray(leaf) for leaf in jax.tree.leaves([*arrays, jax.random.key_data(key)])]


@pytest.mark.parametrize("devices", [1, 4])
def test_the_bits_are_those_of_eight_devices(devices):
    for mine, theirs in zip(bits(devices), bits(8), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_what_eight_real_devices_compute_is_computed():
    for virtual, real in zip(bits(8), bits(8, turns=False), strict=True):
        np.testing.assert_allclose(virtual, real, rtol=1e-4, atol=1e-4)


def test_sums_are_taken_from_the_first_virtual_device_to_the_last():
    placement = Placement(1, 1, VIRTUAL, turns=4)
    run = parallel.on_devices(lambda x: masked.psum(x, "data")[0], placement, (P("data"),), P())
    x = np.random.default_rng(0).normal(size=(VIRTUAL, 99)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(run)(x), functools.reduce(operator.add, x))


def test_a_seed_whose_loop_has_ended_stays_as_it_is():
    def of_seed(trips, x):
        def add(carry):
            done, _, x = carry
            total = masked.psum(x.sum(), "data")
            return done + 1, total, x + total * jax.lax.axis_index("data")

        return jax.lax.while_loop(lambda carry: carry[0] < trips, add, (0, 0, x))

    def run(turns):
        placement = Placement(3, 1, VIRTUAL, turns=turns)
        specs, results = (P(), P(None, "data")), (P(), P(), P(None, "data"))
        program = parallel.on_devices(jax.vmap(of_seed), placement, specs, results)
        return jax.jit(program)(jnp.array([2, 0, 3]), jnp.arange(3 * ROWS).reshape(3, ROWS))

    done, total, x = run(4)
    np.testing.assert_array_equal(done, [2, 0, 3])
    for mine, theirs in zip((total, x), run(0)[1:], strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_seeds_before_rows_and_as_many_devices_as_divide():
    choose = functools.partial(parallel.choose, reproducible=True)
    assert choose(2, num_seeds=16, num_rows=64) == Placement(16, VIRTUAL, 1, turns=4)
    rows = choose("auto", num_seeds=3, num_rows=64)
    assert rows == Placement(3, 1, VIRTUAL, turns=1)
    assert rows.axis_name == "data"
    assert rows.num_devices == 8
    assert rows.target == choose(1, num_seeds=3, num_rows=64).target
    with pytest.raises(ConfigError, match=r"devices must be 'auto' or one of 1, 2, 4, 8 with rep"):
        choose(3, num_seeds=3, num_rows=64)
    with pytest.raises(ConfigError, match="or 8 divide the 3 seeds or the 12 rows"):
        choose(1, num_seeds=3, num_rows=12)


@pytest.fixture
def asked(monkeypatch):
    """The backend of the tests, as if it had been asked in time."""
    monkeypatch.setenv(provenance.THREADS, str(VIRTUAL))
    monkeypatch.setenv("XLA_FLAGS", provenance.WHOLE_LOOPS)


@pytest.mark.usefixtures("no_compilation", "asked")
def test_language_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="reproducible: must be off: it is for jaxrl-po control"):
        launch.language(["--reproducible", f"--out={tmp_path}"])


@pytest.mark.usefixtures("no_compilation", "asked")
@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--mesh=data:2"], "mesh: must be left out with reproducible"),
        (["--distributed"], "distributed: must be left out with reproducible"),
        (["--compile_for=cpu:8"], "compile_for: must be left out with reproducible"),
        (["--env=gymnasium:CartPole-v1"], "reproducible: must be off with env=gymnasium"),
        (["--problem.num_envs=9"], "reproducible: must be off, or 8 divide the 1 seeds or the 9"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, flags, match):
    with pytest.raises(ConfigError, match=match):
        launch.control(["--reproducible", "--seeds=1", *flags, f"--out={tmp_path}"])


@pytest.mark.usefixtures("asked")
def test_several_seeds_of_trpo_share_their_rows_out(tmp_path):
    flags = ["--algorithm=trpo", "--reproducible", "--seeds=2", "--problem.num_envs=8"]
    experiment = Experiment.parse(control.SCRIPT, [*flags, f"--out={tmp_path}"])
    job = plan.prepare(control.SCRIPT, experiment.settings).job
    _, metrics = jax.eval_shape(job.learner.step, jax.eval_shape(job.learner.init, job.keys))
    assert {leaf.shape for leaf in jax.tree.leaves(metrics["kl"])} == {(2,)}


def test_threads_are_pinned_before_the_backend_starts(monkeypatch):
    monkeypatch.setenv(provenance.THREADS, "2")
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    with pytest.raises(ConfigError, match="reproducible: must be asked for before JAX") as refused:
        provenance.ask_for_determinism(VIRTUAL)
    monkeypatch.setattr(provenance, "_backend_runs", lambda: False)
    provenance.ask_for_determinism(VIRTUAL)
    assert os.environ[provenance.THREADS] == "8"
    assert provenance.WHOLE_LOOPS in os.environ["XLA_FLAGS"]
    # A run started as the message says can be resumed from the command line: its flags are equal.
    remedy = f"start Python with PJRT_NPROC=8 and XLA_FLAGS='{os.environ['XLA_FLAGS']}' in the"
    assert remedy in str(refused.value)
    provenance.ask_for_determinism(VIRTUAL)
    assert f"'{os.environ['XLA_FLAGS']}'" in remedy


TINY = [
    *("--reproducible", "--seeds=1", "--total_steps=512", "--log_every=2", "--eval_every=4"),
    *("--eval_episodes=2", "--problem.num_envs=8", "--problem.num_steps=8", "--network.width=16"),
    *("--config.num_minibatches=2", "--config.num_epochs=2"),
]


@pytest.fixture
def begun(monkeypatch):
    """`begun(out, *flags, cores=None)`: a run in a process of its own, on some cores."""
    # At the tests' level of optimisation LLVM fuses products and additions here and not there.
    monkeypatch.setenv("XLA_FLAGS", "")

    def begin(out, *flags, cores=None):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores or before)
        try:
            return start("control", *flags, f"--out={out}")
        finally:
            os.sched_setaffinity(0, before)

    return begin


def left(out):
    """Everything that a run left but the memory that its devices needed."""
    rows, *rest = everything(out)
    bare = [{k: v for k, v in row.items() if not k.startswith("memory/")} for row in rows]
    return bare, *rest


@pytest.fixture
def whole(begun):
    """`whole(out, *flags, cores=None)`: everything that a whole run left."""

    def run(out, *flags, cores=None):
        status, _, errors = finish(begun(out, *flags, cores=cores))
        assert status == 0, errors
        return left(out)

    return run


def test_ppo_on_one_core_equals_ppo_on_eight_devices(tmp_path, whole):
    alone = whole(tmp_path / "1", *TINY, "--devices=1", cores=[0])
    assert alone == whole(tmp_path / "8", *TINY, "--devices=8")
    assert len(alone[0]) == 5  # the initial policy, and a line for two iterations each


LONG = {
    "ppo": ["--problem.num_envs=64", "--problem.num_steps=32"],
    "trpo": ["--algorithm=trpo", "--problem.num_envs=64", "--problem.num_steps=128"],
    "grpo": ["--algorithm=grpo", "--problem.num_prompts=16", "--problem.num_steps=32"],
    "eight seeds": ["--seeds=8", "--problem.num_envs=6", "--problem.num_steps=32"],
}
ITERATIONS = {"ppo": 2048, "trpo": 8192, "grpo": 16 * 8 * 32, "eight seeds": 6 * 32}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", LONG)
def test_a_hundred_iterations_are_equal_on_every_layout(tmp_path, whole, name):
    flags = [
        *("--reproducible", "--seeds=1", f"--total_steps={100 * ITERATIONS[name]}"),
        *("--log_every=10", "--eval_every=5", "--eval_episodes=4", *LONG[name]),
    ]
    want = whole(tmp_path / "8", *flags, "--devices=8")
    for devices, cores in ((1, None), (1, [0]), (2, None), (4, [0])):
        out = tmp_path / f"{devices} {cores == [0]}"
        assert whole(out, *flags, f"--devices={devices}", cores=cores) == want


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_that_is_killed_goes_on_on_other_devices(tmp_path, begun, whole):
    flags = [*TINY, "--total_steps=40000", "--log_every=5"]
    want, out = whole(tmp_path / "whole", *flags, "--devices=8"), tmp_path / "killed"
    reached = 0
    for devices, cores in ((2, None), (1, [0]), (4, None)):
        process = begun(out, *flags, "--resume", f"--devices={devices}", cores=cores)
        reached += len(want[0]) // 4
        while process.poll() is None and len(read(out / "metrics.jsonl")) < reached:
            time.sleep(0.002)
        assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert whole(out, "--resume", "--devices=8") == want
