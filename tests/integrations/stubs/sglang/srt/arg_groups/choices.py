"""Choices of the command line."""

ATTENTION_BACKEND_CHOICES = ["triton", "torch_native"]
