"""Describes families of pretrained models as settings of one `Transformer`; names their tensors.

A family is read from the `config.json` of a checkpoint. A setting that the transformer does not
compute exactly is refused.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.config import POSITIVE, ConfigError, check_size
from jaxrl_po.language.rope import Rope
from jaxrl_po.language.transformer import Transformer

LLAMA, QWEN2, QWEN3, GEMMA = FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text")
ARCHITECTURES = {
    LLAMA: "LlamaForCausalLM",
    QWEN2: "Qwen2ForCausalLM",
    QWEN3: "Qwen3ForCausalLM",
    GEMMA: "Gemma3ForCausalLM",
}
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
}
WINDOWED, WHOLE = "sliding_attention", "full_attention"
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
)
NUMBERS = ("rms_norm_eps", "query_pre_attn_scalar", "rope_theta", "rope_local_base_freq")


class Tensor(NamedTuple):
    """Tensor of a checkpoint, and the parameter that it becomes, or the slice for one block.

    Attributes:
      name: name of the tensor in the file.
      path: path of the parameter in the `Transformer`.
      layer: index of the block; None for a parameter outside the blocks.
      transposed: True if the file holds `[outputs, inputs]` and the parameter `[inputs, outputs]`.
      offset: number that is added to the tensor to get the parameter.
    """

    name: str
    path: tuple[str, ...]
    layer: int | None = None
    transposed: bool = False
    offset: float = 0.0


def read(
    settings: Mapping[str, Any], *, dtype: Any = "float32", remat: bool = False
) -> Transformer:
    """Builds the transformer that a `config.json` describes.

    Args:
      settings: content of the `config.json`.
      dtype: type of the matrix products.
      remat: True to recompute activations in the backward pass, see `Transformer`.

    Raises:
      ConfigError: an unknown family, a missing entry, or an entry that requests a computation which
        the transformer lacks.
    """
    family = settings.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            "folder", f"model_type must be one of {', '.join(FAMILIES)}, got {family!r}"
        )
    try:
        _check_types(family, settings)
        return _read(family, settings, jnp.dtype(dtype), remat)
    except KeyError as missing:
        raise ConfigError(
            "folder", f"config.json of {family} must have {missing.args[0]!r}"
        ) from None


def _read(family: str, settings: Mapping[str, Any], dtype: Any, remat: bool) -> Transformer:
    gemma = family == GEMMA
    _require(settings, "attention_bias", False)
    _require(settings, "mlp_bias", False)
    _require(settings, "use_sliding_window", False)
    _require(settings, "use_bidirectional_attention", False)
    _require(settings, "attn_logit_softcapping", None)
    _require(settings, "final_logit_softcapping", None)
    name = settings["hidden_activation" if gemma else "hidden_act"]
    if name not in ACTIVATIONS:
        raise ConfigError(
            "folder", f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {name!r}"
        )
    width, heads, layers = (
        settings[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    if not gemma and set(settings.get("layer_types") or [WHOLE]) != {WHOLE}:
        raise ConfigError("folder", f"layer_types of {family} must all be {WHOLE}")
    size = settings.get("head_dim") or width // heads
    windows = _windows(settings, layers) if gemma else ()
    rope, window_rope = _ropes(settings, gemma)
    return Transformer(
        vocabulary=settings["vocab_size"],
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_size=size,
        mlp_width=settings["intermediate_size"],
        activation=ACTIVATIONS[name],
        # Checkpoints omit this entry where it has the family's default.
        tied=settings.get("tie_word_embeddings", gemma),
        tied_scale=1.0,
        embedding_scale=math.sqrt(width) if gemma else 1.0,
        qkv_bias=family == QWEN2,
        qk_norm=family in (QWEN3, GEMMA),
        query_scale=settings["query_pre_attn_scalar"] ** -0.5 if gemma else 0.0,
        post_norms=gemma,
        epsilon=settings["rms_norm_eps"],
        rope=rope,
        windows=windows,
        window_rope=window_rope,
        dtype=dtype,
        remat=remat,
    )


def _check_types(family: str, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value of the wrong type, and for quantized weights."""
    for name, value in settings.items():
        subject = f"config.json of {family}: {name}"
        if value is None:
            continue
        if name in SIZES and (name != "sliding_window" or family == GEMMA):
            check_size("folder", value, part=subject)
        if name in NUMBERS and (type(value) not in (int, float) or value not in POSITIVE):
            raise ConfigError("folder", f"{subject} must be a number in {POSITIVE}, got {value!r}")
        if name == "tie_word_embeddings" and not isinstance(value, bool):
            raise ConfigError("folder", f"{subject} must be true or false, got {value!r}")
        if name == "quantization_config":
            raise ConfigError(
                "folder", f"{subject} must be left out, got {value!r}: dequantize the weights"
            )


