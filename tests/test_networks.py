"""Tests orthogonal initialisation without LAPACK, and the outputs of the heads."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases

from jaxrl_po import control
from jaxrl_po.control import modules, networks


@cases("shape", (64, 64), (64, 2), (3, 17), (5, 1), (1, 5), (1, 1), (3, 3, 2, 8))
def test_orthogonal_for_every_shape(shape):
    w = networks.orthogonal(2.0)(jax.random.key(0), shape, jnp.float32)
    assert w.shape == shape
    flat = np.float64(w).reshape(-1, shape[-1])
    small = flat if flat.shape[0] >= flat.shape[1] else flat.T
    np.testing.assert_allclose(small.T @ small, 4.0 * np.eye(small.shape[1]), atol=1e-4)


def test_dtype_is_the_one_asked_for():
    w = networks.orthogonal()(jax.random.key(0), (4, 4), jnp.bfloat16)
    assert w.dtype == jnp.bfloat16


def test_initializer_is_traced_once_for_all_modules(monkeypatch):
    """Flax requests the shape of each parameter whenever it applies a module."""
    drawn, normal = [], jax.random.normal

    def counted(key, shape, dtype):
        drawn.append(shape)
        return normal(key, shape, dtype)

    monkeypatch.setattr(jax.random, "normal", counted)
    torso, x = networks.Torso((23,)), jnp.ones(29)
    variables = torso.init(jax.random.key(0), x)
    for scale in (1.0, 2.0):
        jax.jit(lambda x, scale=scale: torso.apply(variables, scale * x)).trace(x)
    assert drawn == [(29, 23)]


def test_it_draws_the_same_compiled_or_not():
    init, key = networks.orthogonal(2.0), jax.random.key(0)
    chex.assert_trees_all_equal(init(key, (9, 5)), jax.jit(lambda key: init(key, (9, 5)))(key))


# A hang inside XLA never returns to the interpreter, which would handle a signal: only a thread can
# end the hang.
@pytest.mark.timeout(120, method="thread")
def test_six_matrices_under_32_vmapped_seeds():
    """Several QR factorisations in one vmapped program hang on the CPU; the library's
    initialisation must return.

    Each matrix equals the matrix computed alone.
    """
    init = networks.orthogonal(math.sqrt(2.0))

    def six(key):
        return jnp.stack([init(k, (64, 64)) for k in jax.random.split(key, 6)])

    keys = jax.random.split(jax.random.key(0), 32)
    program = jax.jit(jax.vmap(six))
    assert "lapack" not in program.lower(keys).as_text().lower()
    w = program(keys)
    gram = jnp.einsum("nkij,nkil->nkjl", w, w, precision="highest")
    np.testing.assert_allclose(gram, np.broadcast_to(2.0 * np.eye(64), gram.shape), atol=2e-4)
    np.testing.assert_allclose(w[7, 0], init(jax.random.split(keys[7], 6)[0], (64, 64)), atol=2e-3)
    assert len(np.unique(np.asarray(w)[..., 0, 0])) == 32 * 6


def many(count, n, seed):
    init = networks.orthogonal()
    keys = jax.random.split(jax.random.key(seed), count)
    return np.float64(jax.jit(jax.vmap(lambda key: init(key, (n, n))))(keys))


def test_ill_conditioned_draws_converge_too():
    """Small Gaussian matrices are often nearly singular: a few iterations leave some matrices
    unfinished."""
    w = many(4096, 2, seed=1)
    assert np.abs(np.einsum("nij,nil->njl", w, w) - np.eye(2)).max() < 1e-4


def test_haar_moments():
    """Under Haar measure on O(n): E w = 0, E w² = 1/n, E w⁴ = 3/(n(n+2)), E tr² = 1, det is ±1.

    The QR of a Gaussian without its sign correction fails the first moment: the diagonal has one
      sign.
    """
    n, count = 4, 8192
    w = many(count, n, seed=2)
    # The bounds are five standard errors of each mean: sd(w) = 1/2, sd(w²) = √(1/8 − 1/16) = 1/4;
    # tr² has variance 2 at n = 4 (E tr⁴ = 3).
    error = 5 / math.sqrt(count)
    np.testing.assert_allclose(w.mean(0), np.zeros((n, n)), atol=error / 2)
    np.testing.assert_allclose(np.square(w).mean(0), np.full((n, n), 1 / n), atol=error / 4)
    np.testing.assert_allclose(np.power(w, 4).mean((0, 1, 2)), 3 / (n * (n + 2)), atol=error / 4)
    trace = np.trace(w, axis1=1, axis2=2)
    assert np.square(trace).mean() == pytest.approx(1.0, abs=error * math.sqrt(2.0))
    assert np.mean(np.linalg.det(w)) == pytest.approx(0.0, abs=error)


def policy(head, hidden=(8, 8)):
    return networks.Policy(networks.Torso(hidden), head)


def test_layers_have_the_scales_of_ppo():
    """The scales are √2 in the hidden layers, .01 at the policy's head, 1 at the critic's, biases
    0."""
    modules = (
        (policy(networks.CategoricalHead(3)), "head", 0.01),
        (policy(networks.GaussianHead(3)), "head", 0.01),
        (networks.Critic(networks.Torso((8, 8))), "ValueHead_0", 1.0),
    )
    made = jax.jit(
        lambda key: [module.init(key, jnp.ones(5))["params"] for module, _, _ in modules]
    )(jax.random.key(0))
    for params, (_, head, scale) in zip(made, modules, strict=True):
        layers = [params["torso"]["Dense_0"], params["torso"]["Dense_1"], params[head]["Dense_0"]]
        norms = [np.linalg.norm(np.float64(layer["kernel"]), ord=2) for layer in layers]
        np.testing.assert_allclose(norms, [math.sqrt(2.0), math.sqrt(2.0), scale], rtol=1e-4)
        assert not any(np.any(layer["bias"]) for layer in layers)


NARROW = networks.NARROW
TALL = (networks.TALL * (NARROW + 1), NARROW + 1)  # the smallest kernel that is tall but not narrow


@cases(
    "batch, shape",
    *(((3, 5), (4, columns)) for columns in (1, 2, NARROW, NARROW + 1)),
    *(((4, TALL[1]), TALL), ((4 * TALL[1] - 1,), TALL)),
)
def test_product_has_the_derivatives_of_a_matrix_product(batch, shape):
    """The derivatives agree forwards and backwards, kernel by kernel and vmapped over kernels."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, dx = (jax.random.normal(key, (*batch, shape[0])) for key in keys[:2])
    kernel, d_kernel = (jax.random.normal(key, shape) for key in keys[2:])

    def derivatives(product, x, kernel, dx, d_kernel):
        forwards = jax.jvp(product, (x, kernel), (dx, d_kernel))
        backwards = jax.grad(lambda *both: jnp.sin(product(*both)).sum(), argnums=(0, 1))(x, kernel)
        return forwards, backwards

    @functools.partial(jax.jit, static_argnums=0)
    def both(product, *arguments):
        of = functools.partial(derivatives, product)
        return of(*arguments), jax.vmap(of)(*(jnp.stack([x, -x]) for x in arguments))

    ours, wanted = (
        both(product, x, kernel, dx, d_kernel) for product in (networks.product, jnp.matmul)
    )
    chex.assert_trees_all_close(ours, wanted, rtol=1e-5)


