"""Primitives that users compose. Block maps are loaded with the package: masks take them for masks."""

from fa4flex.primitives import blocks as blocks
