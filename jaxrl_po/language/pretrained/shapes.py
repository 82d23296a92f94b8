"""Lists sizes of published models, copied from each model's `config.json` at huggingface.co."""

from typing import Any

_LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
_QWEN: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6}

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {  # HuggingFaceTB/SmolLM2-135M
        **_LLAMA,
        "vocab_size": 49_152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {  # Qwen/Qwen2.5-0.5B
        **_QWEN,
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {  # Qwen/Qwen3-4B
        **_QWEN,
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "llama3.1-8b": {  # meta-llama/Llama-3.1-8B
        **_LLAMA,
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
}
