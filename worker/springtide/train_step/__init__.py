"""One training step on one worker: a transaction over model, optimizers, schedulers, scaler and randomness.

The package is not called `step`, since `springtide.step()` is the function that scripts call.
"""
