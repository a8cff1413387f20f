"""The Hopper backward kernel."""
