"""Sources of readings: one folder a component."""
