"""The planner: how long a run takes on a machine, before it is started. It imports no torch.

Read chips, workload, machine, pace, cost, step, run, best and search, in this order; published
replays what papers report.
"""

from megabatch.planner.machine import Machine
from megabatch.planner.machine_file import load
from megabatch.planner.run import Forecast
from megabatch.planner.search import forecast, smallest
from megabatch.planner.settings import Setting
from megabatch.planner.workload import Workload

__all__ = ["Forecast", "Machine", "Setting", "Workload", "forecast", "load", "smallest"]
