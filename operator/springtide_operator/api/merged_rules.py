"""The rules between fields of a spec, for one that the API server has never seen: a job's, merged into its
template's. PURE.

They are those of `spec_rules`; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from springtide_operator.api import spec_rules
from springtide_operator.api.all_reduce import Compression, Shard
from springtide_operator.api.elasticity import ElasticityPolicy
from springtide_operator.api.model import StrategyType, TrainingJobSpec
from springtide_operator.api.names import MAX_WORKERS
from springtide_operator.api.servers import Consistency, PushCompression


def broken(spec: TrainingJobSpec) -> list[str]:
    """Return what a spec has against the rules: for each that does not hold, the field and the text that the
    API server would say.

    Args:
        spec: whole, defaults included.
    """
    return [
        f"{where}{rule['fieldPath'].removeprefix('.')}: {rule['message']}"
        for where, rule, holds in _RULES
        if not holds(spec)
    ]


def _replicas_between(spec: TrainingJobSpec) -> bool:
    workers = spec.workers
    return workers.min_replicas <= workers.replicas <= workers.maximum


def _standbys_within_all(spec: TrainingJobSpec) -> bool:
    workers = spec.workers
    return (workers.max_replicas or workers.replicas) + workers.standby <= MAX_WORKERS


def _exact_needs_maximum(spec: TrainingJobSpec) -> bool:
    most, sums = spec.workers.max_replicas, spec.strategy.all_reduce
    return not sums.exact or (
        most is not None and most * spec.workers.processes_per_pod <= sums.logical_workers
    )


def _exact_uncompressed(spec: TrainingJobSpec) -> bool:
    return not spec.strategy.all_reduce.exact or spec.strategy.all_reduce.compression is Compression.NONE


def _compression_of_collectives(spec: TrainingJobSpec) -> bool:
    plain = spec.strategy.all_reduce.compression is Compression.NONE
    return plain or spec.strategy.type is not StrategyType.PARAMETER_SERVER


def _compression_of_pushes(spec: TrainingJobSpec) -> bool:
    plain = spec.strategy.parameter_server.compression is PushCompression.NONE
    return plain or spec.strategy.type is not StrategyType.ALL_REDUCE


def _no_top_k_with_tables(spec: TrainingJobSpec) -> bool:
    top_k = spec.strategy.parameter_server.compression is PushCompression.TOP_K
    return not top_k or spec.strategy.type is not StrategyType.HYBRID


def _exact_without_servers(spec: TrainingJobSpec) -> bool:
    return not spec.strategy.all_reduce.exact or spec.strategy.type is StrategyType.ALL_REDUCE


def _shards_without_servers(spec: TrainingJobSpec) -> bool:
    return spec.strategy.all_reduce.shard is Shard.NONE or spec.strategy.type is StrategyType.ALL_REDUCE


def _shards_uncompressed(spec: TrainingJobSpec) -> bool:
    sums = spec.strategy.all_reduce
    return sums.shard is Shard.NONE or sums.compression is Compression.NONE


def _servers_of_a_strategy(spec: TrainingJobSpec) -> bool:
    return spec.parameter_servers is None or spec.strategy.type is not StrategyType.ALL_REDUCE


def _copies_on_servers(spec: TrainingJobSpec) -> bool:
    alone = spec.strategy.type is StrategyType.ALL_REDUCE
    return alone or spec.strategy.parameter_server.replication <= spec.servers


def _hybrid_in_common_steps(spec: TrainingJobSpec) -> bool:
    common = spec.strategy.parameter_server.consistency is Consistency.SYNCHRONOUS
    return common or spec.strategy.type is not StrategyType.HYBRID


def _groups_need_servers(spec: TrainingJobSpec) -> bool:
    return spec.workers.group_size == 1 or spec.strategy.type is StrategyType.PARAMETER_SERVER


def _capacity_needs_maximum(spec: TrainingJobSpec) -> bool:
    return spec.elasticity.policy is not ElasticityPolicy.CAPACITY or spec.workers.max_replicas is not None


_WORKERS, _SPEC = "spec.workers.", "spec."
_RULES: tuple[tuple[str, dict[str, Any], Callable[[TrainingJobSpec], bool]], ...] = (
    (
        _WORKERS,
        spec_rules.MINIMUM_BELOW_MAXIMUM,
        lambda spec: spec.workers.min_replicas <= spec.workers.maximum,
    ),
    (_WORKERS, spec_rules.REPLICAS_BETWEEN, _replicas_between),
    (_WORKERS, spec_rules.STANDBYS_WITHIN_ALL, _standbys_within_all),
    (_SPEC, spec_rules.EXACT_NEEDS_MAXIMUM, _exact_needs_maximum),
    (_SPEC, spec_rules.EXACT_UNCOMPRESSED, _exact_uncompressed),
    (_SPEC, spec_rules.COMPRESSION_OF_COLLECTIVES, _compression_of_collectives),
    (_SPEC, spec_rules.COMPRESSION_OF_PUSHES, _compression_of_pushes),
    (_SPEC, spec_rules.NO_TOP_K_WITH_TABLES, _no_top_k_with_tables),
    (_SPEC, spec_rules.EXACT_WITHOUT_SERVERS, _exact_without_servers),
    (_SPEC, spec_rules.SHARDS_WITHOUT_SERVERS, _shards_without_servers),
    (_SPEC, spec_rules.SHARDS_UNCOMPRESSED, _shards_uncompressed),
    (_SPEC, spec_rules.SERVERS_OF_A_STRATEGY, _servers_of_a_strategy),
    (_SPEC, spec_rules.COPIES_ON_SERVERS, _copies_on_servers),
    (_SPEC, spec_rules.HYBRID_IN_COMMON_STEPS, _hybrid_in_common_steps),
    (_SPEC, spec_rules.GROUPS_NEED_SERVERS, _groups_need_servers),
    (_SPEC, spec_rules.CAPACITY_NEEDS_MAXIMUM, _capacity_needs_maximum),
)
