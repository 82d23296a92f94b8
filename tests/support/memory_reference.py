"""Implements memory networks from their papers in NumPy, one row and one step at a time.

The networks have no mask, no cache and no batch.

GTrXL: Parisotto et al. 2019 (arXiv:1910.06764), with the position biases of Raffel et al. 2020
(arXiv:1910.10683). GRU: Cho et al. 2014 (arXiv:1406.1078), with the candidate's bias as in cuDNN.
"""

import itertools

import numpy as np

# Settings of `control.NetworkSettings` beside each kind of memory.
SIZES = {"gru": {}, "transformer": {"memory_window": 3, "memory_layers": 2, "memory_heads": 2}}


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def dense(params, x):
    return x @ params["kernel"] + params.get("bias", 0.0)


def norm(params, x):
    centred = x - x.mean()
    return centred / np.sqrt(np.mean(centred**2) + 1e-6) * params["scale"] + params["bias"]


def gate(params, x, y):
    """Computes a gate; the parameters `W_r, U_r, W_z, U_z, W_n, U_n` are numbered from 0; the bias
    of W_z is −b."""
    w_r, u_r, w_z, u_z, w_n, u_n = (params[f"Dense_{i}"] for i in range(6))
    r = sigmoid(dense(w_r, y) + dense(u_r, x))
    z = sigmoid(dense(w_z, y) + dense(u_z, x))
    return (1 - z) * x + z * np.tanh(dense(w_n, y) + dense(u_n, r * x))


def layer(params, x, past):
    """Computes a layer at one step x `[H]`, from the steps before x, most recent first."""
    heads, size = len(params["bias"]), len(x)
    d = size // heads
    seen = [norm(params["LayerNorm_0"], each) for each in (x, *past)]
    read = np.zeros(size)
    for head in range(heads):
        own = slice(head * d, (head + 1) * d)
        query, key, value = (params[name][:, own] for name in ("query", "key", "value"))
        scores = [
            (seen[0] @ query) @ (other @ key) / np.sqrt(d) + params["bias"][head, ago]
            for ago, other in enumerate(seen)
        ]
        weights = np.exp(scores) / np.exp(scores).sum()
        for weight, other in zip(weights, seen, strict=True):
            read[own] += weight * (other @ value)
    y = gate(params["Gate_0"], x, np.maximum(dense(params["Dense_0"], read), 0))
    wide = np.maximum(dense(params["Dense_1"], norm(params["LayerNorm_1"], y)), 0)
    return gate(params["Gate_1"], y, np.maximum(dense(params["Dense_2"], wide), 0))


def transformer(params, episode, window):
    """Computes the output of an episode's last step `[t, D]`; a layer attends to `window` past
    steps."""
    stream = [dense(params["Dense_0"], x) for x in episode]
    for number in itertools.takewhile(lambda i: f"Layer_{i}" in params, itertools.count()):
        stream = [
            layer(params[f"Layer_{number}"], x, stream[max(t - window, 0) : t][::-1])
            for t, x in enumerate(stream)
        ]
    return stream[-1]


def gru(params, episode, window):
    del window
    cell = params["GRUCell_0"]
    h = np.zeros(len(cell["hn"]["bias"]))
    for x in episode:
        r = sigmoid(dense(cell["ir"], x) + dense(cell["hr"], h))
        z = sigmoid(dense(cell["iz"], x) + dense(cell["hz"], h))
        n = np.tanh(dense(cell["in"], x) + r * dense(cell["hn"], h))
        h = (1 - z) * n + z * h
    return h


def outputs(memory, params, features, begins, final, window):
    """Returns outputs `[T, B, H]` of each step, and outputs of `final` one step later."""
    steps, rows, _ = features.shape
    found, follow = ([[None] * rows for _ in range(steps)] for _ in range(2))
    for t, row in itertools.product(range(steps), range(rows)):
        start = max((i for i in range(t + 1) if begins[i, row]), default=0)
        episode = features[start : t + 1, row]
        found[t][row] = memory(params, episode, window)
        follow[t][row] = memory(params, [*episode, final[t, row]], window)
    return np.array(found), np.array(follow)
