"""Texts that the project owns: what fidelity is measured on."""
