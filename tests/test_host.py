"""Environments of the host: what is recorded, what is trained on, and what happens when they fail.

`Clock` is an environment whose observation counts the steps, so that each number can be told.
"""

import json
import signal

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po import control
from jaxrl_po.algorithms import a2c, npg, ppo, ppo_penalty, reinforce, trpo
from jaxrl_po.config import ConfigError
from jaxrl_po.control import recorded
from jaxrl_po.control.statistics import OBSERVATION_STATISTICS, RETURN_STATISTICS, ROLLING_RETURN
from jaxrl_po.run import earlier, filming, host, pools
from jaxrl_po.run import flags as flags_lib
from jaxrl_po.run import seeds as seeds_lib
from jaxrl_po.run.commands import control as command
from jaxrl_po.run.commands import evaluate, plot, render, report, sweep
from jaxrl_po.run.flags import UsageError
from jaxrl_po.run.pools import PoolError, Source, Stepped

BOX = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)
SEEN = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Clock:
    """Observes its seed and the time; ends by itself at time 3, or is cut there where `cut`."""

    def __init__(self, seeds, cut=False, fault=None):
        self.seeds, self.cut, self.fault = np.array(seeds), cut, fault
        self.time = np.zeros(len(seeds), int)
        self.steps, self.played, self.closed = 0, [], False

    def seen(self):
        return np.stack([self.seeds % 97, self.time], axis=1).astype(np.float64)

    def reset(self):
        self.time[:] = 0
        return self.seen()

    def step(self, action):
        if self.fault is not None:
            self.fault(self)
        self.steps += 1
        self.played.append(np.array(action))
        over = self.time == 3
        self.time = np.where(over, 0, self.time + 1)
        ends = (self.time == 3) & ~over
        reward = np.where(over, 1e6, 1.0 * self.time)  # the reward of no sample
        return Stepped(self.seen(), reward, ends & (not self.cut), ends & self.cut)

    def close(self):
        self.closed = True


def source(made=None, **changes):
    spaces = control.environment.read_spaces("clock", SEEN, BOX)

    def open_pool(seeds):
        pool = pools.Named("clock", Clock(seeds, **changes))
        if made is not None:
            made.append(pool)
        return pool

    return Source("clock", spaces, np.float32, 3, open_pool)


def problem_of(num_envs, num_steps, made=None, statistics=False, **changes):
    where = source(made, **changes)
    settings = control.Settings(
        num_envs=num_envs,
        num_steps=num_steps,
        width=8,
        normalize_observations=statistics,
        scale_rewards=statistics,
    )
    problem = control.recorded_from_settings(where.spaces, settings)
    return host.HostProblem(where, problem, num_envs, num_steps, 2)


def started(hosted, seeds=(0,), algorithm=a2c, config=None):
    learner = algorithm.make(config or algorithm.Config(n=2), hosted.problem)
    stacked = seeds_lib.over_seeds(learner, len(seeds))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.array(seeds))
    return stacked, jax.jit(stacked.init)(keys), host.Rollouts(hosted, 5, seeds)


def ignore(line):
    del line


def test_a_recording_holds_what_the_environments_did():
    made = []
    hosted = problem_of(2, 6, made)
    _, state, rollouts = started(hosted)
    state, recording = rollouts.record(state, ignore)
    time = [0, 1, 2, 3, 0, 1, 2]
    for env in range(2):
        assert recording.observation[0, env, :, 1].tolist() == time
        assert recording.mask[0, env].tolist() == [True, True, True, False, True, True]
        assert recording.terminated[0, env].tolist() == [False, False, True, False, False, False]
        assert recording.reward[0, env].tolist() == [1, 2, 3, 0, 1, 2]
        assert recording.episode_return[0, env, 2] == 6
        assert recording.episode_length[0, env, 2] == 3
    assert not recording.truncated.any()
    # The stored action is the one that was drawn; played is that one in the box's units, clipped.
    played = np.stack(made[0]._pool.played, axis=1)[None]
    np.testing.assert_allclose(played, np.clip(2.0 * recording.action, -2.0, 2.0), rtol=1e-6)
    # The next iteration begins where this one ended.
    _, following = rollouts.record(state, ignore)
    assert following.observation[0, 0, :, 1].tolist() == [2, 3, 0, 1, 2, 3, 0]
    assert following.mask[0, 0].tolist() == [True, False, True, True, True, False]
    assert following.episode_return[0, 0, 0] == 6


