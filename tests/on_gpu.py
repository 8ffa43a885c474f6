"""Marks of tests that run on a CUDA device."""

import pytest
import torch

GPU = torch.cuda.is_available()
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")]
IF_THERE_IS_ONE = [pytest.mark.gpu] if GPU else []
"""for those that run anywhere: on a machine that has a GPU they are tests of it"""
