"""Scaled products of queries, or pooled ones, and keys in float32."""
