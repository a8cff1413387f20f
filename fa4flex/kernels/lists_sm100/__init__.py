"""Blackwell forward kernel for queries that attend to listed keys, which warps gather one by one."""