@pytest.mark.parametrize("cut", [False, True])
def test_the_batch_bootstraps_from_the_true_final_observation(cut):
    hosted = problem_of(2, 5, cut=cut)
    _, state, rollouts = started(hosted)
    state, recording = rollouts.record(state, ignore)
    one = jax.tree.map(lambda x: jnp.asarray(x[0]), recording)
    of_one = seeds_lib.of_seed(state)
    collector, batch = jax.jit(hosted.problem.collect)(
        of_one.params, of_one.collector.add(sharded={recorded.RECORDING: one}), jax.random.key(0)
    )
    _, value = hosted.problem.apply(of_one.params, one.observation)
    np.testing.assert_allclose(batch.value, value[:, :-1], rtol=1e-6)
    np.testing.assert_allclose(batch.next_value[:, 2], value[:, 3], rtol=1e-6)  # at time 3
    assert batch.truncated[:, 2].all() == cut
    assert batch.terminated[:, 2].all() != cut
    distribution, _ = hosted.problem.apply(of_one.params, batch.inputs)
    np.testing.assert_allclose(batch.log_prob, distribution.log_prob(one.action), rtol=1e-6)
    assert recorded.RECORDING not in collector.sharded
    assert float(batch.metrics["episode_return"].metric()) == 6.0
    assert float(batch.metrics["episode_return"].count) == 2.0
    assert float(batch.metrics["frac_nonfinite"].metric()) == 0.0


EPOCHS = {"num_minibatches": 2, "num_epochs": 2}
SIZES = {"a2c": {}, "ppo": EPOCHS, "ppo_penalty": EPOCHS}


def last_name(module):
    return module.__name__.rpartition(".")[2]


@pytest.mark.parametrize("algorithm", [reinforce, a2c, npg, trpo, ppo, ppo_penalty], ids=last_name)
def test_a_slot_that_holds_no_sample_changes_nothing(algorithm):
    name = last_name(algorithm)
    hosted = problem_of(2, 6, statistics=True)
    config = algorithm.Config(**SIZES.get(name, {"value_minibatches": 2, "value_epochs": 2}))
    learner, state, rollouts = started(hosted, algorithm=algorithm, config=config)
    state, recording = rollouts.record(state, ignore)
    hidden = ~recording.mask

    def garbage(x, value):
        return np.where(hidden.reshape(*hidden.shape, *[1] * (x.ndim - 3)), value, x)

    changed = recording._replace(action=garbage(recording.action, np.float32(37.0)))
    step = jax.jit(lambda state, recording: learner.step(recorded.with_recording(state, recording)))
    plain, other = (step(state, each)[0] for each in (recording, changed))
    jax.tree.map(np.testing.assert_array_equal, plain.params, other.params)
    assert np.all(np.isfinite(jax.tree.leaves(plain.params.policy)[0]))


def test_statistics_are_those_of_the_samples():
    hosted = problem_of(2, 6, statistics=True)
    learner, state, rollouts = started(hosted)
    state, recording = rollouts.record(state, ignore)
    after = jax.jit(learner.sample)(recorded.with_recording(state, recording))[0]
    kept = recording.observation[0, :, :-1][recording.mask[0]]
    found = jax.tree.map(lambda x: x[0], after.collector.replicated[OBSERVATION_STATISTICS])
    assert float(found.seen) == 10
    np.testing.assert_allclose(found.mean, kept.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.std(), kept.std(axis=0), rtol=1e-4, atol=1e-5)
    rolling = [1.0, 2.99, 5.9601]
    rolling = [rolling + rolling[:2]] * 2
    returns = jax.tree.map(lambda x: x[0], after.collector.replicated[RETURN_STATISTICS])
    np.testing.assert_allclose(returns.mean, np.mean(rolling), rtol=1e-5)
    np.testing.assert_allclose(after.collector.sharded[ROLLING_RETURN], [[2.99, 2.99]], rtol=1e-5)


