"""The cluster's control plane: watches TrainingJobs and their pods, decides in `plan`, acts by `cluster`.

It never imports torch, never talks to workers, and holds nothing that it could not read again.
"""
