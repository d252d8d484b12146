"""Speculative and plain decoding."""
