"""What a recipe costs a model: scores as decoded from the cache, calibration, peers, and the command `eval`."""
