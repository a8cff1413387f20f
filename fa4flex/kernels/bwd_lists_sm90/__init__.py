"""The Hopper backward pipeline for listed keys."""
