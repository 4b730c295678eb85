"""The simulated cluster: what a step takes on hardware that is not there."""