def test_a_reward_that_is_not_finite_is_counted_and_its_update_skipped():
    lines, made = [], []
    hosted = problem_of(2, 4, made, statistics=True)
    learner, state, rollouts = started(hosted, (0, 7))
    state, recording = rollouts.record(state, lines.append)
    bad = recording._replace(reward=recording.reward.copy())
    bad.reward[1, 1, 1] = np.nan
    rollouts._report_nonfinite(bad, lines.append)
    rollouts._report_nonfinite(bad, lines.append)
    assert len(lines) == 1
    assert "environment 1 of seed 7" in lines[0]
    step = jax.jit(lambda state, recording: learner.step(recorded.with_recording(state, recording)))
    after, metrics = step(state, bad)
    for before, now in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True
    ):
        assert np.any(before[0] != now[0])
        np.testing.assert_array_equal(before[1], now[1])
    np.testing.assert_array_equal(metrics["skipped"].metric(), [0.0, 1.0])
    np.testing.assert_allclose(metrics["frac_nonfinite"].metric(), [0.0, 1.0 / 6.0])
    for leaf in jax.tree.leaves(after.collector):
        assert np.all(np.isfinite(leaf))
    # The next good iteration is trained on again.
    later, metrics = step(after, recording)
    np.testing.assert_array_equal(metrics["skipped"].metric(), [0.0, 0.0])
    assert np.all(np.isfinite(jax.tree.leaves(later.params)[0]))


@pytest.mark.parametrize("normalised", [False, True])
def test_an_observation_that_is_not_finite_spoils_its_update_and_nothing_else(normalised):
    hosted = problem_of(2, 6, statistics=normalised)
    learner, state, rollouts = started(hosted)
    state, recording = rollouts.record(state, ignore)
    step = jax.jit(lambda state, recording: learner.step(recorded.with_recording(state, recording)))

    def with_value(t, value):
        observation = recording.observation.copy()
        observation[0, 1, t, 0] = value
        return step(state, recording._replace(observation=observation))

    after, metrics = with_value(2, np.inf)
    assert float(metrics["skipped"].metric()[0]) == 1.0
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after.collector))
    # The value of a terminal state is not used, and the policy does not act on it.
    after, metrics = with_value(3, np.nan)
    assert float(metrics["skipped"].metric()[0]) == 0.0
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after.params))


def test_further_seeds_leave_the_environments_of_the_first_as_they_are():
    made = []
    hosted = problem_of(2, 4, made)
    alone, both = (started(hosted, seeds)[2] for seeds in ((0,), (0, 1)))
    for rollouts, seeds in ((alone, (0,)), (both, (0, 1))):
        rollouts.record(started(hosted, seeds)[1], ignore)
    first, second = (pool._pool.seeds.tolist() for pool in made)
    assert second[:2] == first
    assert len(set(second)) == 4


def test_vmapped_seeds_equal_a_loop():
    hosted = problem_of(2, 5, statistics=True)
    config = ppo.Config(num_minibatches=2, num_epochs=1)

    def run(seeds):
        learner, state, rollouts = started(hosted, seeds, ppo, config)
        step = jax.jit(lambda s, recording: learner.step(recorded.with_recording(s, recording)))
        for _ in range(2):
            state = step(*rollouts.record(state, ignore))[0]
        return state

    both = run((0, 3))
    for i, seed in enumerate((0, 3)):
        jax.tree.map(
            lambda x, y, i=i: np.testing.assert_allclose(x[i], y[0], rtol=2e-4, atol=2e-5),
            both._replace(key=None),
            run((seed,))._replace(key=None),
        )


