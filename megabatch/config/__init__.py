"""The configuration of a run: sections of settings that check themselves, and what follows."""

from megabatch.config.run import Config
from megabatch.config.sections import Data, LearningRate, Noise, OptimizerConfig
from megabatch.config.settings import check_setting

__all__ = ["Config", "Data", "LearningRate", "Noise", "OptimizerConfig", "check_setting"]
