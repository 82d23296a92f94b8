"""The table of methods, by their names on the command line."""

from jaxrl_po.algorithms import (
    a2c,
    cispo,
    dapo,
    distillation,
    dppo,
    dr_grpo,
    gmpo,
    grpo,
    gspo,
    kl_cov,
    npg,
    pkpo,
    ppo,
    ppo_penalty,
    reinforce,
    reinforce_pp,
    rloo,
    sapo,
    sft,
    trpo,
)

WITH_CRITIC = {
    "reinforce": reinforce,
    "a2c": a2c,
    "npg": npg,
    "trpo": trpo,
    "ppo": ppo,
    "ppo_penalty": ppo_penalty,
}
IN_GROUPS = {
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
    "pkpo": pkpo,
    "kl_cov": kl_cov,
    "distillation": distillation,
}
SUPERVISED = {"sft": sft}
ALGORITHMS = WITH_CRITIC | IN_GROUPS | SUPERVISED
