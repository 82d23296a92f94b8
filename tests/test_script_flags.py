"""Tests flags of scripts, which are parsed before any compilation."""

import pytest
import tiny
from tables import cases

from jaxrl_po import language as language_lib
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.experiment import control, flags, language, registry, search_space, settings
from jaxrl_po.run.experiment.experiment import Experiment
from jaxrl_po.run.experiment.prepare import prepare

BAD_FLAGS = {
    "control": {
        "--algorithm=pppo": r"algorithm: unknown name 'pppo'; did you mean ppo\?",
        "--env=CartPol-v1": r"env: unknown name 'CartPol-v1'; did you mean CartPole-v1\?",
        f"--env={'a' * 300}": "env: unknown name 'aaa",
        '--env_params={"gravity":"x"}': (
            "env_params: CartPole-v1: gravity must be of type float, got 'x'"
        ),
        "--total_steps=1e30": r"total_steps: must make fewer than 2,147,483,648 .* got 1\d+",
        "--config.learning_rat=1": (
            r"config\.learning_rat: is not a setting; did you mean config\.learning_rate\?"
        ),
        "--problem.temperature=1": r"problem\.temperature: is not a setting",
        "--config.gamma=1.5": r"config\.gamma: must lie in \[0, 1\], got 1\.5",
        "--config.target_kl=0.5": r"config\.target_kl: has no effect unless early_stop is on",
        "--config.num_minibatches=3": (
            r"config\.num_minibatches: must divide the 32 rows, and so must its product with "
            r"num_microbatches, got 3 × 1$"
        ),
        "--problem.num_envs=-4": r"problem\.num_envs: must lie in \[1, inf\), got -4",
        "--network.initial_log_std=0.5": (
            r"network\.initial_log_std: applies to continuous actions only; this environment's are"
        ),
        "--total_steps=31": r"total_steps: must be 0 or at least 32 environment steps, .* got 31",
        "--total_steps=1.5": r"total_steps: must be an integer, got '1.5'",
        "--devices=none": r"devices: must be auto or a positive number, got 'none'",
        "--devices=0": r"devices: must be auto or a positive number, got '0'",
        "--devices=1000": r"devices: must be at most",
        "--devices=auto --mesh=model:2": (
            r"mesh: must have no model axis with jaxrl-po control, got model:2"
        ),
        "--shard_params": r"shard_params: is not a setting",
        "--config.decay_iterations=3": (
            r"config\.decay_iterations: must be 0 or at least 100, .* got 3"
        ),
    },
    "language": {
        f"--init_from={'a' * 300}": r"init_from: must be the folder of a run .* got a+;",
        "--devices=auto --mesh=model:4": (
            r"model\.kv_heads: must be a multiple of 4, the devices of the model .* got 1"
        ),
        "--devices=auto --mesh=model:2 --model.kv_heads=2 --model.mlp_width=9": (
            r"model\.mlp_width: must be a multiple of 2, the devices of the mo.* got 9"
        ),
        "--devices=4 --shard_params --problem.num_prompts=4 --model.width=6 --model.heads=1": (
            r"model\.width: must be a multiple of 4, the devices of the data axis .* got 6"
        ),
        "--coordinator=host:1": r"coordinator: has no effect unless distributed is on",
        "--task=adition": r"task: unknown name 'adition'; did you mean addition\?",
        "--problem.top_k=15": r"problem\.top_k: must be at most 14, the vocabulary, got 15",
        "--env=CartPole-v1": r"env: is not a setting",
        "--task.num_digits=10": r"task\.num_digits: must lie in \[1, 9\] digits, got 10",
        "--problem.max_new_tokens=2": r"problem\.max_new_tokens: must be at least 3",
        "--model.heads=3": r"model\.width: must be a multiple of 2 × heads = 6, got 8",
        "--model.kv_heads=3": r"model\.kv_heads: must divide heads = 2, got 3",
        "--reward=modle": (
            r"reward: must be verifier, model, math, .*functions .* got modle; did you mean mod"
        ),
        "--reward_model.width=8": r"reward_model\.width: is not a setting",
        "--reward=model --preferences.comparisons=100": (
            r"preferences\.batch_size: must divide comparisons = 100"
        ),
        "--reward=model --reward_model.shape=smollm2-135m": (
            r"reward_model\.shape: smollm2-135m has a vocabulary of 49152 and the task one of 14"
        ),
        "--reward=model --problem.process_reward=true": (
            r"problem\.process_reward: has no effect with reward = model"
        ),
        "--warm_start.steps=0 --warm_start.accuracy=0.4": (
            r"warm_start\.accuracy: has no effect unless steps is above 0"
        ),
    },
}


