"""The commands that answer questions: `simulate`, `sweep` and `validate`."""
