"""Tests settings of a run: one typed config, merged by origin, the same from flags and from
Python."""

import copy
import inspect
import json
import pickle

import pytest
import tiny

from jaxrl_po import ppo, run
from jaxrl_po.cli import launch
from jaxrl_po.config import COUNT, ConfigError, record, static
from jaxrl_po.control import NetworkSettings
from jaxrl_po.run.experiment import control, flags, settings
from jaxrl_po.run.experiment.control_config import ControlOptions
from jaxrl_po.run.experiment.language_config import LanguageOptions


@record
class Sizes:
    """Sizes."""

    a: int = static(0, "first")
    b: int = static(0, "second", when=("a", COUNT))


def merged(**layers):
    layers = {origin: {f"x.{name}": y for name, y in x.items()} for origin, x in layers.items()}
    records, origins = flags.merge_layers({"x": Sizes}, layers)
    return (records["x"].a, records["x"].b), (origins["x.a"], origins["x.b"])


@pytest.mark.parametrize("first", range(4))
def test_first_origin_with_a_value_wins(first):
    origins = ("given", "stored", "tuned", "preset")
    layers = {origin: {"a": i + 1} for i, origin in enumerate(origins) if i >= first}
    assert merged(**layers) == ((first + 1, 0), (origins[first], "default"))


@pytest.mark.parametrize("origin", ["tuned", "preset"])
def test_only_tuned_and_preset_values_lose_effect_silently(origin):
    assert merged(given={"a": 0}, **{origin: {"b": 3}}) == ((0, 0), ("given", "default"))
    for chosen in ("given", "stored"):
        with pytest.raises(ConfigError, match=r"^x\.b: has no effect unless a is above 0"):
            merged(**{chosen: {"a": 0, "b": 3}}, **{origin: {"a": 1}})


def test_untuned_run_has_the_config_of_its_method():
    env = "--env=Pendulum-v1"
    tuned, plain = (
        settings.parse_settings(control, [env, *more]) for more in ([], ["--tuned=false"])
    )
    assert plain.config.method == ppo.Config() != tuned.config.method
    assert not {"tuned", "preset"} & set(plain.origins.values())
    assert plain.tuned == {}
    assert run.Experiment(env="Pendulum-v1", tuned=False).read().config == plain.config
    assert tuned.tuned["config.gamma"] == tuned.config.method.gamma == 0.98


def test_config_json_keeps_origins_of_resumed_runs(tmp_path, written_down):
    out = tmp_path / "run"
    written_down(launch.control, [*tiny.CONTROL, "--config.gamma=0.5", f"--out={out}"])
    begun = json.loads((out / "config.json").read_text())["resolved"]["origin"]
    assert (begun["config.gamma"], begun["config.learning_rate"]) == ("given", "tuned")
    assert "config.lambda_" not in begun
    written_down(launch.control, [f"--out={out}", "--resume", "--total_steps=6400"])
    resumed = json.loads((out / "config.json").read_text())["resolved"]["origin"]
    assert resumed == begun | {"total_steps": "given"}


def test_arguments_and_environment_are_read_once(tmp_path, monkeypatch, written_down):
    calls = []

    def counted(function):
        return lambda *given: calls.append(function.__name__) or function(*given)

    monkeypatch.setattr(flags, "tokenize", counted(flags.tokenize))
    monkeypatch.setattr(control, "open_world", counted(control.open_world))
    written_down(launch.control, [*tiny.CONTROL, f"--out={tmp_path / 'run'}"])
    assert calls == ["tokenize", "open_world"]


def test_flags_keep_the_order_of_arguments():
    argv = ["--config.gamma=0.5", "--noresume", "--env", "Acrobot-v1", "--zzz=1", "--seeds=2"]
    assert list(flags.tokenize(argv, {"": control.OPTIONS}).items()) == [
        *(("config.gamma", "0.5"), ("resume", "false")),
        *(("env", "Acrobot-v1"), ("zzz", "1"), ("seeds", "2")),
    ]


def test_former_names_and_values_are_read():
    sections = {"config": ppo.Config, "network": NetworkSettings}
    stored = {"config.n": 3, "config.gamma": 0.5, "network.std": ["independent", "dependent"]}
    present = flags.current(stored, sections)
    assert list(present) == ["config.n_steps", "config.gamma", "network.state_dependent_std"]
    assert [*present.values()] == [3, 0.5, ["false", "true"]]
    drawn = flags.current({"network.std": "choice(independent,dependent)"}, sections)
    assert drawn == {"network.state_dependent_std": "choice(false,true)"}
    assert flags.current({"network.std": "dependent"}, sections) == {
        "network.state_dependent_std": True
    }


def test_experiment_is_a_value():
    over = {"config.gamma": 0.9}
    made = run.Experiment(env="Pendulum-v1", seeds=4, over=over)
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (other, hash(other)) == (made, hash(made))
    assert made != run.Experiment(env="Pendulum-v1", seeds=3, over=over)
    flags_of = [f"--{name}={value}" for name, value in made.settings.items()]
    assert made.read().config == settings.parse_settings(control, flags_of).config
    params = {"max_steps_in_episode": 7}
    assert run.Experiment(env_params=params).settings["env_params"] == json.dumps(params)


def test_signature_of_an_experiment_has_every_keyword():
    signature = inspect.signature(run.Experiment)
    assert "object at" not in str(signature)
    given = set(signature.parameters) - {"over", "unknown"}
    records = (ControlOptions, LanguageOptions)
    assert given == {field.name for record in records for field in flags.settable(record)}
