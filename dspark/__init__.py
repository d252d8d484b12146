"""A drafter for speculative decoding: its data, model, training mathematics, decoding and evaluation."""

__version__ = "0.1.0"
