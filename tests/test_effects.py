"""Tests that fields which have an effect only with some values of another field are refused
otherwise."""

import dataclasses
import importlib
import pkgutil

import ablation
import pytest
import tpu

import jaxrl_po
from jaxrl_po.config import GIVEN, SETTING, Interval, NoEffectError, check, setting_of

CONDITIONS = {
    "ablation.Options": {"warm_start": "warm_start_steps is above 0"},
    "tpu.Options": {"out": "json is off"},
    "actor_critic.Estimation": {"lambda_": "estimator is gae", "n_steps": "estimator is n_step"},
    "corrections.Corrections": {
        "correction_low": "correction is mask",
        "correction_high": "correction is truncate or mask",
        "off_policy_kl": "mask_off_policy is on",
    },
    "dapo.Config": {
        "epsilon_high": "clip_higher is on",
        "max_generation_batches carry_surplus train_prompts": "dynamic_sampling is refill",
        "overlong_cache overlong_factor": "soft_overlong is on",
    },
    "group_config.Clip": {"dual_clip_ratio": "dual_clip is on"},
    "group_config.GroupScale": {"ddof": "scale is std", "std_epsilon": "scale is std or batch"},
    "group_config.Reference": {
        "kl_coefficient reweight_kl reset_iterations": "use_reference is on"
    },
    "grpo.Config": {"running_decay": "running_statistics is on"},
    "language_config.Adapters": {"alpha targets": "rank is above 0"},
    "optimizers.Optimization": {
        "weight_decay": "optimizer is adamw or lion or muon",
        "decay_iterations": "schedule is auto or linear or cosine",
    },
    "options.RunOptions": {
        "json": "compile_for is given",
        "coordinator num_processes process_id coordinator_timeout": "distributed is on",
    },
    "ppo.Config": {"target_kl": "early_stop is on"},
    "ppo_penalty.Config": {
        "target_kl": "penalty is adaptive or satisfied",
        "max_rounds": "penalty is satisfied",
    },
    "problem.ControlSettings": {"reward_discount": "scale_rewards is on"},
    "reference.ReferenceSettings": {
        "kl_coefficient adapt": "enabled is on",
        "target_kl": "adapt is on",
    },
    "warm_start.WarmStart": {"accuracy": "steps is above 0"},
    "search_space.Search": {"exploit_by": "exploit_every is above 0"},
}
EXTRAS = {"adapters", "mathematics", "reasoning"}  # extras whose packages may be missing
MODULES = [
    importlib.import_module(each.name)
    for each in pkgutil.walk_packages(jaxrl_po.__path__, "jaxrl_po.")
    if not EXTRAS & {*each.name.split(".")}
]


def name_of(record):
    return f"{record.__module__.rpartition('.')[2]}.{record.__name__}"


def conditions(record):
    """Returns the conditions of a record's fields, inherited fields included."""
    tables = [CONDITIONS.get(name_of(base), {}) for base in reversed(record.__mro__)]
    return {name: table[names] for table in tables for names in table for name in names.split()}


def conditional(record):
    """Returns the names of the fields with a condition; empty unless the class is a record."""
    fields = getattr(record, "__dataclass_fields__", {}).values()
    return {f.name for f in fields if SETTING in f.metadata and setting_of(f).when}


RECORDS = {
    f"{each.__module__}.{each.__name__}": each
    for module in (*MODULES, ablation, tpu)
    for each in vars(module).values()
    if isinstance(each, type) and (conditions(each) or conditional(each))
}


def values(field):
    """Returns valid values of a record's field."""
    about, kind = setting_of(field), type(field.default)
    if about.choices:
        return about.choices
    if kind in (bool, str):
        return {bool: (True, False), str: ("", "text")}[kind]
    found = {kind(value) for value in (0, 1, field.default + 1, field.default / 2)}
    return [value for value in found if value in about.within]


def holds(value, wanted):
    if wanted is GIVEN:
        return value != ""
    return value in wanted if isinstance(wanted, Interval) else value == wanted


def refusal(record, **changes):
    try:
        check(record(**changes))
    except NoEffectError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_field_without_effect_is_refused(record):
    fields = {field.name: field for field in dataclasses.fields(record)}
    assert conditional(record) == conditions(record).keys()
    for name, words in conditions(record).items():
        decider, *wanted = setting_of(fields[name]).when
        change = next(value for value in values(fields[name]) if value != fields[name].default)
        found = {value: any(holds(value, x) for x in wanted) for value in values(fields[decider])}
        assert {*found.values()} == {True, False}
        for value, effect in found.items():
            message = refusal(record, **{decider: value, name: change})
            if effect:
                assert not message.startswith(f"{name}: ")
            else:
                assert message == f"{name}: has no effect unless {words}"
