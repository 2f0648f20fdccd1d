"""The plan: which collectives a step runs, what they carry, and where they start and end."""
