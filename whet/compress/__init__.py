"""Smaller models, and models for other programs."""
