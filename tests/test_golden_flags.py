"""Tests that flags keep the name, type, default and help that they have in `golden_flags.json`.

A row of that file holds commands, flag, type, default, help, whether plain `--help` shows the flag,
and the records that have it. The file describes commit 8f80954; this module lists every later
change.
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
from jaxrl_po.run.experiment import language_config, sweeping
from jaxrl_po.run.experiment.registry import METHODS, TASKS

GOLDEN = Path(__file__).parent / "golden_flags.json"
# Map from a former flag to the present flag; a name that ends in a dot is a section. A flag of a
# few commands
# has their names in front of its name: `"export seed": "seed_index"`.
RENAMED = {
    "config.n": "config.n_steps",
    "environment": "tools",
    "environment.": "tools.",
    "export seed": "seed_index",
    "network.memory_of": "network.recurrent_networks",
    "network.squash": "network.tanh_squash",
    "network.std": "network.state_dependent_std",
}
# Map from a present flag to pairs of a former and a present text in its default and its help.
TEXTS = {
    "sampling": [("path", "trajectories")],
    "config.n_steps": [("is n =", "has n_steps =")],
    "network.recurrent_networks": [("which network has a memory", "networks with a memory")],
    "network.tanh_squash": [
        (", in place of clipping them where they are", " instead of clipping them in the"),
        ("the played", "the environment"),
    ],
    "algorithm": [
        ("distillation, sft", "distillation, sft, or an entry of your own as file.py:name")
    ],
    "critic": [
        ("likewise,", "Flax module of your own as file.py:Name,"),
        ("the critic", "the critic of --network"),
    ],
    "env": [
        ("xminigrid:Name)", "xminigrid:Name, or of a suite of your own as file.py:suite:Name)")
    ],
    "network.memory": [
        ("(GTrXL)", "(GTrXL); or an entry of your own as file.py:name"),
    ],
    "task": [("a function of", "a function or entry of")],
    "seed_index": [
        ("which of the run's seeds (", "index of the seed whose parameters are written, from 0 ("),
        ("which of the run's seeds plays", "index of the seed that plays"),
    ],
    "out": [
        ("the GIF; empty is episode.gif", "GIF to write; empty for episode.gif"),
        ("The text of a run of language, a .txt", "For a run of language, .txt file to write"),
        (
            "empty prints it. The flags that follow are of a GIF",
            "empty to print the text. Further flags apply to a GIF alone",
        ),
        ("the file; empty is evaluation.json", "file to write; empty for evaluation.json"),
        (
            "the file; an earlier report in it is replaced",
            "file to write, in place of an earlier report",
        ),
    ],
    "checkpoint": [
        ("whose parameters play", "checkpoint that plays"),
        ("whose parameters are evaluated", "checkpoint to evaluate"),
        ("whose parameters are written", "checkpoint to write"),
        ("each holds all seeds", "a checkpoint holds all seeds"),
        ("best is the one with the highest", "the best checkpoint has the highest"),
    ],
    "width": [
        ("its height is three quarters of that", "the height is three quarters of the width")
    ],
    "size": [
        ("of a finite test set the first ones", "the first prompts of a finite test set"),
        ("0 takes the number of the run", "0 for as many as in the run"),
    ],
    "task.max_prompt_length": [
        (
            "a longer prompt is an error; 0 allows any",
            "maximal length of a prompt; 0 for no maximum",
        )
    ],
    "tools.turns": [
        (
            "messages of a dialogue; one that still",
            "most messages of a dialogue, which is cut if it",
        ),
        ("it calls tools then is cut", "it still calls tools"),
    ],
    "tools.reply_length": [
        (
            "tokens of the longest reply of tools, and of what",
            "most tokens of a reply of tools, and of the text that",
        ),
        ("longer ones", "longer texts"),
    ],
    "reward": [
        ("what equals the answer", "a result that equals the answer"),
        (
            "`last_number` or `contains`, whether its last number is the answer, or the answer "
            "stands in it",
            "`last_number`, whether the last number in a completion is the answer; `contains`, "
            "whether a completion contains the answer",
        ),
        (", of which the first gives", "; the first function gives"),
    ],
    "reward_weights": [
        ("the functions, as", "reward functions, as"),
        ("empty is 1 for", "empty for 1"),
    ],
    "reward_timeout": [("a function", "a reward function")],
    "tools.timeout": [("a method", "a method of the class")],
    "tools": [
        (
            "class with tools for a pretrained model, as file.py:Class",
            "class whose methods are tools of a pretrained model, as file.py:Class",
        )
    ],
}
# Present flag to pairs of a former help text and the present one, which reads alone.
ALONE: dict[str, list[tuple[str, str]]] = {
    "config.std_epsilon": [("added to the std", "constant that is added to the std")],
    "config.temperature_negative": [
        ("τ of any other token", "τ of tokens without a positive advantage")
    ],
    "config.baseline": [
        (
            "what is subtracted from the return",
            "baseline that is subtracted from the return",
        ),
    ],
    "config.correction_high": [
        (
            "largest ρ: truncated to it, or masked above it",
            "largest ρ = π_old / π_sampler; a larger weight is truncated to "
            "correction_high, or masked",
        ),
    ],
    "config.correction_low": [
        (
            "smallest ρ that the mask keeps",
            "smallest ρ = π_old / π_sampler that correction=mask keeps",
        ),
    ],
    "config.extra_samples": [
        (
            "how many responses of each group, out of group_size, enter mean and std only "
            "and are not trained on",
            "number of responses of each group, out of group_size, that enter mean and std "
            "only and are not trained on",
        ),
    ],
    "config.k": [
        (
            "responses of which the best counts, at most group_size",
            "number k of responses whose best score is maximised, at most group_size",
        ),
    ],
    "config.kl_coefficient": [
        (
            "β; its initial value if adapted",
            "coefficient β of the KL penalty; the initial value if β is adapted",
        ),
    ],
    "config.max_ratio": [
        (
            "the ratio is truncated at it",
            "largest ratio π / π_sampler; larger ratios are truncated to max_ratio",
        ),
    ],
    "config.off_policy_kl": [
        (
            "largest distance from the sampler of such a response",
            "largest mean of log π_sampler − log π over a response whose tokens "
            "mask_off_policy keeps",
        ),
    ],
    "config.overlong_cache": [
        (
            "length of the interval over which that penalty grows; 0 for a fifth of the budget",
            "number of tokens over which the penalty of soft_overlong grows; 0 for a fifth "
            "of the budget",
        ),
    ],
    "config.overlong_filtering": [
        (
            "mask responses that were cut at the token budget; on control, a time limit is "
            "no such budget",
            "mask responses that were cut at the token budget; the time limit of a control "
            "task does not count as a token budget",
        ),
    ],
    "config.penalty": [
        (
            "β, weight of |log r| at these tokens",
            "β, weight of |log r| at the penalised tokens",
        ),
    ],
    "config.reweight_kl": [
        (
            "multiply the penalty in the loss by the ratio π / π_old, so that its expected "
            "gradient is that of KL(policy ‖ reference) (DeepSeek-V3.2)",
            "multiply the KL penalty in the loss by the ratio π / π_old, so that its "
            "expected gradient is the gradient of KL(policy ‖ reference) (DeepSeek-V3.2)",
        ),
    ],
    "config.running_statistics": [
        (
            "running estimates of mean and std, per prompt of a finite set or per "
            "difficulty, instead of the group's own",
            "take mean and std from running estimates, per prompt of a finite set or per "
            "difficulty, instead of from the group",
        ),
    ],
    "config.schedule": [
        (
            "how learning_rate falls to 0 in decay_iterations: linear, cosine, or constant, "
            "not at all; auto is linear",
            "decay of learning_rate to 0 in decay_iterations: linear or cosine; constant "
            "disables the decay; auto takes linear",
        ),
    ],
    "config.supervision": [
        (
            "one advantage per response; for each token the sum of the normalised step "
            "rewards that follow it (section 4.1.3); or in a dialogue for each turn the "
            "rewards from it on, normalised over the group's turns of the same number",
            "outcome: one advantage per response; process: for each token the sum of the "
            "normalised rewards of later steps (section 4.1.3); turn: for each turn of a "
            "dialogue the rewards of this and later turns, normalised over the group's "
            "turns of the same number",
        ),
    ],
    "config.temperature_positive": [
        (
            "τ of a token with a positive advantage; larger is narrower",
            "τ of tokens with a positive advantage; a larger τ narrows the gate",
        ),
    ],
    "critic.shape": [
        (
            "sizes of a published model in place of those above, with --task=random",
            "published model whose sizes replace the other sizes, with --task=random",
        ),
    ],
    "model.shape": [
        (
            "sizes of a published model in place of those above, with --task=random",
            "published model whose sizes replace the other sizes, with --task=random",
        ),
    ],
    "network.channels": [
        (
            "channels of the 3 × 3 convolution that reads small images; 0 flattens them. "
            "Maps of many kinds of things are first embedded in as many, cell by cell. "
            "Frames of 36 pixels and more are read by the three convolutions of Mnih et al. "
            "(2015)",
            "channels of the 3 × 3 convolution for small images; 0 flattens small images. "
            "Maps of many kinds of objects are first embedded in the same number of "
            "channels, cell by cell. Frames of 36 pixels and more have the three "
            "convolutions of Mnih et al. (2015)",
        ),
    ],
    "network.critic_width": [
        (
            "width of the critic's hidden layers; 0 for that of the actor's",
            "width of the critic's hidden layers; 0 for the actor's width",
        ),
    ],
    "network.initialization": [
        (
            "orthogonal: with a scale for each kind of layer, near 0 for the policy's last; "
            "lecun_normal: the same for all",
            "orthogonal: a scale for each kind of layer, near 0 for the policy's last "
            "layer; lecun_normal: the same formula for all layers",
        ),
    ],
    "network.shared_torso": [
        (
            "actor and critic are heads on one body, which rules out a trust region on the policy",
            "share the hidden layers of actor and critic; excludes a trust region on the policy",
        ),
    ],
    "problem.horizon": [
        (
            "maximum steps of a branch; nothing is bootstrapped after it",
            "maximum steps of a branch; no value is bootstrapped after the last step",
        ),
    ],
    "problem.num_branches": [
        (
            "branches of each such state, one action each; 0 tries every action (discrete only)",
            "branches of each chosen state, one action each; 0 tries every action (discrete "
            "actions only)",
        ),
    ],
    "problem.top_p": [
        (
            "sample from the most likely tokens that reach this probability together; 1 for all",
            "sample from the most likely tokens that reach the probability top_p together; "
            "1 for all",
        ),
    ],
    "reference.kl_coefficient": [
        (
            "β; its initial value if adapted",
            "coefficient β of the KL penalty; the initial value if β is adapted",
        ),
    ],
    "reward_model.shape": [
        (
            "sizes of a published model in place of those above, with --task=random",
            "published model whose sizes replace the other sizes, with --task=random",
        ),
    ],
    "sampler.dtype": [
        (
            "dtype of the sampler's matrix products; same is that of the learner",
            "dtype of the sampler's matrix products; same takes the learner's dtype",
        ),
    ],
    "sampler.staleness": [
        (
            "how many iterations old the sampler's parameters are",
            "age of the sampler's parameters in iterations",
        ),
    ],
    "task.max_turns": [
        (
            "guesses; a lost game counts as one more",
            "largest number of guesses; a lost game counts as one guess more",
        ),
    ],
    "task.tool": [
        (
            "reply with the values of expressions; off, to see their worth",
            "reply with the values of expressions; off measures the worth of the calculator",
        ),
    ],
}
# Map from a present flag to its new default, and flags that plain `--help` newly shows or hides.
DEFAULTS: dict[str, object] = {}
SHOWN_OR_HIDDEN: set[str] = set()
# Map from a present flag to its new type, default and help, where more than words changed.
CHANGED: dict[str, list[object]] = {
    "network.state_dependent_std": [
        *("bool", False),
        "compute σ of a Gaussian policy from the state instead of one vector for all states",
    ],
    "dtype": [
        *("str", ""),
        "dtype of all parameters; empty for float32, except that unchanged parameters keep the "
        "dtype of the base model (one of , float32, bfloat16, float16)",
    ],
    "task.template": [
        *("str", ""),
        "text with {prompt} around each prompt; or chat, to make each prompt a user's message in "
        "the model's chat template; empty to leave prompts unchanged",
    ],
    "task.characters": [
        *("str", ""),
        "characters of the vocabulary; empty for the characters in the files, or with a pretrained "
        "model, whose vocabulary is fixed",
    ],
}
ADDED = {"tuned", "exporter", "surrogate", "advantage", "optimizer", "actor_critic"}
ADDED |= {"by", "title", "labels"}
REMOVED: set[str] = set()  # former names of removed flags

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
    own["sweep"] = sweeping.ControlSweep
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


def expected():
    """Returns the `entries` that follow from the golden list and the listed changes."""
    found = {}
    for commands, flag, kind, default, text, shown, names in json.loads(GOLDEN.read_text()):
        if flag in REMOVED:
            continue
        section, dot, field = flag.rpartition(".")
        flag = RENAMED.get(section + dot, section + dot) + field
        flag = RENAMED.get(f"{commands} {flag}", RENAMED.get(flag, flag))
        for former, present in [*TEXTS.get(flag, ()), *ALONE.get(flag, ())]:
            text = text.replace(former, present)
            default = present if default == former else default
        kind, default, text = CHANGED.get(flag, [kind, default, text])
        default, shown = DEFAULTS.get(flag, default), shown != (flag in SHOWN_OR_HIDDEN)
        found |= {(commands, flag, name): [kind, default, text, shown] for name in names.split()}
    return found


def test_flags_are_as_before_but_for_listed_changes():
    now, before = entries(), expected()
    assert {flag for _, flag, _ in now.keys() - before.keys()} == ADDED
    assert {key: now.get(key) for key in before} == before


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