def test_a_greedy_evaluation_plays_the_same_whole_episodes_each_time():
    made = []
    hosted = problem_of(2, 4, made)
    _, state, rollouts = started(hosted, (0, 1))
    found = [rollouts.evaluate(state) for _ in range(2)]
    for each in found:
        np.testing.assert_array_equal(each["greedy_return"], np.full((2, 2), 6.0))
        np.testing.assert_array_equal(each["greedy_length"], np.full((2, 2), 3.0))
    first, second = (pool._pool.seeds.tolist() for pool in made)
    assert first == second
    assert first[:2] == first[2:]  # every seed of the run plays the same episodes
    rollouts.evaluate(state, 5)  # later, with the seed that the run had
    assert not set(made[-1]._pool.seeds) & set(first)
    assert all(pool._pool.closed for pool in made)


def test_without_a_recording_the_program_says_what_is_missing():
    hosted = problem_of(2, 4)
    learner, state, _ = started(hosted)
    with pytest.raises(ConfigError, match="recording must be put into the state"):
        jax.eval_shape(learner.sample, state)


TINY = [
    "--algorithm=ppo",
    "--seeds=2",
    "--devices=2",
    "--total_steps=320",
    "--log_every=3",
    "--eval_every=2",
    "--eval_episodes=2",
    "--problem.num_envs=2",
    "--problem.num_steps=16",
    "--problem.width=8",
    "--problem.normalize_observations",
    "--config.num_minibatches=2",
    "--config.num_epochs=1",
]


class Fragile(gymnasium.Env):
    """Raises at its n-th step, counted over all of its environments."""

    observation_space, action_space = SEEN, gymnasium.spaces.Discrete(2)
    left = 10**9

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        type(self).left -= 1
        if type(self).left < 0:
            raise RuntimeError("the motor is\n hot")
        return np.full(2, float(action), np.float32), float(action), False, False, {}


class Endless(gymnasium.Env):
    """Classes that do not begin at 0, and no time limit of its own."""

    observation_space = gymnasium.spaces.Discrete(4, start=2)
    action_space = gymnasium.spaces.Discrete(3, start=-1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 2, {}

    def step(self, action):
        assert self.action_space.contains(action)
        return 4, float(action), False, False, {}


gymnasium.register("Endless-v0", entry_point=Endless)
gymnasium.register("Fragile-v0", entry_point=Fragile, max_episode_steps=4)


def test_a_run_whose_environment_raises_ends_saved_and_continues(tmp_path, capsys, monkeypatch):
    out, flags = tmp_path / "r", ["--env=gymnasium:Fragile-v0", *TINY]
    # Four environments for 16 steps make an iteration; the first evaluation takes 16 steps.
    monkeypatch.setattr(Fragile, "left", 4 * 16 * 4 + 16 + 40)
    assert command.main([*flags, f"--out={out}"]) == 1
    error = capsys.readouterr().err
    assert "error: env gymnasium:Fragile-v0: RuntimeError: the motor is hot" in error
    assert "saved at iteration" in error
    saved = int(error.split("saved at iteration ")[1].split()[0])
    assert saved == 5  # within the second chunk of three
    before = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in before] == [0, 3, 5]
    assert before[-1]["updates"] == before[1]["updates"]
    monkeypatch.setattr(Fragile, "left", 10**9)
    assert command.main([f"--out={out}", "--resume"]) == 0
    text = capsys.readouterr()
    assert "environments begin new episodes" in text.out + text.err
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["iteration"] == 10
    assert [row["iteration"] for row in rows] == [0, 3, 5, 6, 9, 10]
    # Every completed episode was cut at its limit, and sums what its actions paid.
    assert rows[-1]["episode_length"] == [4.0, 4.0]


