"""Ferrule's targets: what boards are, and how to reach them."""
