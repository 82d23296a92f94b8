import sys

import pytest
from tables import cases

from jaxrl_po import config, run
from jaxrl_po.config import COUNT, POSITIVE, UNIT, ConfigError, NoEffectError, number, static
from jaxrl_po.run import errors
from jaxrl_po.run.errors import RunError, UsageError
from jaxrl_po.run.experiment import flags


@config.record
class Config:
    """Record with every kind of field."""

    learning_rate: config.Number = number(3e-4, "step size", within=POSITIVE)
    gamma: config.Number = number(0.99, "discount", within=UNIT)
    target_kl: config.Number = number(
        0.02, "bound", unit="nats", within=POSITIVE, when=("early_stop", True)
    )
    anything: config.Number = number(0.0, "any finite number")
    num_epochs: int = static(4, "passes", unit="passes", within=COUNT)
    early_stop: bool = static(False, "stop early")
    activation: str = static("tanh", "kind", choices=("tanh", "relu"))
    hidden: tuple[int, ...] = static((64, 64), "widths")
    axis_name: str | None = static(None, "set by code")

    def validate(self):
        if self.gamma == 0.5:
            raise ConfigError("gamma", "must not be a half")


@config.record
class Options:
    """Record of flags without a prefix."""

    total_steps: int = static(100, "length", within=COUNT)


SECTIONS = {"": Options, "config": Config}


def test_every_kind_of_value():
    argv = (
        "--total_steps 7e0 --config.learning_rate=1e-2 --config.anything=-3 "
        "--config.num_epochs=2 --config.early_stop --config.activation=relu "
        "--config.hidden=32,1.6e1,8"
    )
    records = flags.parse_records(argv.split(), SECTIONS)
    assert records[""] == Options(total_steps=7)
    assert records["config"] == Config(
        learning_rate=0.01,
        anything=-3.0,
        num_epochs=2,
        early_stop=True,
        activation="relu",
        hidden=(32, 16, 8),
    )
    assert isinstance(records["config"].anything, float)


@cases(
    "argument, message",
    (
        "--config.learning_rat=1",
        "config.learning_rat: is not a setting; did you mean config.learning_rate?",
    ),
    ("--total_step=1", "total_step: is not a setting; did you mean total_steps?"),
    ("--config.lr=1", "config.lr: is not a setting; did you mean config.learning_rate?"),
    ("--target-kl=1", "target-kl: is not a setting; did you mean config.target_kl?"),
    ("--config.total_steps=1", "config.total_steps: is not a setting; did you mean total_ste"),
    ("--steps=1", "steps: is not a setting; did you mean total_steps?"),
    ("--zzz=1", "zzz: is not a setting"),
    ("--config.axis_name=data", "config.axis_name: is not a setting"),
    ("--config.anything=nan", "config.anything: must lie in (-inf, inf), got nan"),
    ("--config.learning_rate=0", "config.learning_rate: must lie in (0, inf), got 0"),
    ("--config.learning_rate=fast", "config.learning_rate: must be a number, got 'fast'"),
    ("--config.gamma=0.5", "config.gamma: must not be a half"),
    ("--config.num_epochs=0", "config.num_epochs: must lie in [1, inf) passes, got 0"),
    ("--config.num_epochs=2.5", "config.num_epochs: must be an integer, got '2.5'"),
    ("--config.early_stop=maybe", "config.early_stop: must be true or false, got 'maybe'"),
    ("--config.activation=tan", "config.activation: must be one of tanh, relu, got 'tan'"),
    ("--config.hidden=64,x", "config.hidden: must be integers such as 64,64, got '64,x'"),
    ("--total_steps=1e400", "total_steps: must be an integer, got '1e400'"),
    ("--config.hidden=64,6.5", "config.hidden: must be integers such as 64,64, got '64,6.5'"),
    ("stray", "'stray' is not a flag; write --name=value"),
)
def test_bad_input_names_flag_and_remedy(argument, message):
    with pytest.raises(UsageError if argument == "stray" else ConfigError) as caught:
        flags.parse_records([argument], SECTIONS)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_an_argument_that_is_no_text_is_named():
    with pytest.raises(UsageError, match=r"^'--out=x\\udcff\\udc80' must be UTF-8$"):
        flags.parse_records(["--out=x\udcff\udc80"], SECTIONS)


def test_a_missing_value_is_one_line():
    with pytest.raises(UsageError, match=r"--total_steps|total_steps") as caught:
        flags.parse_records(["--total_steps"], SECTIONS)
    assert "\n" not in str(caught.value)


def test_stored_number_instead_of_list_is_named():
    with pytest.raises(ConfigError, match=r"^config\.hidden: must be of type tuple, got 8$"):
        flags.merge_layers(SECTIONS, {"stored": {"config.hidden": 8}})


def test_flatten_is_the_inverse_of_parsing():
    records = flags.parse_records(["--config.gamma=0.25", "--total_steps=3"], SECTIONS)
    flat = flags.flatten(records)
    assert flat["config.gamma"] == 0.25
    assert flat["total_steps"] == 3
    assert "config.axis_name" not in flat
    argv = [f"--{name}={errors.spell(value)}" for name, value in flat.items()]
    assert flags.parse_records(argv, SECTIONS) == records


def test_located_error_has_the_prefix_of_its_section():
    error = flags.flag_error(ConfigError("gamma", "must fit total_steps"), SECTIONS)
    assert (error.field, error.message) == ("config.gamma", "must fit total_steps")
    for field in ("total_steps", "config.gamma", "env"):
        error = ConfigError(field, "must fit gamma")
        assert str(flags.flag_error(error, SECTIONS)) == f"{field}: must fit gamma"


@cases(
    "result, status, stderr",
    (ConfigError("out", "must\nname a folder"), 2, "error: --out: must name a folder\n"),
    (UsageError("no command 'x'"), 2, "error: no command 'x'\n"),
    (NoEffectError("json", "x is on"), 2, "error: --json: has no effect unless x is on\n"),
    (RunError("a--b: no space"), 1, "error: a--b: no space\n"),
    (MemoryError("no 7 TiB"), 1, "error: out of memory: no 7 TiB\n"),
    (1, 1, ""),
    (0, 0, ""),
    ids=repr,
)
def test_entry_gives_the_status_and_one_line(monkeypatch, capfd, result, status, stderr):
    def main(argv):
        assert argv == ["--total_steps=7"]
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(sys, "argv", ["a script", "--total_steps=7"])
    with pytest.raises(SystemExit) as left:
        flags.run_script(main)
    assert left.value.code == status
    assert tuple(capfd.readouterr()) == ("", stderr)


def test_python_errors_name_arguments(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^out: must be the folder of a run of jaxrl-po .*, got \S+/a--b;"
    ):
        run.resume(tmp_path / "a--b")
    experiment = run.Experiment(env="CartPole-v1", out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"^compile_for: must read like tpu:v5e:4x4"):
        next(run.compile_for(experiment, "abacus"))
    with pytest.raises(ConfigError, match=r"^total_steps: must be at least the steps of an"):
        run.sweep(experiment, over={"config.gamma": [0.9]}, total_steps=0)
