"""Measuring models: loss on text, and what they cost."""
