"""Train a model that is divided among the processes of a pod (fully_shard, tensor parallelism), pod by pod.

The pods are what the job gains and loses; the processes of one pod commit together, or none of them does.
"""
