"""Cases: a model, an engine's settings, and what is to come of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEW = 8
"""Tokens that are decoded after each prompt."""

MODS = f"0={Path(__file__).with_name('client_mods.py')}:nearer; 1=softcap(2.0), sliding_window(9)"
"""Mods by layer, as FA4FLEX_LAYERS says them; client_models.attention_with_mods is the same by definition."""

MODS_FILE = str(Path(__file__).with_name("client_layers.json"))
"""The same in a file."""


@dataclass(frozen=True)
class Case:
    """One engine that is started, asked and stopped.

    what         words for the table
    options      settings of the engine
    environment  variables of its processes
    again        prompts that begin like the first ones follow, and keys of those are used
    reference    settings of the model that tokens are compared with, where the engine leaves some out
    refused      a pattern of the message if it is right to refuse
    attention    of the model that tokens are compared with: "eager", "with_mods" with those of MODS, or
                 "rounded", over keys and values of e4m3
    """

    what: str
    model: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    again: bool = False
    reference: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    attention: str = "eager"


@dataclass(frozen=True)
class Served:
    """Tokens of each prompt, and how many tokens of the prompts were found in the cache."""

    tokens: list[list[int]]
    cached: int
