"""Makes finished runs of each kind once per test run; every test that uses a run copies it.

control     PPO on CartPole-v1, two seeds, ten iterations, observations normalised, TensorBoard
language    PPO on one-digit addition, two seeds, three iterations, two samples
pretrained  GRPO with adapters over a tiny Qwen2, whose model and prompts are in `place`
host        PPO on gymnasium's CartPole-v1, two seeds on two devices, ten iterations
sweep       PPO on CartPole-v1 with two learning rates, two seeds, two evaluations
"""

import fcntl
import shutil
from pathlib import Path

import tiny
from costs import uncounted

CONTROL = [
    *(flag for flag in tiny.CONTROL if not flag.startswith("--total_steps")),
    "--total_steps=320",
    "--problem.normalize_observations",
    "--tensorboard",
]
ON_HOST = [
    *("--env=gymnasium:CartPole-v1", "--algorithm=ppo", *tiny.CONTROL, "--devices=2"),
    *("--total_steps=320", "--log_every=3", "--eval_every=2"),
    *("--problem.num_envs=2", "--problem.num_steps=16", "--problem.normalize_observations"),
]
SWEEP = [
    "--seeds=2",
    "--devices=1",
    "--total_steps=256",
    "--evaluations=2",
    "--eval_episodes=2",
    "--problem.num_envs=4",
    "--problem.num_steps=8",
    "--config.num_minibatches=2",
    "--config.num_epochs=1",
    "--config.learning_rate=1e-3,1e-2",
]


def pretrained(out: Path) -> int:
    """Writes the model and the prompts of a pretrained run into a folder beside the run."""
    import folders

    place = out.parent / "place"
    place.mkdir(exist_ok=True)
    folders.write_place(place)
    from jaxrl_po.cli import launch

    return launch.language(folders.arguments(place, out, *folders.ADAPTED, "--total_steps=24"))


def make(name: str, out: Path) -> None:
    """Trains the run with a name."""
    from jaxrl_po.cli import launch, sweep

    makers = {
        "control": lambda: launch.control([*CONTROL, f"--out={out}"]),
        "language": lambda: launch.language([*tiny.LANGUAGE, f"--out={out}"]),
        "pretrained": lambda: pretrained(out),
        "host": lambda: launch.control([*ON_HOST, f"--out={out}"]),
        "sweep": lambda: sweep.main([*SWEEP, f"--out={out}"]),
    }
    assert makers[name]() == 0


class Finished:
    """Callable `finished("control", folder)`, which copies the run of that name to a new folder.

    Args:
      root: Folder that all workers share.
    """

    def __init__(self, root: Path):
        self.root = root

    def __call__(self, name: str, copy: Path) -> Path:
        out = self.root / name / "run"
        out.parent.mkdir(parents=True, exist_ok=True)
        with (out.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other workers wait for the worker that makes the run
            if not (out.parent / "made").exists():
                shutil.rmtree(out, ignore_errors=True)  # remains of an earlier attempt that failed
                with uncounted():
                    make(name, out)
                (out.parent / "made").touch()
        shutil.copytree(out, copy)
        return copy

    @property
    def place(self) -> Path:
        """Returns the read-only folder with the model and the prompts of the run `pretrained`."""
        return self.root / "pretrained" / "place"
