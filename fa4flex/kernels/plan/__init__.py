"""Plan: facts, shapes and a chip's limits become tiles, roles, memory and a topology; data only."""
