"""Microbatches by the memory that there is: a count from shapes, corrected by the program's own."""

import json
import re
from types import SimpleNamespace

import pytest

from jaxrl_po.algorithms import grpo
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.language import Transformer
from jaxrl_po.run.devices import room
from jaxrl_po.run.devices.compilation import Memory
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.experiment import language, microbatches
from jaxrl_po.run.experiment.experiment import Experiment
from jaxrl_po.run.experiment.microbatches import Fit, Need
from jaxrl_po.run.experiment.plan import prepare
from jaxrl_po.run.store.metrics import read
from jaxrl_po.types import ActorCritic, TrainState

PLENTY = 10**12


@pytest.fixture
def free(monkeypatch):
    """Sets the bytes that are free."""

    def be(size):
        monkeypatch.setattr(room, "free", lambda: size)

    be(PLENTY)
    return be


def test_less_memory_never_means_fewer_microbatches():
    need = Need(held=1000, kept=960, choices=(1, 2, 3, 4, 6, 12))
    spaces = range(900, 2100, 20)
    chosen = [need.choose(space) for space in spaces]
    assert chosen == sorted(chosen, reverse=True)
    for number, space in zip(chosen, spaces, strict=True):
        assert need.needs(number) <= space or number == 12
        assert number == 1 or need.needs(need.choices[need.choices.index(number) - 1]) > space
    assert {1, 2, 3, 4, 6, 12} == set(chosen)


def test_activations_are_those_of_every_block_or_with_remat_of_one():
    model = Transformer(16, width=8, layers=6, heads=2, mlp_width=32)
    kept, again = (
        microbatches.activations(each, columns=5) for each in (model, model.clone(remat=True))
    )
    of_block = 8 * 8 + 2 * 4 * 4 + 2 * 2 * 5 + 3 * 32
    assert (kept, again) == (4 * 6 * of_block, 4 * (of_block + 6 * 8))
    assert microbatches.activations(model.clone(dtype="bfloat16"), columns=5) == kept // 2
    fused = microbatches.activations(model.clone(fused_attention=True), columns=5)
    assert fused == kept - 4 * 6 * 2 * 2 * 5


def test_a_critic_shares_no_prompts():
    policy = Transformer(16, width=8, layers=6, heads=2, mlp_width=32)
    critic = policy.clone(layers=3, outputs=1)
    state = TrainState(ActorCritic({}, {}), *[None] * 6)
    kept = [
        microbatches.counted(
            models,
            state,
            Placement(1, 1, 1),
            rows=24,
            columns=(10, 3),
            num_minibatches=1,
            group=4,
        ).kept
        for models in ([policy], [policy, critic])
    ]
    each = [microbatches.activations(model, columns=13) for model in (policy, critic)]
    assert kept[0] == 6 * (10 + 4 * 3) * each[0]
    assert kept[1] - kept[0] == 24 * (10 + 3) * each[1]


def test_cpu_devices_share_what_is_free(free):
    free(1000)
    assert [microbatches.space(devices) for devices in (1, 2)] == [900, 450]
    free(None)
    assert microbatches.space(1) is None


def test_what_fits_with_no_number_is_refused_with_what_would_fit(free):
    records = {
        "config": SimpleNamespace(num_microbatches=4),
        "problem": SimpleNamespace(num_prompts=12),
    }
    fit = Fit(records, None, Need(held=2 * 10**9, kept=0, choices=(1, 2, 4)), 1, None)
    free(6 * 10**9)
    assert fit.smaller(5 * 10**9) is None
    with pytest.raises(
        RunError,
        match=r"^this run needs 8\.0 GB on a device, and 6\.0 GB are free, with --config"
        r"\.num_microbatches=4: --problem.num_prompts=6 would fit$",
    ):
        fit.smaller(8 * 10**9)
    free(10**9)
    with pytest.raises(RunError, match="a smaller model is needed"):
        fit.smaller(8 * 10**9)


def test_sampling_that_does_not_fit_is_refused(free):
    records = {"config": grpo.Config(), "problem": SimpleNamespace(num_prompts=12)}
    free(1000)
    fit = Fit(records, None, Need(100, 800, (1, 2, 4), sampling=1200), 1, None)
    with pytest.raises(RunError, match=r"with --config\.num_microbatches=1: --problem.num_prompts"):
        fit.smaller(1300)


def test_a_number_that_does_not_divide_makes_way_for_the_next(monkeypatch):
    def job_of(method):
        return method.num_microbatches

    def check(number):
        if number % 3:
            raise ConfigError("num_microbatches", "must divide")

    monkeypatch.setattr(microbatches.programs, "check", check)
    need = Need(held=0, kept=12, choices=(1, 2, 3, 4, 6, 12))
    fit = Fit({"config": grpo.Config()}, 1, need, 1, job_of)
    assert [fit.with_number(number).number for number in (1, 2, 3, 4, 12)] == [1, 3, 3, 6, 12]


def test_a_container_leaves_what_its_limit_does(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "GROUP", tmp_path)
    machine = room.free()
    for name, text in {
        "max": "5000",
        "current": "4500",
        "stat": "anon 1\ninactive_file 300\n",
    }.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert room.free() == 800 < machine
    (tmp_path / "memory.max").write_text("max")
    assert room.free() > 800


def test_what_is_told_is_the_memory_of_the_process(monkeypatch):
    monkeypatch.setattr(room, "held", lambda: 10**9)
    told = room.describe(Memory(10, 2 * 10**9), 2, space=lambda: 8 * 10**9)
    assert told == "this run needs about 5.0 GB of the 9.0 GB that are free"
    assert room.describe(Memory(10, None), 2) == "a device holds 10 bytes of state"


def test_a_program_that_needs_more_than_was_counted_is_compiled_again(
    tmp_path, free, monkeypatch, capsys
):
    monkeypatch.setattr(microbatches, "activations", lambda *_: 0)  # counted far too low
    sizes = ["--problem.num_prompts=64", "--model.width=8", "--model.mlp_width=64", "--seeds=1"]
    flags = ["--algorithm=sft", "--devices=1", *sizes, "--show=0", "--eval_prompts=2"]

    def run(name, *more):
        out = tmp_path / name
        assert launch.language([f"--out={out}", *flags, *more]) == 0
        config = json.loads((out / "config.json").read_text())
        return config["config.num_microbatches"], read(out / "metrics.jsonl")[0]

    number, row = run("plenty", "--total_steps=64")
    assert number == 1
    # Of supervised training, the cross entropy of what is learned and of what is held out.
    assert re.search(r": loss \S+  held out loss \S+  64/64 ", capsys.readouterr().out)
    free(int(row["memory/peak_bytes"]))
    number, smaller = run("little", "--total_steps=64")
    assert number > 1
    assert smaller["memory/peak_bytes"] <= 0.9 * row["memory/peak_bytes"]
    assert f"--config.num_microbatches={number}, to fit" in capsys.readouterr().out
    free(PLENTY)
    assert run("little", "--total_steps=64", "--resume")[0] == number
    free(1)
    # One more microbatch would be other bits.
    for number, flag in (2, "--config.num_microbatches=2"), (1, "--deterministic"):
        asked = [f"--out={tmp_path / 'asked'}", *flags, flag]
        plan = prepare(language.SCRIPT, Experiment.parse(language.SCRIPT, asked).settings)
        assert plan.settings["config.num_microbatches"] == number
        assert plan.refit is None
