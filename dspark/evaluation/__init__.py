"""Measuring drafters, and showing what was measured."""