def test_a_run_whose_evaluation_fails_ends_saved(tmp_path, capsys, monkeypatch):
    evaluate_well, calls = host.Rollouts.evaluate, []

    def evaluate(self, state, later_seed=None):
        calls.append(state)
        if len(calls) == 2:
            raise PoolError("env gymnasium:Fragile-v0: OSError: no process")
        return evaluate_well(self, state, later_seed)

    monkeypatch.setattr(host.Rollouts, "evaluate", evaluate)
    out = tmp_path / "r"
    flags = ["--env=gymnasium:Fragile-v0", *TINY, "--checkpoint_every=9", f"--out={out}"]
    assert command.main(flags) == 1
    assert "saved at iteration 6" in capsys.readouterr().err
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 3, 6]
    assert "greedy_return" not in rows[-1]
    assert command.main([f"--out={out}", "--resume"]) == 0


def test_a_failure_outside_training_is_one_line(capsys, monkeypatch):
    def main(argv):
        raise PoolError("env clock: ValueError: no fuel")

    monkeypatch.setattr("sys.argv", ["evaluate"])
    with pytest.raises(SystemExit) as stop:
        flags_lib.entry(main)
    assert stop.value.code == 1
    assert capsys.readouterr().err == "error: env clock: ValueError: no fuel\n"


@pytest.fixture(scope="module")
def cart_pole(tmp_path_factory):
    out = tmp_path_factory.mktemp("host") / "cart_pole"
    assert command.main(["--env=gymnasium:CartPole-v1", *TINY, f"--out={out}"]) == 0
    return out


