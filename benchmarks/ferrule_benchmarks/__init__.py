"""Ferrule's suites: what a bundle can do, measured on tool calls."""
