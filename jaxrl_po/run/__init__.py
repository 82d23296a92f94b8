"""The impure part: devices, files, processes, progress, plots, and the commands that a user starts.

From Python: `run.train` trains a learner of one's own, `run.load` gives the policy of a run.
"""

from jaxrl_po.run.experiment.policies import ControlPolicy as ControlPolicy
from jaxrl_po.run.experiment.policies import LanguagePolicy as LanguagePolicy
from jaxrl_po.run.experiment.policies import load as load
from jaxrl_po.run.experiment.training import Trained as Trained
from jaxrl_po.run.experiment.training import train as train