def test_the_commands_work_on_a_run_unchanged(cart_pole, capsys, tmp_path, monkeypatch):
    rows = [json.loads(line) for line in (cart_pole / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 3, 6, 9, 10]
    assert all(np.isfinite(rows[-1]["greedy_return"]))
    assert evaluate.main([f"--run={cart_pole}", "--size=3"]) == 0
    found = json.loads((cart_pole / "evaluation.json").read_text())
    assert len(found["greedy_return"]) == 2
    assert plot.main([str(cart_pole), f"--out={tmp_path / 'p'}"]) == 0
    assert report.main([str(cart_pole), f"--out={tmp_path / 'r.html'}"]) == 0
    monkeypatch.setattr(filming, "_camera", lambda *_: (None, "no display"))
    assert render.main([f"--run={cart_pole}", "--max_steps=3", f"--out={tmp_path / 'e.gif'}"]) == 0
    assert "drawn from the observations" in capsys.readouterr().out
    assert (tmp_path / "e.gif").stat().st_size > 0


def test_an_evaluation_of_the_run_is_that_of_the_checkpoint(cart_pole):
    records = earlier.read(command.SCRIPT, "run", str(cart_pole))
    experiment, iteration, state = earlier.state(
        command.SCRIPT, records, "run", str(cart_pole), "latest"
    )
    rows = [json.loads(line) for line in (cart_pole / "metrics.jsonl").read_text().splitlines()]
    assert iteration == rows[-1]["iteration"]
    again = host.Rollouts(experiment.host, records[""].seed, range(2)).evaluate(state)
    np.testing.assert_allclose(again["greedy_return"].mean(axis=1), rows[-1]["greedy_return"])


def test_two_devices_equal_one(cart_pole, tmp_path):
    flags = ["--env=gymnasium:CartPole-v1", *TINY, "--devices=1", f"--out={tmp_path / 'one'}"]
    assert command.main(flags) == 0
    one, two = (
        json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        for out in (tmp_path / "one", cart_pole)
    )
    for name in ("kl", "value_loss", "greedy_return"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-3, atol=1e-5)


def test_a_sweep_trains_all_settings_in_one_pool(tmp_path):
    flags = [flag for flag in TINY if not flag.startswith(("--log_every", "--eval_every"))]
    status = sweep.main(
        [
            "--env=gymnasium:CartPole-v1",
            *flags,
            "--config.learning_rate=1e-9,3e-3",
            "--evaluations=2",
            f"--out={tmp_path / 's'}",
        ]
    )
    assert status == 0
    rows = json.loads((tmp_path / "s" / "sweep.json").read_text())
    by_rate = {row["flags"]["config.learning_rate"]: np.array(row["scores"]) for row in rows}
    assert all(scores.shape == (2, 2) for scores in by_rate.values())
    still = by_rate["1e-9"]
    np.testing.assert_array_equal(still[:, 0], still[:, 1])  # a policy that does not move


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env=gymnasium:CartPol-v1"], "Did you mean: `CartPole`"),
        (["--env=gymnasium:Blackjack-v1"], "observations must be an array"),
        (["--env=gymnasium:CartPole-v1", "--distributed"], "--distributed must be off"),
        (["--env=gymnasium:CartPole-v1", "--deterministic"], "--deterministic must be off"),
        (["--env=gymnasium:CartPole-v1", "--algorithm=grpo"], "--sampling=groups does"),
        (["--env=gymnasium:CartPole-v1", "--sampling=vine"], "--sampling=vine does"),
        (["--env=gymnasium:CartPole-v1", "--env_params=[1]"], "must be a JSON object"),
        (["--env=gymnasium:CartPole-v1", '--env_params={"wings": 2}'], "wings"),
        (["--env=gymnasium:Endless-v0"], "must bound its episodes"),
        (["--env=CartPole-v1", "--env_params={}"], "--env_params is for environments of the host"),
    ],
)
def test_what_cannot_work_is_said_before_anything_compiles(tmp_path, flags, message):
    with pytest.raises(UsageError, match=message):
        command.main([*flags, f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(pools.extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'jaxrl_po\[envpool\]'"):
        pools.find("envpool:HalfCheetah-v4")


def test_classes_need_not_begin_at_zero():
    where = pools.find("gymnasium:Endless-v0", '{"max_episode_steps": 5}')
    assert where.max_steps == 5
    np.testing.assert_array_equal(where.spaces.observe(np.array([2, 4])), np.eye(4)[[0, 2]])
    settings = control.Settings(num_envs=8, num_steps=12, width=8)
    problem = control.recorded_from_settings(where.spaces, settings)
    _, state, rollouts = started(host.HostProblem(where, problem, 8, 12, 1))
    _, recording = rollouts.record(state, ignore)
    kept = recording.mask[0]
    assert set(recording.action[0][kept].tolist()) == {0, 1, 2}
    np.testing.assert_array_equal(recording.reward[0][kept], recording.action[0][kept] - 1.0)
    assert recording.truncated[0, :, 4].all()


SPACES = gymnasium.spaces


@pytest.mark.parametrize(
    ("observations", "actions"),
    [
        (SEEN, SPACES.MultiBinary(4)),
        (SEEN, SPACES.MultiDiscrete([2, 2])),
        (SEEN, SPACES.Box(0, 255, (2,), np.uint8)),
        (SPACES.MultiBinary(4), BOX),
        (SPACES.Dict({"eye": SEEN}), BOX),
    ],
)
def test_spaces_that_cannot_be_handled_are_named(observations, actions):
    with pytest.raises(ConfigError, match=r"env odd: (observations|actions) must be"):
        control.environment.read_spaces("odd", observations, actions)


def test_no_limit_is_none_and_not_a_number():
    assert pools.find("gymnasium:CartPole-v1", '{"max_episode_steps": -1}').max_steps is None
    pytest.importorskip("envpool")
    assert pools.find("envpool:CliffWalking-v0").max_steps is None


def test_pictures_are_of_the_environment_that_was_trained_on():
    pytest.importorskip("envpool")
    arguments = '{"max_episode_steps": 7}'
    where = pools.find("envpool:CartPole-v1", arguments)
    camera, why = filming._camera(where, arguments, 0)
    assert camera is None
    assert "arguments of envpool" in why


def test_gymnasium_gives_true_final_observations():
    pool = pools.find("gymnasium:CartPole-v1").open([3, 4])
    seen, action = pool.reset(), np.array([1, 1])
    for _ in range(30):
        before, stepped = seen, pool.step(action)
        seen = stepped.observation
        if stepped.terminated[0]:
            break
    assert abs(seen[0, 2]) > 0.2  # the pole has fallen: not the first observation of an episode
    assert np.all(np.abs(seen[0] - before[0]) < 1.5)
    following = pool.step(action)
    assert np.all(np.abs(following.observation[0]) <= 0.05)
    assert following.reward[0] == 0
    pool.close()


def test_envpool_gives_true_final_observations():
    pytest.importorskip("envpool")
    where = pools.find("envpool:CartPole-v1", '{"max_episode_steps": 7}')
    assert where.max_steps == 7
    pool = where.open([3, 4])
    pool.reset()
    for _ in range(7):
        stepped = pool.step(np.array([0, 1]))
    assert stepped.truncated.all()
    assert not stepped.terminated.any()
    assert np.all(np.abs(stepped.observation[:, 1]) > 0.5)  # pushed seven times in one direction
    following = pool.step(np.array([0, 1]))
    assert np.all(np.abs(following.observation) <= 0.05)
    again = where.open([4]).reset()
    np.testing.assert_array_equal(again[0], where.open([3, 4]).reset()[1])
    pool.close()


def test_envpool_refuses_what_it_does_not_have():
    pytest.importorskip("envpool")
    with pytest.raises(UsageError, match="did you mean envpool:Hopper-v"):
        pools.find("envpool:Hoper-v4")
    with pytest.raises(UsageError, match="wings"):
        pools.find("envpool:CartPole-v1", '{"wings": 2}')
    with pytest.raises(UsageError, match="seed is chosen by the run"):
        pools.find("envpool:CartPole-v1", '{"seed": 2}')


def test_frames_of_atari_come_with_their_channels_last():
    pytest.importorskip("envpool")
    where = pools.find("envpool:Pong-v5")
    assert where.spaces.observation_shape == (84, 84, 4)
    pool = where.open([1])
    frame = pool.reset()
    assert frame.shape == (1, 84, 84, 4)
    assert frame.dtype == np.uint8
    hosted = host.HostProblem(
        where,
        control.recorded_from_settings(
            where.spaces, control.Settings(num_envs=1, num_steps=2, width=8)
        ),
        1,
        2,
        1,
    )
    learner, state, rollouts = started(hosted)
    state, recording = rollouts.record(state, ignore)
    assert recording.observation.dtype == np.uint8
    step = jax.jit(lambda s, recording: learner.step(recorded.with_recording(s, recording)))
    state, metrics = step(state, recording)
    assert float(metrics["skipped"].metric()[0]) == 0.0


@pytest.mark.parametrize(("algorithm", "target"), [("ppo", 900.0), ("trpo", 900.0)])
def test_inverted_pendulum_is_learned(tmp_path, algorithm, target):
    pytest.importorskip("envpool")
    out = tmp_path / "run"
    status = command.main(
        [
            f"--algorithm={algorithm}",
            "--env=envpool:InvertedPendulum-v4",
            "--seeds=2",
            "--devices=1",
            "--total_steps=60000",
            "--problem.num_envs=8",
            "--problem.num_steps=256",
            "--eval_every=100",
            "--eval_episodes=4",
            f"--out={out}",
        ]
    )
    assert status == 0
    assert min(json.loads((out / "summary.json").read_text())["greedy_return"]) >= target


def test_a_signal_ends_the_run_saved(tmp_path, monkeypatch):
    out, steps = tmp_path / "r", []

    def step(self, action):
        steps.append(action)
        if len(steps) == 400:
            signal.raise_signal(signal.SIGINT)
        return np.zeros(2, np.float32), 0.0, False, False, {}

    monkeypatch.setattr(Fragile, "step", step)
    assert command.main(["--env=gymnasium:Fragile-v0", *TINY, f"--out={out}"]) == 0
    assert not (out / "summary.json").exists()
    assert any((out / "checkpoints" / "latest").iterdir())


def test_pool_errors_name_the_environment():
    def fault(clock):
        raise ValueError("no\n fuel")

    pool = source(fault=fault).open([1])
    with pytest.raises(PoolError, match="env clock: ValueError: no fuel"):
        pool.step(np.zeros((1, 1)))
