"""Ferrule's converters: from a published checkpoint to a bundle."""
