"""Exporters: one folder a component, named as in the YAML; nothing is imported until a file names it."""
