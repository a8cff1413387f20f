"""Kernels that the simulator is tested with, each with its inputs and what it should compute."""
