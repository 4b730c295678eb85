"""Parallel training: techniques that split one training step over many ranks.

Each is a function from one of the step's four values to another with the same contract;
what a technique leaves undone is written in the placements of the parameters.
"""
