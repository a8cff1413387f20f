"""The Blackwell forward kernel."""
