"""Computes losses and gradients of TRL, verl and prime-rl on one small batch, by their own code.

    python tests/peer_losses.py VERL PRIME_RL    # their sources, where torch and TRL are installed

The script writes `golden_losses.json`, which `test_peer_losses.py` compares with this library's
methods. The script imports no module of this library, and runs only the files with losses of verl
and prime-rl.
"""

import collections
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock
from unittest.mock import MagicMock

import numpy as np
import torch

GOLDEN = Path(__file__).parent / "golden_losses.json"
DIGITS = 9


def batch():
    """Returns two groups of three responses of up to five tokens; ratios exceed every bound."""
    rng = np.random.default_rng(7)
    shape = (6, 5)
    now = np.log(rng.uniform(0.02, 0.9, shape))
    old = np.minimum(now + rng.normal(0.0, 0.5, shape), -0.01)
    sampler = np.minimum(old + rng.normal(0.0, 0.5, shape), -0.01)
    teacher = np.minimum(now + rng.normal(0.0, 1.0, shape), -0.01)
    reference = np.minimum(now + rng.normal(0.0, 0.5, shape), -0.01)
    sampler[0, 0], sampler[1, 1] = old[0, 0] - 2.0, old[1, 1] + 0.9 * -old[1, 1]
    old[3, 0], now[3, 0] = np.log(0.02), np.log(0.7)  # one token has a ratio of 35
    mask = np.arange(5)[None, :] < np.array([5, 3, 4, 2, 5, 1])[:, None]
    reward = np.array([1.0, 0.0, 0.5, 0.0, 0.0, 1.0])
    groups = reward.reshape(2, 3)
    advantage = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-6)
    arrays = {
        "now": now,
        "old": old,
        "sampler": sampler,
        "teacher": teacher,
        "reference": reference,
        "mask": mask,
        "reward": reward,
        "advantage": advantage.reshape(-1),
    }
    return {name: np.round(np.asarray(x, np.float64), 6) for name, x in arrays.items()}


def near_sampler(data):
    return np.minimum(data["now"] + 0.1, -0.01)


def near_old(data):
    return data["now"] + 0.1 * (data["old"] - data["now"])


