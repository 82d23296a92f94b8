"""Tests that flags keep the name, type, default and help that they have in `golden_flags.json`.

A row of that file holds commands, flag, type, default, help, whether plain `--help` shows the flag,
and the records that have it. `python tests/test_golden_flags.py` writes the file anew after a
change that is meant; the difference then shows every flag that changed.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from jaxrl_po import config, control, language
from jaxrl_po.__main__ import main
from jaxrl_po.algorithms import reference
from jaxrl_po.cli import evaluate, export, plot, render, report
from jaxrl_po.language import demonstrations
from jaxrl_po.language.settings import Computation, SamplingSettings
from jaxrl_po.run.experiment import control as control_command
from jaxrl_po.run.experiment import language as language_command
from jaxrl_po.run.experiment import language_config, search_space
from jaxrl_po.run.experiment.registry import METHODS, TASKS

GOLDEN = Path(__file__).parent / "golden_flags.json"
TRAINED = {"control": control_command, "language": language_command}
TRAINING, CONTROL = "control language sweep", "control sweep"
# For these commands `--help` shows every flag.
OTHERS = {"plot": plot, "report": report, "evaluate": evaluate, "render": render, "export": export}
OPTIONAL = ("tools", "critic", "reward", "reward_model", "preferences")  # sections


def records():
    """Returns `(commands, section, name) -> record class`; section "" holds flags without a dot."""
    commands = {name: module.OPTIONS for name, module in TRAINED.items()}
    own = commands | {
        name: getattr(module, f"{name.capitalize()}Options") for name, module in OTHERS.items()
    }
    own["sweep"] = search_space.ControlSweep
    parts = {
        "tools": language_config.ToolSettings,
        "model": language.ModelSettings,
        "critic": language.ModelSettings,
        "sampler": language.Sampler,
        "reward": language_config.RewardSettings,
        "lora": language_config.Adapters,
        "warm_start": language.WarmStart,
        "reward_model": language.ModelSettings,
        "preferences": language.Preferences,
        "reference": reference.ReferenceSettings,
    }
    return {
        **{(command, "", "options"): options for command, options in own.items()},
        **{(TRAINING, "config", name): module.Config for name, module in METHODS.items()},
        (CONTROL, "problem", "paths"): control.ControlSettings,
        (CONTROL, "problem", "groups"): control.GroupSettings,
        (CONTROL, "problem", "vine"): control.VineSettings,
        ("language", "problem", "completions"): language.LanguageSettings,
        ("language", "problem", "dialogues"): SamplingSettings,
        ("language", "problem", "demonstrations"): demonstrations.SupervisedSettings,
        (CONTROL, "network", "only"): control.NetworkSettings,
        **{("language", "task", name): entry.settings for name, entry in TASKS.items()},
        **{("language", section, "only"): record for section, record in parts.items()},
        ("language", "model", "pretrained"): Computation,
    }


def entries():
    """Returns `(commands, flag, record) -> [type, default, help, shown]` for the current
    records."""
    found = {}
    for (commands, section, name), record in records().items():
        for field in dataclasses.fields(record):
            if config.SETTING not in field.metadata or field.default is None:
                continue  # fields that code sets
            setting = config.setting_of(field)
            kind = type(field.default).__name__ if setting.static else "float"
            default = json.loads(json.dumps(field.default))
            shown = setting.common or commands in OTHERS
            flag = f"{section}.{field.name}".lstrip(".")
            found[commands, flag, name] = [kind, default, config.describe_field(field), shown]
    return found


def rows():
    """Returns the rows of `golden_flags.json` that describe the current records."""
    names = {}
    for (commands, flag, name), values in entries().items():
        names.setdefault((commands, flag, json.dumps(values)), []).append(name)
    return [
        [commands, flag, *json.loads(values), " ".join(found)]
        for (commands, flag, values), found in names.items()
    ]


def test_flags_are_those_of_the_golden_list():
    assert rows() == json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", ["control", "language", "sweep", *OTHERS])
def test_help_prints_flags_of_the_records(command, capsys):
    names = ("options", "only", "ppo", "paths", "completions", "addition")  # shown by default
    for word, everything in (("--help", False), ("--help=all", True)):
        assert main([command, word]) == 0
        printed = re.findall(r"^  --([\w.]+)=", capsys.readouterr().out, re.MULTILINE)
        assert set(printed) == {
            flag
            for (commands, flag, name), (*_, shown) in entries().items()
            if command in commands.split() and name in names and (shown or everything)
            if flag.rpartition(".")[0] not in OPTIONAL
        }


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows())
    GOLDEN.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
