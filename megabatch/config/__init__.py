"""The configuration of a run: sections of settings that check themselves, and what follows."""

from megabatch.config.run import Config
from megabatch.config.sections import Data, Hybrid, LearningRate, Noise, OptimizerConfig
from megabatch.config.settings import check_setting

__all__ = ["Config", "Data", "Hybrid", "LearningRate", "Noise", "OptimizerConfig", "check_setting"]
