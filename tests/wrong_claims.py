"""Wrong programs of claims: verdicts from the wrong side, seeds used twice, edges that pass."""

from wrong import Wrong

HERE = "test_studies.py::"
WRONG = [
    Wrong(
        "a run that failed is dropped",
        "experiments.studies.claims.claim",
        "np.where(np.isfinite(runs), runs, known.min() if known.size else 0.0)",
        "runs",
        ("test_studies.py::test_a_run_that_failed_counts_as_the_worst",),
    ),
    Wrong(
        "a verdict from few seeds",
        "experiments.studies.claims.claim",
        "LEAST_SEEDS = 5",
        "LEAST_SEEDS = 1",
        ("test_studies.py::test_fewer_than_five_seeds_tell_nothing",),
    ),
    Wrong(
        "only a larger difference is as far",
        "experiments.studies.claims.claim",
        "np.abs(draws) >= abs(whole)",
        "draws >= abs(whole)",
        ("test_studies.py::test_arms_that_are_alike_are_rarely_told_apart",),
    ),
    Wrong(
        "a verdict although an arm is at the edge of its sweep",
        "experiments.studies.claims.claim",
        "told = rejected and enough and all(each.inside for each in used)",
        "told = rejected",
        (f"{HERE}test_no_verdict_rests_on_an_arm_at_the_edge_of_its_sweep",),
    ),
    Wrong(
        "the margin is zero",
        "experiments.studies.claims.claim",
        "side = HOLDS if outcome.difference > comparison.by else FAILS",
        "side = HOLDS if outcome.difference > 0 else FAILS",
        (f"{HERE}test_a_difference_beyond_the_margin_holds_and_one_short_of_it_does_not",),
    ),
    Wrong(
        "settings are pooled before the tails are cut",
        "experiments.studies.claims.claim",
        "return np.mean([statistics.interquartile_mean(runs) for runs in arm], axis=0)",
        "return statistics.interquartile_mean(np.concatenate(arm))",
        (f"{HERE}test_no_setting_is_cut_as_a_tail",),
    ),
    Wrong(
        "no correction for several comparisons",
        "experiments.studies.claims.claim",
        "if p[i] > level / (len(p) - rank):",
        "if p[i] > level:",
        (f"{HERE}test_holm_asks_more_of_the_first_than_of_the_last",),
    ),
    Wrong(
        "what is reported was tuned on",
        "experiments.studies.claims.trial",
        "curves = runs.train(asked, runs.seeds[1], TUNING)",
        "curves = runs.train(asked, runs.seeds[1], REPORTED)",
        (f"{HERE}test_a_sweep_goes_on_beyond_its_edge",),
    ),
    Wrong(
        "a sweep ends at its edge",
        "experiments.studies.claims.trial",
        "if tried[0] < best < tried[-1]:",
        "if tried[0] <= best <= tried[-1]:",
        (f"{HERE}test_a_sweep_goes_on_beyond_its_edge",),
    ),
    Wrong(
        "a run that diverged is the best",
        "experiments.studies.claims.trial",
        "nan=-np.inf",
        "nan=np.inf",
        (f"{HERE}test_a_diverged_value_is_never_the_best",),
    ),
    Wrong(
        "an initial policy is made again at each start",
        "experiments.studies.claims.trial",
        'if not (place / "summary.json").exists():',
        "if True:",
        (f"{HERE}test_an_initial_policy_is_made_once",),
    ),
]
