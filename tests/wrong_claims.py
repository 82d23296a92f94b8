"""Planted mistakes in claims: verdicts from the wrong side, seeds that are used twice, edges that
pass."""

from wrong import table

WRONG = table("""
a run that failed is dropped
  experiments.studies.claims.claim: test_studies.py::test_a_run_that_failed_counts_as_the_worst
  - np.where(np.isfinite(runs), runs, known.min() if known.size else 0.0)
  + runs
a verdict from few seeds
  experiments.studies.claims.claim: test_studies.py::test_fewer_than_five_seeds_tell_nothing
  - LEAST_SEEDS = 5
  + LEAST_SEEDS = 1
only a larger difference is as far
  experiments.studies.claims.claim: test_studies.py::test_arms_that_are_alike_are_rarely_told_apart
  - np.abs(draws) >= abs(whole)
  + draws >= abs(whole)
a verdict although an arm is at the edge of its sweep
  experiments.studies.claims.claim:
    test_studies.py::test_arm_at_sweep_edge_gives_no_verdict
  - told = rejected and enough and all(each.inside for each in used)
  + told = rejected
the margin is zero
  experiments.studies.claims.claim:
    test_studies.py::test_difference_beyond_the_margin_holds
  - side = HOLDS if outcome.difference > comparison.by else FAILS
  + side = HOLDS if outcome.difference > 0 else FAILS
settings are pooled before the tails are cut
  experiments.studies.claims.claim: test_studies.py::test_no_setting_is_cut_as_a_tail
  - return np.mean([statistics.interquartile_mean(runs) for runs in arm], axis=0)
  + return statistics.interquartile_mean(np.concatenate(arm))
no correction for several comparisons
  experiments.studies.claims.claim:
    test_studies.py::test_holm_is_stricter_for_the_first
  - if p[i] > level / (len(p) - rank):
  + if p[i] > level:
what is reported was tuned on
  experiments.studies.claims.trial: test_studies.py::test_a_sweep_goes_on_beyond_its_edge
  - curves = runs.train(asked, runs.seeds[1], TUNING)
  + curves = runs.train(asked, runs.seeds[1], REPORTED)
a sweep ends at its edge
  experiments.studies.claims.trial: test_studies.py::test_a_sweep_goes_on_beyond_its_edge
  - if tried[0] < best < tried[-1]:
  + if tried[0] <= best <= tried[-1]:
a run that diverged is the best
  experiments.studies.claims.trial: test_studies.py::test_a_diverged_value_is_never_the_best
  - nan=-np.inf
  + nan=np.inf
an initial policy is made again at each start
  experiments.studies.claims.trial: test_studies.py::test_an_initial_policy_is_made_once
  - if not (place / "summary.json").exists():
  + if True:
""")
