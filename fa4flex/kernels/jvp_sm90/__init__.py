"""The Hopper kernel of attention and its tangents."""