@cases(
    "rows, shape, turned",
    (4 * TALL[1], TALL, True),
    (4 * TALL[1] - 1, TALL, False),
    (4 * TALL[1], (TALL[0] - 1, TALL[1]), False),
)
@cases("seeds", (), (2,))
def test_gradient_of_tall_kernel_is_computed_transposed(rows, shape, turned, seeds):
    def gradient(x, kernel):
        return jax.grad(lambda kernel: jnp.sin(networks.product(x, kernel)).sum())(kernel)

    arguments = jnp.ones((*seeds, rows, shape[0])), jnp.ones((*seeds, *shape))
    function = jax.vmap(gradient) if seeds else gradient
    program = jax.jit(function).lower(*arguments).compile().as_text()
    products = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", program)
    found = [tuple(int(n) for n in size.split(","))[-2:] for size in products]
    assert found == [(rows, shape[1]), shape[::-1] if turned else shape]


def test_log_std_does_not_depend_on_observation():
    module = policy(networks.GaussianHead(2, initial_log_std=-0.5))

    @jax.jit
    def spread(observation):
        distribution, params = module.init_with_output(jax.random.key(0), observation)
        return distribution.mean, distribution.log_std, params["params"]["head"]["log_std"]

    (mean, log_std, param), (other_mean, other_log_std, _) = (
        spread(jnp.ones(5)),
        spread(-2.0 * jnp.ones(5)),
    )
    assert np.any(mean != other_mean)
    for x in (log_std, other_log_std, param):
        np.testing.assert_array_equal(x, np.full(2, -0.5, np.float32))