@pytest.mark.usefixtures("no_compilation")
@cases(
    "script, argument, message",
    *[(script, *bad) for script, table in BAD_FLAGS.items() for bad in table.items()],
)
def test_bad_input_leaves_no_folder(tmp_path, capsys, script, argument, message):
    main, small = {
        "control": (launch.control, tiny.CONTROL),
        "language": (launch.language, tiny.LANGUAGE),
    }[script]
    words = argument.split()
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        main([*small, f"--out={tmp_path / 'new'}", *words])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()
    if "is not a setting" not in message:
        flag = f"--{caught.value.field}="
        assert main([*(word for word in words if not word.startswith(flag)), "--help=all"]) == 0
        assert f"  {flag}" in capsys.readouterr().out


def test_a_word_that_is_no_flag_is_named():
    with pytest.raises(UsageError, match=r"^'extra' is not a flag"):
        launch.control([*tiny.CONTROL, "extra"])


@cases(
    "argument, meant",
    ("config.lr", "config.learning_rate"),
    ("clip_ratio", "config.epsilon_high"),
    ("gae_lambda", "config.lambda_"),
    ("config.num_envs", "problem.num_envs"),
    ("n_steps", "config.n_steps"),
    ("problem.n_steps", "problem.num_steps"),
    ("total_timesteps", "total_steps"),
)
def test_names_of_other_libraries_suggest_ours(argument, meant):
    message = f"^{argument}: is not a setting; did you mean {meant}\\?$"
    with pytest.raises(ConfigError, match=message):
        settings.parse_settings(control, [f"--{argument}=1"])


def test_every_other_name_is_of_a_field():
    ppo, grpo = (
        {
            field.name
            for record in settings.sections_of(script, options(algorithm=algorithm)).values()
            for field in flags.settable(record)
        }
        for script, options, algorithm in (
            (control, control.ControlOptions, "ppo"),
            (language, language.LanguageOptions, "grpo"),
        )
    )
    assert set(flags.ALIASES.values()) <= ppo | grpo
    assert not set(flags.ALIASES) & ppo


def test_help_shows_the_common_flags(capsys):
    given = ["--algorithm=ppo", "--help"]
    for command, most in ((launch.control, 30), (launch.language, 40)):
        assert command(given) == 0
        short = capsys.readouterr().out.splitlines()
        assert command([*given, "--help=all"]) == 0
        flag_lines = [
            [line for line in lines if line.startswith("  --")]
            for lines in (short, capsys.readouterr().out.splitlines())
        ]
        assert 20 < len(flag_lines[0]) <= most
        assert set(flag_lines[0]) < set(flag_lines[1])
        rest = len(flag_lines[1]) - len(flag_lines[0])
        assert short[-1].startswith(f"{rest} more flags: jaxrl-po ")
        assert not any(line.startswith("--sampler.") for line in short)  # a heading without flags


