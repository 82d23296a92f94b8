"""Tests RoPE in two spellings, `rope_parameters` and `rope_scaling`: they agree, or are refused."""

import families
import pytest

from jaxrl_po.config import ConfigError
from jaxrl_po.language.pretrained import architectures

KINDS = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": families.STRETCHED | {"rope_type": "llama3", "original_max_position_embeddings": 64},
}
THETA = 5e5


def read(family, **spellings):
    """Loads a model whose configuration has only some spellings of RoPE."""
    plain = {k: v for k, v in families.CONFIGS[family].items() if not k.startswith("rope_")}
    return architectures.read(plain | spellings)


@pytest.mark.parametrize("family", families.CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_both_spellings_alone_or_together_are_equal(family, kind):
    scaling = KINDS[kind]
    new, old = scaling | {"rope_theta": THETA}, dict(scaling)
    old["type"] = old.pop("rope_type")  # an older name of the same setting
    expected = read(family, rope_theta=THETA, rope_scaling=scaling)
    assert expected.rope.theta == THETA
    assert expected.rope.factor == 8.0
    for spellings in (
        {"rope_parameters": new},
        {"rope_parameters": new, "rope_theta": THETA},
        {"rope_theta": THETA, "rope_scaling": old},
        {"rope_parameters": new, "rope_scaling": old},
        {"rope_scaling": old, "rope_theta": THETA, "rope_parameters": new},
    ):
        assert read(family, **spellings) == expected


@pytest.mark.parametrize("family", families.CONFIGS)
def test_an_export_has_both_spellings(family):
    """Version 4 of `transformers` ignores `rope_parameters`, and falls back to θ = 10,000."""
    model = architectures.read(families.CONFIGS[family])
    written = architectures.write(model)
    former = {key: value for key, value in written.items() if key != "rope_parameters"}
    latter = {k: v for k, v in written.items() if k == "rope_parameters" or "rope_" not in k}
    assert architectures.read(former) == architectures.read(latter) == architectures.read(written)
    assert former["rope_theta"] == model.rope.theta != 1e4
    assert ("rope_scaling" in former) is (model.rope.factor != 1.0)


@pytest.mark.parametrize("family", families.CONFIGS)
def test_spellings_that_contradict_each_other_are_refused(family):
    linear, llama3 = (KINDS[kind] | {"rope_theta": THETA} for kind in KINDS)
    plain = {"rope_type": "default", "rope_theta": THETA}
    for spellings in (
        {"rope_parameters": linear, "rope_scaling": llama3},
        {"rope_parameters": llama3, "rope_scaling": linear},
        {"rope_parameters": plain, "rope_scaling": linear},
        {"rope_parameters": linear, "rope_scaling": linear | {"factor": 4.0}},
        {"rope_parameters": linear, "rope_theta": 1e4},
        {"rope_parameters": linear, "rope_scaling": linear | {"rope_theta": 1e4}},
    ):
        with pytest.raises(ConfigError, match="must agree"):
            read(family, **spellings)
