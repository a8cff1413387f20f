"""Hopper forward kernel for few query rows: keys are split between blocks, heads of a group share a tile."""
