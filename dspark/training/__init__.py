"""Blocks, objective and means: what one optimizer step computes, without any process group."""