def _require(settings: Mapping[str, Any], name: str, value: Any) -> None:
    given = settings.get(name, value)
    if given != value:
        raise ConfigError("folder", f"{name} must be {value} or left out, got {given}")


def _windows(settings: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Returns the attention window of each layer, 0 for full attention."""
    period = settings.get("sliding_window_pattern", settings.get("_sliding_window_pattern", 6))
    kinds = settings.get("layer_types") or [
        WHOLE if (layer + 1) % period == 0 else WINDOWED for layer in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {WHOLE, WINDOWED}:
        raise ConfigError(
            "folder", f"layer_types must be {layers} of {WINDOWED} and {WHOLE}, got {kinds}"
        )
    return tuple(settings["sliding_window"] if kind == WINDOWED else 0 for kind in kinds)


def _ropes(settings: Mapping[str, Any], gemma: bool) -> tuple[Rope, Rope | None]:
    """Reads the RoPE of layers without and with a window, in the old or the new spelling."""
    new, old = settings.get("rope_parameters") or {}, settings.get("rope_scaling")
    theta, local = settings.get("rope_theta"), settings.get("rope_local_base_freq")
    if not gemma:
        return _agreed([new, old], theta, 1e4), None
    whole, windowed = (new.get(WHOLE), new.get(WINDOWED)) if WHOLE in new else (new, None)
    return _agreed([whole, old], theta, 1e6), _agreed([windowed], local, 1e4)


def _agreed(
    spellings: Sequence[Mapping[str, Any] | None], theta: float | None, default: float
) -> Rope:
    """Returns the RoPE that all entries describe; raises ConfigError if the entries differ.

    Args:
      spellings: entries that a file may have for the same RoPE; any entry may be None.
      theta: base θ that the file gives in a separate entry, or None.
      default: base θ that is used if the file does not give one.
    """
    given = [spelling for spelling in spellings if spelling]
    found = {float(each["rope_theta"]) for each in given if "rope_theta" in each}
    found |= set() if theta is None else {float(theta)}
    base = next(iter(found), default)
    ropes = {_rope({**each, "rope_theta": base}) for each in given or [{}]}
    if len(found) > 1 or len(ropes) > 1:
        raise ConfigError(
            "folder",
            f"rope_parameters, rope_scaling and rope_theta must agree, got {given} and {theta}",
        )
    return ropes.pop()


def _rope(settings: Mapping[str, Any]) -> Rope:
    _require(settings, "partial_rotary_factor", 1.0)
    kind = settings.get("rope_type", settings.get("type", "default"))
    theta = float(settings["rope_theta"])
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, float(settings["factor"]))
    if kind == "llama3":
        context = settings["original_max_position_embeddings"]
        factors = (float(settings[name]) for name in ("low_freq_factor", "high_freq_factor"))
        return Rope(theta, float(settings["factor"]), context, *factors)
    raise ConfigError("folder", f"rope_type must be default, linear or llama3, got {kind!r}")


def tensors(model: Transformer) -> Iterator[Tensor]:
    """Yields each tensor of a model's checkpoint, with the parameter that the tensor becomes."""
    # Gemma stores w where its norms scale by 1 + w; only Gemma has a second pair of norms per
    # block.
    norm = functools.partial(Tensor, offset=1.0 if model.post_norms else 0.0)
    yield Tensor("model.embed_tokens.weight", ("embedding",))
    for layer in range(model.layers):
        for tensor in _block(model, norm):
            name = f"model.layers.{layer}.{tensor.name}"
            yield tensor._replace(name=name, path=("blocks", *tensor.path), layer=layer)
    yield norm("model.norm.weight", ("final_norm", "scale"))
    if not model.tied:
        yield Tensor("lm_head.weight", ("output", "kernel"), transposed=True)


def _block(model: Transformer, norm: Callable[..., Tensor]) -> Iterator[Tensor]:
    """Yields the tensors of one block, with names and paths relative to the block."""
    yield norm("input_layernorm.weight", ("attention_norm", "scale"))
    for short, long in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
        linear = f"self_attn.{short}_proj"
        yield Tensor(f"{linear}.weight", ("attention", long, "kernel"), transposed=True)
        if model.qkv_bias and short != "o":
            yield Tensor(f"{linear}.bias", ("attention", long, "bias"))
    if model.qk_norm:
        for short, long in (("q", "query"), ("k", "key")):
            path = ("attention", f"{long}_norm", "scale")
            yield norm(f"self_attn.{short}_norm.weight", path)
    before = "pre_feedforward_layernorm" if model.post_norms else "post_attention_layernorm"
    yield norm(f"{before}.weight", ("mlp_norm", "scale"))
    if model.post_norms:
        yield norm("post_attention_layernorm.weight", ("attention_post_norm", "scale"))
        yield norm("post_feedforward_layernorm.weight", ("mlp_post_norm", "scale"))
    for name in ("gate", "up", "down"):
        yield Tensor(f"mlp.{name}_proj.weight", ("mlp", name, "kernel"), transposed=True)


def write(model: Transformer) -> dict[str, Any]:
    """Returns the entries of a `config.json` from which `read` builds the same model.

    Raises:
      ConfigError: no family computes the same function as the model; the message names the first
        setting that differs.
    """
    family = LLAMA
    if model.qk_norm:
        family = GEMMA if model.post_norms else QWEN3
    elif model.qkv_bias:
        family = QWEN2
    meant = _meaning(model)
    names = {function: name for name, function in ACTIVATIONS.items()}
    settings: dict[str, Any] = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": meant["kv_heads"],
        "head_dim": model.size,
        "intermediate_size": meant["mlp_width"],
        "hidden_activation" if family == GEMMA else "hidden_act": names.get(
            meant["activation"], "silu"
        ),
        "tie_word_embeddings": model.tied,
        "rms_norm_eps": model.epsilon,
        "rope_parameters": rope_settings(model.rope),
        **former_rope_settings(model.rope),
    }
    if family == GEMMA:
        windowed = model.window_rope or model.rope
        settings |= {
            "query_pre_attn_scalar": round(meant["query_scale"] ** -2),
            "sliding_window": max(model.windows, default=0) or 1,
            "layer_types": [WINDOWED if window else WHOLE for window in meant["windows"]],
            "rope_parameters": {
                WHOLE: rope_settings(model.rope),
                WINDOWED: rope_settings(windowed),
            },
            "rope_local_base_freq": windowed.theta,
        }
    for name, value in _meaning(read(settings)).items():
        if meant[name] != value:
            raise ConfigError(
                "model",
                f"must be one of {', '.join(FAMILIES)} to be written; it is nearest to {family}, "
                f"where {name} is {value}, got {meant[name]}",
            )
    return settings


