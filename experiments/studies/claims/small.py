"""Settings that several claims share: tasks learned in minutes, two model sizes, step sizes."""

from typing import Any

TASKS: dict[str, dict[str, Any]] = {
    "addition": {"task": "addition", "task.num_digits": 2},
    "sorting": {"task": "sorting"},
}
SIZES: dict[str, dict[str, Any]] = {
    "width 16": {"model.width": 16},
    "width 32": {"model.width": 32},
}
STEP_SIZES = (3e-4, 1e-3, 3e-3, 1e-2)
