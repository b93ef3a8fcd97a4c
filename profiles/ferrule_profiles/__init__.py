"""Ferrule's profilers: what a bundle costs on a board, and which one to ship."""