def _meaning(model: Transformer) -> dict[str, Any]:
    """Returns the settings that determine the outputs, with defaults filled in."""
    return {
        "kv_heads": model.kv_heads or model.heads,
        "mlp_width": model.mlp_width or 4 * model.width,
        "gated": model.gated,
        "activation": model.activation or (jax.nn.silu if model.gated else jax.nn.gelu),
        "tied_scale": (model.tied_scale or model.width**-0.5) if model.tied else 1.0,
        "embedding_scale": model.embedding_scale,
        "qkv_bias": model.qkv_bias,
        "qk_norm": model.qk_norm,
        "query_scale": model.query_scale or model.size**-0.5,
        "post_norms": model.post_norms,
        "rope": model.rope,
        "windows": model.windows or (0,) * model.layers,
        "window_rope": (model.window_rope or model.rope) if any(model.windows) else None,
    }


def former_rope_settings(rope: Rope) -> dict[str, Any]:
    """Returns `rope_theta` and `rope_scaling`, since `transformers` 4 ignores `rope_parameters`."""
    scaling = rope_settings(rope)
    theta = scaling.pop("rope_theta")
    stretched = {"rope_scaling": scaling} if scaling["rope_type"] != "default" else {}
    return {"rope_theta": theta} | stretched


def rope_settings(rope: Rope) -> dict[str, Any]:
    """Returns the entries of `rope_parameters` in `config.json` for a RoPE."""
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.factor != 1.0 or rope.context:
        settings |= {"rope_type": "llama3" if rope.context else "linear", "factor": rope.factor}
    if rope.context:
        settings |= {
            "original_max_position_embeddings": rope.context,
            "low_freq_factor": rope.low,
            "high_freq_factor": rope.high,
        }
    return settings
