"""Tests population-based training: exploits alone, in the program of a sweep, and their files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import populations as study
import pytest
import tiny
from finished import SWEEP
from probes import one_piece
from toy_run import start_of

from jaxrl_po import config, population, run
from jaxrl_po.config import ConfigError
from jaxrl_po.masked import Mean
from jaxrl_po.population import Space
from jaxrl_po.run.devices.seeds import select_seed
from jaxrl_po.run.experiment import (
    control,
    earlier,
    language,
    populations,
    search_space,
    settings,
    sweeping,
)
from jaxrl_po.run.experiment.experiment import read_experiment
from jaxrl_po.run.experiment.prepare import prepare
from jaxrl_po.run.figures.plotting import Series
from jaxrl_po.run.loop import runner
from jaxrl_po.run.loop.job import Display, Evaluation, Layout, Length, build_job
from jaxrl_po.run.loop.progress import Progress
from jaxrl_po.run.store.metrics import read
from jaxrl_po.types import ActorCritic

DRAWS, SEEDS = 10, 2
STRIDES = np.linspace(0.6, 1.9, DRAWS)
SPACE = Space({"stride": (0.5, 2.0)}, {"sign": (-1.0, 1.0)})


@config.record
class Stride:
    """Settings of a walk."""

    stride: float = config.number(1.0, "its step")
    sign: float = config.number(1.0, "factor of its step")
    other: float = config.number(3.0, "a number that is not drawn")


def walk(method):
    """Returns a learner whose policy sums its steps, with an erratic return."""

    def step(state):
        policy = state.params.policy + method.stride * method.sign
        value = jnp.sin(777.7 * (policy[0] + method.stride) + 7.0 * state.step)
        params = state.params._replace(policy=policy)
        metrics = {"episode_return": Mean(value * method.stride, method.stride)}
        return state._replace(params=params, step=state.step + 1), metrics

    def init(key):
        zero = jnp.zeros_like(start_of(key, 1).params.policy)
        return start_of(key, 1)._replace(params=ActorCritic(zero, frozen=jnp.float32(1.0)))

    return one_piece(init, step)


def walks(options, devices="1", exploits=True):
    job = build_job(
        walk(Stride()),
        Layout(sweeping.place_runs(dataclasses.replace(options, devices=devices), DRAWS)),
        Length(8, 10),
        seed=0,
        methods=[Stride(stride=float(stride)) for stride in STRIDES],
        learner_of=walk,
        evaluation=Evaluation(lambda params, *_: {"score": params.policy}, score="score"),
        display=Display(curves=[Series("episode_return", "training")]),
    )
    return populations.with_exploits(job, options, SPACE) if exploits else job


def asked(**more):
    given = {"seeds": SEEDS, "draws": DRAWS, "exploit_every": 2, "evaluations": 2}
    return search_space.ControlSweep(**{**given, **more})


@pytest.mark.parametrize(("size", "fifth"), [(2, 1), (4, 1), (9, 1), (10, 2), (16, 3)])
def test_lowest_fifth_copies_from_highest_fifth(size, fifth):
    score = jax.random.normal(jax.random.key(0), (size,))
    keys = jax.random.split(jax.random.key(1), 50)
    parents = np.asarray(jax.vmap(population.select_parents, (None, 0))(score, keys))
    ranked = np.argsort(score)
    rest = ranked[fifth:]
    np.testing.assert_array_equal(parents[:, rest], np.tile(rest, (50, 1)))
    assert set(parents[:, ranked[:fifth]].ravel()) == set(ranked[-fifth:])


@pytest.mark.parametrize(
    ("score", "parents"),
    [
        ([3.0, np.nan, -np.inf], [0, 0, 2]),
        ([np.nan, np.nan, np.nan], [0, 1, 2]),
    ],
)
def test_members_without_score_rank_lowest(score, parents):
    found = population.select_parents(jnp.array(score), jax.random.key(0))
    assert found.tolist() == parents


def test_a_population_has_two_members():
    with pytest.raises(ConfigError, match="at least 2 members, got 1"):
        population.select_parents(jnp.zeros(1), jax.random.key(0))


def test_settings_are_perturbed_within_bounds():
    values = {
        "rate": jnp.array([0.1, 0.5, 0.9] * 40),
        "sign": jnp.full(120, 5.0),
        "kept": jnp.arange(120.0),
    }
    space = Space({"rate": (0.09, 1.0)}, {"sign": (-1.0, 1.0)})
    after = population.perturb(values, space, jax.random.key(0))
    rates = after["rate"].reshape(40, 3).T
    for found, ends in zip(rates, [(0.09, 0.12), (0.4, 0.6), (0.72, 1.0)], strict=True):
        np.testing.assert_allclose(np.unique(found), ends, rtol=1e-6)
    assert set(after["sign"].tolist()) == {-1.0, 1.0}
    np.testing.assert_array_equal(after["kept"], values["kept"])


@pytest.mark.parametrize("raw", [False, True])
def test_exploit_copies_all_but_key_and_frozen(raw):
    keys = jax.random.split(jax.random.key(0), 5)
    keys, key = jax.tree.map(
        lambda x: jax.random.key_data(x) if raw else x, (keys, jax.random.key(1))
    )
    before = jax.vmap(lambda key: start_of(key, 3))(jax.random.split(jax.random.key(2), 5))
    before = before._replace(
        params=before.params._replace(frozen=jnp.ones(3), constants=jnp.arange(5.0)),
        opt_state=jnp.arange(10.0).reshape(5, 2),
        reference_params=jnp.arange(5.0),
        key=keys,
    )
    values = {"stride": jnp.ones(5), "sign": jnp.ones(5)}
    score = jnp.array([2.0, 0.0, 1.0, 9.0, 3.0])
    after, changed, parents = population.exploit(before, values, score, SPACE, key)
    assert parents.tolist() == [0, 3, 2, 3, 4]
    copied = jax.tree.map(lambda x: x[parents], before.with_frozen(None))
    pair = after.with_frozen(None)._replace(key=0), copied._replace(key=0)
    assert all(map(np.array_equal, *map(jax.tree.leaves, pair)))
    np.testing.assert_array_equal(after.params.frozen, jnp.ones(3))
    own, then = (np.asarray(x if raw else jax.random.key_data(x)) for x in (keys, after.key))
    kept = (own == then).all(axis=1)
    assert kept.tolist() == [True, False, True, True, True]
    assert not (then[1] == own).all(axis=1).any()
    assert changed["stride"][1] in np.float32([0.8, 1.2])
    assert changed["stride"][jnp.array([0, 2, 3, 4])].tolist() == [1.0] * 4


def test_perturbed_penalty_scales_its_adaptive_coefficient():
    state = jax.vmap(lambda key: start_of(key, 1))(jax.random.split(jax.random.key(0), 3))
    state = state._replace(kl_coefficient=jnp.array([8.0, 4.0, 6.0]))
    values = {"kl_coefficient": jnp.array([2.0, 3.0, 1.0])}
    space = Space({"kl_coefficient": (0.1, 10.0)})
    score = jnp.array([0.0, 2.0, 1.0])
    after, changed, _ = population.exploit(state, values, score, space, jax.random.key(1))
    factor = changed["kl_coefficient"][0] / 3.0
    assert factor != 1.0
    np.testing.assert_allclose(after.kl_coefficient, [4.0 * factor, 4.0, 6.0], rtol=1e-6)


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """Returns job, folder, lines and outcome of a population of walks."""
    options, out = asked(), tmp_path_factory.mktemp("walks") / "run"
    job = walks(options)
    _, outcome = sweeping.train_group(job, options, out, "walks")
    return job, out, [row for row in read(out / runner.METRICS) if row["iteration"]], outcome


def test_walks_exploit_by_pooled_return(walked):
    """Parents, settings and policies follow from the returns of the stretch before."""
    _, out, lines, outcome = walked
    flags = {x: f"population/config.{x}" for x in ("stride", "sign")}
    returns, parents, strides, signs = (
        np.array([line[name] for line in lines]).reshape(4, DRAWS, SEEDS)
        for name in ("episode_return", "population/parent", *flags.values())
    )
    seed = np.arange(SEEDS)
    policy = 2 * strides[0]
    np.testing.assert_allclose(strides[0], np.tile(STRIDES[:, None], SEEDS), rtol=1e-6)
    np.testing.assert_array_equal(parents[0], np.arange(DRAWS * SEEDS).reshape(DRAWS, SEEDS))
    for i in range(1, 4):
        parent, own_seed = np.divmod(parents[i].astype(int), SEEDS)
        np.testing.assert_array_equal(own_seed, np.tile(seed, (DRAWS, 1)))
        ranked = np.argsort(returns[i - 1], axis=0)
        replaced = parent != np.arange(DRAWS)[:, None]
        for s in seed:
            assert set(np.flatnonzero(replaced[:, s])) == set(ranked[:2, s])
            assert set(parent[replaced[:, s], s]) <= set(ranked[-2:, s])
        of_parent = strides[i - 1][parent, seed]
        factor = np.where(strides[i] > of_parent, 1.2, 0.8)
        new = np.clip(of_parent * factor, 0.5, 2.0)
        np.testing.assert_allclose(strides[i], np.where(replaced, new, of_parent), rtol=1e-6)
        assert (signs[i] == signs[i - 1][parent, seed])[~replaced].all()
        policy = policy[parent, seed] + 2 * strides[i] * signs[i]
        if i % 2:
            np.testing.assert_allclose(
                np.reshape(lines[i]["score"], policy.shape), policy, rtol=1e-5
            )
    assert (signs == -1.0).any()
    record = outcome.state.opt_state[1][0]
    np.testing.assert_array_equal(record.other, np.full(DRAWS * SEEDS, 3.0))
    keys = jax.random.key_data(outcome.state.key)
    assert len(np.unique(keys, axis=0)) > SEEDS
    history = populations.read_history(out / runner.METRICS, "score", SPACE)
    np.testing.assert_allclose(history.scores[:, 1], policy.ravel(), rtol=1e-5)
    earlier = parents[3].astype(int).ravel()
    earlier = parents[2].astype(int).ravel()[earlier]
    np.testing.assert_array_equal(history.ancestor[:, 1], earlier)
    np.testing.assert_array_equal(history.scores[:, 0], np.array(lines[1]["score"])[earlier])
    lineage = history.lineages(SEEDS)[3]
    assert lineage["draw"] == 3
    assert lineage["steps"] == [20, 40, 60, 80]
    np.testing.assert_array_equal(np.array(lineage["parents"]).T, parents[:, 3] // SEEDS)
    np.testing.assert_array_equal(np.array(lineage["values"]["config.stride"]).T, strides[:, 3])


def states_of(job, iterations):
    """Returns the state of a job after some iterations, as arrays."""
    state, step = jax.jit(job.learner.init)(job.start), jax.jit(job.learner.step)
    for _ in range(iterations):
        state, _ = step(state)
    return state


def arrays(state):
    keys = jax.random.key_data(state.key)
    return [np.asarray(x) for x in jax.tree.leaves(state._replace(key=keys))]


def test_population_equals_its_sweep_until_exploit():
    """Two iterations are equal; the third, whose members have new parents, differs."""
    plain, evolved = walks(asked(), exploits=False), walks(asked())
    for iterations, same in ((2, True), (3, False)):
        before, after = states_of(plain, iterations), states_of(evolved, iterations)
        after = after._replace(opt_state=after.opt_state[1])
        assert all(map(np.array_equal, *map(arrays, (before, after)))) is same


def test_exploits_are_equal_on_eight_devices():
    options = asked(seeds=4)
    alone, spread = (states_of(walks(options, devices), 7) for devices in ("1", "8"))
    assert len(spread.params.policy.sharding.device_set) == 8
    assert all(map(np.array_equal, *map(arrays, (alone, spread))))


def test_exploits_may_go_by_evaluation():
    state = states_of(walks(asked(exploit_by="evaluation")), 3)
    score = 2.0 * STRIDES  # of every seed, after two iterations
    parent = np.asarray(state.opt_state[0].parent).reshape(DRAWS, SEEDS) // SEEDS
    replaced = parent != np.arange(DRAWS)[:, None]
    for s in range(SEEDS):
        assert set(np.flatnonzero(replaced[:, s])) == set(np.argsort(score)[:2])
        assert set(parent[replaced[:, s], s]) <= set(np.argsort(score)[-2:])


def texts(argv):
    return {x.lstrip("-"): search_space.flags.FlagText(y) for x, y in (a.split("=") for a in argv)}


METHODS = [
    ("ppo", "config.learning_rate", "log_uniform(1e-4,1e-1)"),
    pytest.param("trpo", "config.max_kl", "log_uniform(1e-4,1e-1)", marks=pytest.mark.slow),
    pytest.param("grpo", "config.learning_rate", "log_uniform(1e-4,1e-1)", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "name", "draw"), METHODS)
def test_resumed_populations_equal_uninterrupted_ones(tmp_path, method, name, draw):
    domain = language if method == "grpo" else control
    argv = tiny.LANGUAGE if method == "grpo" else tiny.SWEPT
    left_out = ("--total_steps", *(["--config.num_"] if method == "trpo" else []))
    argv = [flag for flag in argv if not flag.startswith(left_out)]
    given = texts([*argv, f"--algorithm={method}", f"--out={tmp_path}", "--draws=4"])
    given |= texts(["--exploit_every=2", f"--total_steps={6 * (8 if method == 'grpo' else 32)}"])
    given[name] = search_space.flags.FlagText(draw)
    options = settings.options_of(search_space.RECORDS[domain.NAME], given)
    spec = search_space.parse(domain, given, options)
    found = search_space.combinations(spec, 4, 0)
    space = populations.space_of(domain, spec, found[0])
    (group,) = sweeping.group(domain, spec, found)
    job = sweeping.build_group(domain, [each for _, each in group], options, space)
    steps = job.length.steps_per_iteration
    ended = []
    for place, lengths in (("whole", [6]), ("cut", [3, 6])):
        (tmp_path / place).mkdir()
        for iterations in lengths:
            of_length = dataclasses.replace(job, length=Length(iterations, steps, 2))
            with Progress("", 0, num_seeds=8, quiet=True) as progress:
                outcome = runner.run(of_length, tmp_path / place, progress, resume=True)
        ended.append(arrays(outcome.state))
    assert all(map(np.array_equal, *ended))
    parent = outcome.state.opt_state[0].parent
    assert parent.tolist() != list(range(8))


SMALL = [flag for flag in SWEEP if not flag.startswith(("--config.learning_rate", "--evaluations"))]
RATE = {"config.learning_rate": search_space.flags.FlagText("log_uniform(1e-4,1e-1)")}


def experiment(out, **more):
    keywords = {x: json.loads(y) for x, y in texts(SMALL).items()}
    return run.Experiment(**{"env": "CartPole-v1", "out": out, **keywords, **more})


@pytest.mark.slow
def test_best_member_is_a_run(tmp_path, monkeypatch, capsys):
    saved = []
    save = populations.save_best
    monkeypatch.setattr(populations, "save_best", lambda *of: saved.append(of) or save(*of))
    coin = {"config.entropy_coefficient": "choice(0.01,0.02)"}
    swept = run.sweep(experiment(tmp_path, seed=6), over=RATE | coin, draws=5, exploit_every=1)
    rows = json.loads((tmp_path / "sweep.json").read_text())
    assert [len(row["lineage"]["parents"]) for row in rows] == [2] * 5
    assert "no member was replaced" not in capsys.readouterr().out
    *_, state, history, index = saved[0]
    assert 0 < index != history.ancestor[index, 0]  # its lines and settings are not its own
    highest = sweeping.final_scores(history.scores)[index]
    assert highest == max(sweeping.final_scores(row["scores"]).max() for row in rows)
    loaded = run.load(tmp_path)
    assert loaded.iteration == 8
    member = select_seed(state, index)
    assert all(map(np.array_equal, *map(jax.tree.leaves, (loaded.params, member.params))))
    for name in ("config.learning_rate", "config.entropy_coefficient"):
        now = np.asarray(getattr(state.opt_state[1][0], name.split(".")[1]))[index]
        assert loaded.settings[name] == swept.best[name] == pytest.approx(float(now))
    ends = [row["config.learning_rate (end)"] for row in swept.table()]
    assert swept.best["config.learning_rate"] in ends
    assert "config.learning_rate (start)" in (tmp_path / "table.txt").read_text()
    lines = read(tmp_path / search_space.BEST / "metrics.jsonl")
    assert [line["greedy_return"] for line in lines if "greedy_return" in line] == [
        [score] for score in history.scores[index]
    ]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert not (tmp_path / "sweep.png").exists()
    best = str(tmp_path / search_space.BEST)
    again = prepare(control, read_experiment(best, total_steps=320).read())
    at, alone = earlier.state_of(again, "out", best, "latest")
    moments = jax.tree.leaves(alone.opt_state), jax.tree.leaves(member.opt_state[1][1])
    assert at == 8
    assert all(np.array_equal(x[0], y) for x, y in zip(*moments, strict=True))


@pytest.mark.slow
def test_population_without_scores_says_so(tmp_path, capsys):
    """No episode of Pendulum ends in two iterations of 8 steps."""
    pendulum = experiment(tmp_path, env="Pendulum-v1", total_steps=64)
    run.sweep(pendulum, over=RATE, draws=2, exploit_every=1)
    assert "no member was replaced, for want of scores" in capsys.readouterr().out


def test_best_run_decays_with_its_sweep(tmp_path):
    given = texts(["--env=Pendulum-v1", "--draws=2", "--exploit_every=2", f"--out={tmp_path}"])
    given |= texts(["--total_steps=40960"]) | RATE
    spec = search_space.parse(control, given, search_space.ControlSweep(env="Pendulum-v1"))
    assert spec.tuned["config.decay_iterations"] == 488
    first = {"config.learning_rate": "1e-3"}
    made = populations.make_plan(control, spec, first, Space({})).settings
    assert made["config.decay_iterations"] == 20
    assert made["resolved"]["origin"]["config.decay_iterations"] == "tuned"


@pytest.mark.parametrize(
    ("over", "options", "message"),
    [
        (RATE, {"draws": 1}, "draws: must be at least 2 with exploit_every, got 1"),
        (RATE, {"confirm": 2}, "confirm: must be 0 with exploit_every"),
        (RATE, {"exploit_every": 8}, "exploit_every: must be below 8, the iterations"),
        (RATE, {"exploit_every": 0, "exploit_by": "evaluation"}, "exploit_by: has no effect"),
        (RATE, {"exploit_by": "x"}, "exploit_by: must be one of training, evaluation"),
        (RATE | {"config.gamma": [0.9, 0.99]}, {}, "gamma: must have one value with"),
        (RATE | {"config.epsilon_low": "@config.learning_rate"}, {}, "epsilon_low: must have one"),
        ({"network.width": "choice(4,8)"}, {}, "network.width: must have one value"),
        ({"config.learning_rate": "choice(1,a)"}, {}, "learning_rate: must be a number"),
        ({"config.learning_rate": "choice(1,2,3,4,5,6,7,0)"}, {}, "rate: must lie in .*, got 0"),
        ({"config.gamma": "uniform(0.5,1.1)"}, {}, "gamma: must lie in .*, got 1.1"),
    ],
)
def test_unsuitable_population_is_refused(tmp_path, over, options, message):
    options = {"draws": 2, "exploit_every": 2} | options
    with pytest.raises(ConfigError, match=message):
        run.sweep(experiment(tmp_path / "a"), over=over, **options)
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_best_language_member_is_loaded(tmp_path):
    names = ("--total", "--warm_start", "--devices")
    argv = [flag for flag in tiny.LANGUAGE if not flag.startswith(names)]
    keywords = {x: json.loads(y) for x, y in texts(argv).items()}
    addition = run.Experiment(
        task="addition", algorithm="grpo", out=tmp_path, total_steps=40, **keywords
    )
    swept = run.sweep(addition, over=RATE, draws=3, exploit_every=2)
    loaded = run.load(tmp_path)
    assert loaded.settings["config.learning_rate"] == swept.best["config.learning_rate"]
    assert loaded.settings["config.warm_up_iterations"] == 0  # a tenth of five iterations
    assert len(loaded.generate(["1+2="])) == 1


def test_equal_draws_are_members_of_their_own():
    coin = search_space.SweepSpec({"exploit_every": 2}, {}, {"config.gamma": "choice(1,1)"}, {})
    assert len(search_space.combinations(coin, 6, 0)) == 6


def test_study_names_its_tasks(tmp_path):
    with pytest.raises(ConfigError, match=r"tasks: must be among Acrobot-v1, .*, got 'Chess'"):
        study.main(["--tasks=Chess", f"--out={tmp_path}"])


@pytest.mark.slow
def test_study_compares_populations_and_sweeps(tmp_path, capsys):
    sizes = ["--tasks=Acrobot-v1", "--seeds=2", "--draws=5", "--steps=8192", "--exploit_every=2"]
    assert study.main([*sizes, f"--out={tmp_path}"]) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())["Acrobot-v1"]
    assert {arm: len(x) for arm, x in scores.items()} == dict.fromkeys(study.ARMS, 2)
    assert "population − random sweep: " in (tmp_path / "table.txt").read_text()
    assert (tmp_path / "table.txt").read_text() in capsys.readouterr().out
