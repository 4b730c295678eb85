"""Checks that take the reader's own function."""
