"""Ferrule's runtime: an agent loop on a board, under a hard memory budget."""

__version__ = "0.1.0"

__all__ = ["__version__"]
