"""Checks that take the reader's own function.

    from minitrain.exercises import check

    check("ring_all_reduce", my_all_reduce)

Each chapter has a module here, `chapter_01` and on, whose `EXERCISES` are found by
name.
"""

from minitrain.exercises.framework import Exercise, Verdict, check, find, judge

__all__ = ["Exercise", "Verdict", "check", "find", "judge"]
