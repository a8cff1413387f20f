"""The Blackwell backward kernel."""
