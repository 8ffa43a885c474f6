"""Triton kernels, where they pay. Each has a plain twin elsewhere and a test that they agree."""