def test_help_lists_every_field_with_its_default(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert launch.control(["--help=all"]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    for flag in (
        "--total_steps=500000",
        "--config.learning_rate=0.0003  (tuned: 0.001)",
        "--config.target_kl=0.02",
        "--problem.num_envs=64  (tuned: 16)",
    ):
        assert f"  {flag}\n" in text
    assert "nats" in text


def test_help_of_language_shows_defaults_and_presets(capsys):
    assert launch.language(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  --config.gamma=0.99  (preset: 1.0)" in lines
    assert "  --total_steps=500000  (preset: 131072)" in lines
    assert "  --config.entropy_coefficient=0.0" in lines
    assert launch.language(["-h", "--algorithm=grpo", "--task=random"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  --total_steps=500000  (preset: 204800)" in lines
    assert not any("tuned" in line for line in lines)
    assert launch.control(["--help"]) == 0
    assert "--config.gamma=0.99\n" in capsys.readouterr().out


def test_settings_tuned_for_trajectories_are_not_for_groups():
    def tuned(**changes):
        given = [f"--{name}={value}" for name, value in changes.items()]
        return control.tuned(flags.parse_records(given, {"": control.ControlOptions})[""])

    assert tuned(algorithm="a2c") == tuned(algorithm="a2c", sampling="trajectories") != {}
    assert tuned(algorithm="a2c", sampling="groups") == {}
    assert tuned(algorithm="grpo") == tuned(algorithm="grpo", sampling="groups") != {}


@cases(
    "given, stored, stops",
    ({"network.memory": "transformer"}, {}, True),
    ({"network.memory": "gru"}, {}, False),
    ({"network.memory": "transformer", "config.early_stop": False}, {}, False),
    ({"network.memory": "transformer", "algorithm": "trpo"}, {}, None),
    ({}, {"network.memory": "transformer", "config.early_stop": False}, False),
    ({"network.memory": "transformer", "env": "xminigrid:MiniGrid-MemoryS8"}, {}, True),
)
def test_transformer_memory_stops_early_unless_told(given, stored, stops):
    method = settings.merge_settings(control, given, stored=stored).config.method
    assert getattr(method, "early_stop", None) == stops


def test_a_sweep_has_the_defaults_of_its_memory():
    texts = {"network.memory": "transformer", "config.learning_rate": "1e-3,3e-4"}
    given = {name: flags.FlagText(text) for name, text in texts.items()}
    assert search_space.parse(control, given, search_space.ControlSweep()).tuned[
        "config.early_stop"
    ]


def test_decayed_run_is_not_extended(tmp_path, written_down):
    out = tmp_path / "run"
    decays = [*tiny.CONTROL, "--config.decay_iterations=100", f"--out={out}"]
    written_down(launch.control, decays)
    for arguments in ([], decays):
        longer = [*arguments, "--total_steps=6400", f"--out={out}", "--resume"]
        asked = Experiment.parse(control, longer)
        with pytest.raises(
            ConfigError,
            match=r"^total_steps: must stay as it was, got 6400: .* start another run with more",
        ):
            prepare(control, asked.read())


def test_a_tuned_decay_ends_with_the_run(tmp_path, monkeypatch, written_down):
    built, build = [], control.build

    def spy(config, *arguments):
        built.append(config.method.decay_iterations)
        return build(config, *arguments)

    monkeypatch.setattr(control, "build", spy)
    monkeypatch.setattr(control, "tuned", lambda *_: {"config.decay_iterations": 7})
    for arguments, want in (
        ([], 100),
        (["--total_steps=32"], 1),
        (["--config.decay_iterations=500"], 500),
    ):
        written_down(launch.control, [*tiny.CONTROL, *arguments, f"--out={tmp_path / str(want)}"])
        assert built[-1] == want


@cases(
    "arguments, want",
    # An answer has 3 tokens; the last fifth of 4 tokens, rounded up to 1, is punished.
    (["--algorithm=dapo"], 4),
    (["--algorithm=dapo", "--config.soft_overlong=false"], 3),
    (["--algorithm=dapo", "--problem.max_new_tokens=9"], 9),
    (["--algorithm=grpo"], 3),
)
def test_overlong_shaping_spares_the_longest_right_answer(
    tmp_path, monkeypatch, written_down, arguments, want
):
    asked, make_problem = [], language_lib.make_problem

    def spy(*positional, **named):
        asked.append(named["max_new_tokens"])
        return make_problem(*positional, **named)

    monkeypatch.setattr(language_lib, "make_problem", spy)
    written_down(
        launch.language, ["--task.num_digits=1", "--devices=1", *arguments, f"--out={tmp_path}/run"]
    )
    assert asked == [want]


def test_an_episode_that_lasts_is_not_overlong(tmp_path, monkeypatch, written_down):
    asked, entry = [], registry.METHODS["dapo"]

    def make(config, problem):
        asked.append(config)
        return entry.make(config, problem)

    monkeypatch.setitem(registry.METHODS, "dapo", entry._replace(make=make))
    flags_of_run = ["--algorithm=dapo", "--devices=1", "--total_steps=100000"]
    written_down(launch.control, [*flags_of_run, f"--out={tmp_path / 'run'}"])
    assert (asked[0].soft_overlong, asked[0].overlong_filtering) == (False, False)


@cases(
    "script, arguments",
    ("language", ["--algorithm=grpo", "--warm_start.steps=0"]),
    ("language", ["--algorithm=npg", "--config.estimator=monte_carlo"]),
    ("control", ["--algorithm=trpo", "--env=CartPole-v1", "--config.estimator=monte_carlo"]),
)
def test_default_without_effect_does_not_block_runs(tmp_path, written_down, script, arguments):
    main = {"control": launch.control, "language": launch.language}[script]
    written_down(main, ["--devices=1", *arguments, f"--out={tmp_path / 'run'}"])


def test_resumed_run_names_the_flag_that_differs(tmp_path, written_down):
    out = f"--out={tmp_path / 'language'}"
    written_down(launch.language, [*tiny.LANGUAGE, "--warm_start.accuracy=0.75", out])
    with pytest.raises(
        ConfigError,
        match=r"^warm_start\.steps: must be 2, as in the run .* got 0; leave it out, or choose",
    ):
        launch.language([*tiny.LANGUAGE, out, "--resume", "--warm_start.steps=0"])
    out = f"--out={tmp_path / 'control'}"
    written_down(launch.control, [*tiny.CONTROL, "--config.lambda_=0.5", out])
    with pytest.raises(
        ConfigError,
        match=r"^config\.estimator: must be gae, as in the run .* got monte_carlo; leave",
    ):
        launch.control([*tiny.CONTROL, out, "--resume", "--config.estimator=monte_carlo"])
