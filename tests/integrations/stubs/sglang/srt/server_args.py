"""Arguments of the command line, with their choices."""

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

__all__ = ["ATTENTION_BACKEND_CHOICES"]