def load(path, **modules):
    """Loads a module from its file, with stand-ins for the modules that it imports."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    eager = mock.patch.object(torch, "compile", return_value=lambda function: function)
    with mock.patch.dict(sys.modules, {**modules, path.stem: module}), eager:
        spec.loader.exec_module(module)
    return module


class ActorConfig(types.SimpleNamespace):
    """Part of verl's configuration that verl's losses read."""

    global_batch_info = {}  # noqa: RUF012
    clip_ratio_low = clip_ratio_high = None

    def get(self, name, default):
        return getattr(self, name, default)


def verl_modules(folder):
    device = MagicMock()
    functional = load(
        folder / "verl/utils/torch_functional.py",
        tensordict=MagicMock(),
        **{"verl": MagicMock(), "verl.utils": MagicMock(), "verl.utils.device": device},
    )
    stand_ins = {
        "verl": MagicMock(utils=MagicMock(torch_functional=functional)),
        "verl.utils": MagicMock(torch_functional=functional),
        "verl.utils.torch_functional": functional,
        "verl.utils.import_utils": MagicMock(deprecated=lambda *_: lambda f: f),
        "verl.trainer.config": MagicMock(AlgoConfig=type("AlgoConfig", (), {})),
        "verl.trainer.config.algorithm": MagicMock(),
        "verl.workers.config": MagicMock(ActorConfig=ActorConfig),
        "verl.workers.config.actor": MagicMock(),
        "verl.protocol": MagicMock(),
        "omegaconf": MagicMock(DictConfig=dict),
    }
    folder = folder / "verl/trainer/ppo"
    return [
        load(folder / name, **stand_ins) for name in ("core_algos.py", "rollout_corr_helper.py")
    ]


def tensors(data):
    found = {name: torch.tensor(x) for name, x in data.items()}
    found["now"].requires_grad_()
    return found


def with_gradient(loss, now):
    loss.backward()
    return {
        "loss": round(float(loss), DIGITS),
        "gradient": np.round(now.grad.numpy(), DIGITS).tolist(),
    }


def of_verl(core, data, name, *, weights=None, rows=False, **config):
    t = tensors(data)
    advantage = t["advantage"][:, None].expand_as(t["mask"])
    mode = "seq-mean-token-mean" if rows else "token-mean"
    loss, _ = core.POLICY_LOSS_REGISTRY[name](
        old_log_prob=t["old"],
        log_prob=t["now"],
        advantages=advantage,
        response_mask=t["mask"],
        loss_agg_mode=mode,
        config=ActorConfig(**config),
        rollout_is_weights=weights,
    )
    return with_gradient(loss, t["now"])


def of_trl(trainer, data, loss_type, **changes):
    t = tensors(data)
    inputs = {
        "prompt_ids": torch.zeros(6, 0),
        "prompt_mask": torch.zeros(6, 0),
        "completion_ids": torch.zeros(6, 5),
        "completion_mask": t["mask"],
        "advantages": t["advantage"],
        "old_per_token_logps": t["old"],
        "ref_per_token_logps": t["reference"],
        "sampling_per_token_logps": t["sampler"],
        "num_items_in_batch": t["mask"].sum(),
    }
    options = {
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "off_policy_mask_threshold": None,
    } | changes
    args = types.SimpleNamespace(
        delta=None,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        use_bias_correction_kl=options.pop("use_bias_correction_kl", False),
        steps_per_generation=1,
    )
    stub = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (t["now"], torch.zeros(6, 5), None),
        get_off_policy_mask=trainer.get_off_policy_mask,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        importance_sampling_level="token",
        loss_type=loss_type,
        args=args,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics={"train": collections.defaultdict(list)},
        **options,
    )
    return with_gradient(trainer._compute_loss(stub, None, inputs), t["now"])


def of_prime_rl(module, data):
    """Computes the sum over the tokens of each response, divided by the number of tokens."""
    t = tensors(data)
    loss = 0.0
    for row in range(6):
        kept = t["mask"][row] > 0
        inputs = module.LossInputs(
            trainer_logprobs=t["now"][row][kept],
            inference_logprobs=t["sampler"][row][kept],
            ref_logprobs=t["teacher"][row][kept],
            advantages=t["advantage"][row].expand(int(kept.sum())),
            loss_mask=torch.ones(int(kept.sum()), dtype=torch.bool),
        )
        loss = loss + module.ref_kl_loss_fn(inputs).loss
    return with_gradient(loss / t["mask"].sum(), t["now"])


def commit(folder):
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()[:12]


def main(verl, prime_rl):
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    data = batch()
    core, correction = verl_modules(verl)
    prime = load(
        prime_rl / "src/prime_rl/trainer/rl/loss.py",
        **{
            name: MagicMock(jaxtyped=lambda **_: lambda f: f, typechecker=None)
            for name in (
                *("beartype", "jaxtyping", "prime_rl", "prime_rl.configs"),
                *("prime_rl.configs.trainer", "prime_rl.utils", "prime_rl.utils.utils"),
            )
        },
    )
    against_sampler = data | {"old": data["sampler"]}
    t = tensors(data)

    def weights(threshold):
        return correction.compute_rollout_correction_weights(
            t["old"] - t["sampler"], t["mask"], rollout_is_threshold=threshold
        )[0]

    share = types.SimpleNamespace(kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    clip = {"clip_ratio": 0.2, "clip_ratio_c": 1e6}
    # prime-rl drops tokens whose probability fell by more than 0.2; the batch has no such token
    near = data | {"sampler": near_sampler(data)}
    # verl selects its tokens by the new policy, this library by the old policy; on this batch both
    # select the same tokens
    moved_little = data | {"old": near_old(data)}
    cases = {
        "trl sapo": of_trl(GRPOTrainer, data, "sapo"),
        "verl sapo": of_verl(core, data, "sapo", rows=True, tau_pos=1.0, tau_neg=1.05),
        "trl gmpo": of_trl(GMPOTrainer, data, "grpo", epsilon_low=0.4, epsilon_high=0.3),
        "verl gmpo": of_verl(
            core, data, "geo_mean", clip_ratio=0.4, clip_ratio_low=0.4, clip_ratio_high=0.3
        ),
        "trl cispo": of_trl(GRPOTrainer, data, "cispo", epsilon_high=5.0),
        "verl cispo": of_verl(
            core, data, "cispo", clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28
        ),
        "verl dppo": of_verl(
            core,
            against_sampler,
            "dppo_tv",
            clip_ratio=0.2,
            clip_ratio_low=0.1,
            clip_ratio_high=0.2,
            clip_ratio_c=20.0,
        ),
        "verl kl_cov": of_verl(core, moved_little, "kl_cov", policy_loss=share),
        "verl truncated": of_verl(core, data, "vanilla", weights=weights(2.0), **clip),
        "verl masked": of_verl(core, data, "vanilla", weights=weights("0.5_2.0"), **clip),
        "trl off-policy mask": of_trl(GRPOTrainer, data, "grpo", off_policy_mask_threshold=0.1),
        "trl reweighted kl": of_trl(
            GRPOTrainer, data, "grpo", beta=0.3, use_bias_correction_kl=True
        ),
        "prime-rl distillation": of_prime_rl(prime, near),
    }
    source = {
        "trl": importlib.metadata.version("trl"),
        "verl": commit(verl),
        "prime-rl": commit(prime_rl),
        "torch": torch.__version__,
    }
    data = data | {"near_sampler": near_sampler(data), "near_old": near_old(data)}
    inputs = {name: x.tolist() for name, x in data.items()}
    GOLDEN.write_text(json.dumps({"source": source, "inputs": inputs, "cases": cases}) + "\n")
    print(json.dumps({name: case["loss"] for name, case in cases.items()}, indent=1))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