def test_images_are_flattened_and_their_batch_axes_kept():
    image = jnp.arange(2 * 4 * 6 * 3 * 2.0).reshape(2, 4, 6, 3, 2) / 288
    critic = networks.Critic(networks.Torso((8,), observation_rank=3))
    value, params = jax.jit(critic.init_with_output)(jax.random.key(1), image)
    flat = networks.Critic(networks.Torso((8,))).apply(params, image.reshape(2, 4, 36))
    np.testing.assert_allclose(value, flat, rtol=1e-5)
    assert value.shape == (2, 4)
    assert len(np.unique(value)) == 8


@cases("kernel, stride, size", (3, 1, (5, 6)), (4, 2, (9, 8)), (8, 4, (18, 21)), (2, 2, (4, 4)))
def test_convolution_equals_xlas(kernel, stride, size):
    image = jax.random.normal(jax.random.key(0), (2, *size, 3))
    module = networks.Convolution(4, kernel, stride)
    output, params = jax.jit(module.init_with_output)(jax.random.key(1), image)
    places = kernel // stride
    weights = np.asarray(params["params"]["Dense_0"]["kernel"])
    weights = weights.reshape(places, places, stride, stride, 3, 4)
    weights = weights.transpose(0, 2, 1, 3, 4, 5).reshape(kernel, kernel, 3, 4)
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(stride, stride),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    np.testing.assert_allclose(output, jax.jit(convolve)(image, weights), atol=1e-5)


def parameters(torso, image):
    return jax.eval_shape(torso.init, jax.random.key(0), image)["params"]


def test_video_game_frames_become_the_papers_features():
    torso = networks.Torso((512,), jnp.tanh, 3, networks.FRAMES)
    made = parameters(torso, jnp.zeros((84, 84, 4), jnp.uint8))
    assert made["Dense_0"]["kernel"].shape == (7 * 7 * 64, 512)
    total = sum(x.size for x in jax.tree.leaves(made))
    assert total == 32 * 257 + 64 * 513 + 64 * 577 + 512 * 3137


def test_bytes_are_scaled_to_one():
    torso = networks.Torso((3,), observation_rank=3)
    image = jax.random.randint(jax.random.key(0), (4, 4, 2), 0, 256).astype(jnp.uint8)
    output, params = jax.jit(torso.init_with_output)(jax.random.key(1), image)
    np.testing.assert_allclose(output, torso.apply(params, image / 255.0), rtol=1e-5)


def test_activation_is_the_one_passed():
    module = networks.Torso((4,), activation=jnp.zeros_like)
    output, _ = jax.jit(module.init_with_output)(jax.random.key(0), jnp.array([0.5, -1.0]))
    np.testing.assert_array_equal(output, np.zeros(4))


def test_array_narrower_than_kernel_is_flattened():
    spaces = control.Spaces(jax.ShapeDtypeStruct((2, 3, 4), jnp.float32), num_actions=2)
    policy = modules.default_modules(spaces, control.NetworkSettings())["policy"]
    params = jax.eval_shape(policy.init, jax.random.key(0), jnp.zeros((2, 3, 4)))
    assert (2 * 3 * 4, 64) in {x.shape for x in jax.tree.leaves(params)}


def test_maps_of_many_kinds_are_embedded_before_convolution():
    def kernels(kinds):
        seen = {"map": jax.ShapeDtypeStruct((5, 6, kinds), jnp.uint8)}
        spaces = control.Spaces(seen, num_actions=2)
        policy = modules.default_modules(spaces, control.NetworkSettings(channels=3))["policy"]
        made = parameters(policy, {"map": jnp.zeros((5, 6, kinds), jnp.uint8)})
        return {x.shape for x in jax.tree.leaves(made) if x.ndim == 2}

    joined = {(3 * 4 * 3, 64), (64, 64), (64, 2)}
    assert kernels(12) == {(9 * 12, 3)} | joined
    assert kernels(13) == {(13, 3), (9 * 3, 3)} | joined
