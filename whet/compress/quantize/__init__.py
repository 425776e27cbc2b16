"""Chooses, by measurement, which layers of a model are stored in 4, 8 or 16 bits."""
