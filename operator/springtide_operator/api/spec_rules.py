"""The rules between fields of a TrainingJob's spec, in CEL, as the API server evaluates them.

Most fields have no default in the CRD (`springtide_operator.api.crd`): what a job leaves out may come from
the template that it names. So a rule takes the default itself where a field is absent (`_value`). A job that
names a template is checked by the operator once more, with the template's fields (`merged_rules`).
"""

from __future__ import annotations

from typing import Any

from springtide_operator.api.base import rule
from springtide_operator.api.names import MAX_WORKERS

Rule = dict[str, Any]


def _value(path: str, default: str, self: str = "self") -> str:
    """Return the expression for a field that may be absent.

    Args:
        path: of the field; the objects above it are always there, since they have a default.
        default: of the field, in CEL.
        self: the object that the path begins at.
    """
    return f"(has({self}.{path}) ? {self}.{path} : {default})"


def _immutable(path: str, default: str) -> Rule:
    """Return the rule of a field that never changes: not even from absent to its default in a job with a
    template, since there an absent field is the template's.

    Args:
        path: of the field.
        default: of the field, in CEL.
    """
    return rule(
        f"(!has(self.templateRef) || has(self.{path}) == has(oldSelf.{path}))"
        f" && {_value(path, default)} == {_value(path, default, 'oldSelf')}",
        f"{path} is immutable: create a new job",
        reason="FieldValueInvalid",
        fieldPath=f".{path}",
    )


def _unless_template(expression: str, message: str, **more: str) -> Rule:
    """Return a rule that holds for any job with a template: the operator sees what the two are together.

    Args:
        expression: the rule, which must be true of a job without one.
        message: text for the user when it is not.
        more: `reason` and `fieldPath`.
    """
    return rule(f"has(self.templateRef) || ({expression})", message, **more)


_TYPE = _value("strategy.type", "'AllReduce'")
_EXACT = _value("strategy.allReduce.exact", "false")
_SHARD = _value("strategy.allReduce.shard", "'None'")
_COMPRESSION = _value("strategy.allReduce.compression", "'None'")
_PUSH_COMPRESSION = _value("strategy.parameterServer.compression", "'None'")
_CONSISTENCY = _value("strategy.parameterServer.consistency", "'Synchronous'")
_PROCESSES = _value("workers.processesPerPod", "1")
_POLICY = _value("elasticity.policy", "'Manual'")
_POD = "self.workers.template"

MINIMUM_BELOW_MAXIMUM = rule(
    "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
    "workers.minReplicas must not be greater than workers.maxReplicas",
    reason="FieldValueInvalid",
    fieldPath=".minReplicas",
)
REPLICAS_BETWEEN = rule(
    "(!has(self.minReplicas) || self.replicas >= self.minReplicas)"
    " && (!has(self.maxReplicas) || self.replicas <= self.maxReplicas)",
    "workers.replicas must lie between workers.minReplicas and workers.maxReplicas",
    reason="FieldValueInvalid",
    fieldPath=".replicas",
)
STANDBYS_WITHIN_ALL = rule(
    "!has(self.standby)"
    " || (has(self.maxReplicas) ? self.maxReplicas : self.replicas) + self.standby"
    f" <= {MAX_WORKERS}",
    "workers.standby and workers.maxReplicas (without it: workers.replicas) must be"
    f" {MAX_WORKERS} together at most",
    reason="FieldValueInvalid",
    fieldPath=".standby",
)
EXACT_NEEDS_MAXIMUM = _unless_template(
    f"!{_EXACT} || (has(self.workers.maxReplicas) && self.workers.maxReplicas * {_PROCESSES}"
    f" <= {_value('strategy.allReduce.logicalWorkers', '8')})",
    "with strategy.allReduce.exact, workers.maxReplicas must be given, and maxReplicas x"
    " processesPerPod be at most strategy.allReduce.logicalWorkers (default 8): a process"
    " without a logical part has nothing to compute",
    reason="FieldValueInvalid",
    fieldPath=".workers.maxReplicas",
)
EXACT_UNCOMPRESSED = _unless_template(
    f"!{_EXACT} || {_COMPRESSION} == 'None'",
    "strategy.allReduce.exact and compression exclude each other: set compression to None, or exact to false",
    reason="FieldValueForbidden",
    fieldPath=".strategy.allReduce.compression",
)
COMPRESSION_OF_COLLECTIVES = _unless_template(
    f"{_COMPRESSION} == 'None' || {_TYPE} != 'ParameterServer'",
    "strategy.allReduce.compression is for strategy.type AllReduce and Hybrid only",
    reason="FieldValueForbidden",
    fieldPath=".strategy.allReduce.compression",
)
COMPRESSION_OF_PUSHES = _unless_template(
    f"{_PUSH_COMPRESSION} == 'None' || {_TYPE} != 'AllReduce'",
    "strategy.parameterServer.compression is for strategy.type ParameterServer and Hybrid only",
    reason="FieldValueForbidden",
    fieldPath=".strategy.parameterServer.compression",
)
NO_TOP_K_WITH_TABLES = _unless_template(
    f"{_PUSH_COMPRESSION} != 'TopK' || {_TYPE} != 'Hybrid'",
    "strategy.parameterServer.compression TopK is not for strategy.type Hybrid, where rows"
    " of tables alone go to servers: use BF16 or FP16",
    reason="FieldValueForbidden",
    fieldPath=".strategy.parameterServer.compression",
)
EXACT_WITHOUT_SERVERS = _unless_template(
    f"!{_EXACT} || {_TYPE} == 'AllReduce'",
    "strategy.allReduce.exact is for strategy.type AllReduce only",
    reason="FieldValueInvalid",
    fieldPath=".strategy.allReduce.exact",
)
SHARDS_WITHOUT_SERVERS = _unless_template(
    f"{_SHARD} == 'None' || {_TYPE} == 'AllReduce'",
    "strategy.allReduce.shard is for strategy.type AllReduce only",
    reason="FieldValueForbidden",
    fieldPath=".strategy.allReduce.shard",
)
SHARDS_UNCOMPRESSED = _unless_template(
    f"{_SHARD} == 'None' || {_COMPRESSION} == 'None'",
    "strategy.allReduce.shard and compression exclude each other: set one of them to None",
    reason="FieldValueForbidden",
    fieldPath=".strategy.allReduce.shard",
)
SERVERS_OF_A_STRATEGY = _unless_template(
    f"!has(self.parameterServers) || {_TYPE} != 'AllReduce'",
    "parameterServers is for strategy.type ParameterServer and Hybrid only: leave it out, or"
    " choose one of those",
    reason="FieldValueForbidden",
    fieldPath=".parameterServers",
)
COPIES_ON_SERVERS = _unless_template(
    f"{_TYPE} == 'AllReduce'"
    f" || {_value('strategy.parameterServer.replication', '1')} <= (has(self.parameterServers)"
    " && has(self.parameterServers.replicas) ? self.parameterServers.replicas : 1)",
    "strategy.parameterServer.replication must not be greater than parameterServers.replicas:"
    " two copies need two servers",
    reason="FieldValueInvalid",
    fieldPath=".strategy.parameterServer.replication",
)
HYBRID_IN_COMMON_STEPS = _unless_template(
    f"{_TYPE} != 'Hybrid' || {_CONSISTENCY} == 'Synchronous'",
    "strategy.type Hybrid has consistency Synchronous only: dense gradients are summed in each step",
    reason="FieldValueInvalid",
    fieldPath=".strategy.parameterServer.consistency",
)
GROUPS_NEED_SERVERS = _unless_template(
    f"{_value('workers.groupSize', '1')} == 1 || {_TYPE} == 'ParameterServer'",
    "workers.groupSize is for strategy.type ParameterServer only",
    reason="FieldValueInvalid",
    fieldPath=".workers.groupSize",
)
CAPACITY_NEEDS_MAXIMUM = _unless_template(
    f"{_POLICY} != 'Capacity' || has(self.workers.maxReplicas)",
    "elasticity.policy Capacity needs workers.maxReplicas: it says how many extra workers there may be",
    reason="FieldValueRequired",
    fieldPath=".workers.maxReplicas",
)
TEMPLATE_NEEDED = _unless_template(
    "has(self.workers.template)",
    "workers.template is needed, unless templateRef names a template of the platform that has one",
    reason="FieldValueRequired",
    fieldPath=".workers.template",
)
CONTAINERS_NEEDED = _unless_template(
    f"!has({_POD}) || (has({_POD}.spec) && has({_POD}.spec.containers))",
    "workers.template.spec.containers is needed, unless templateRef names a template of the platform that has"
    " them",
    reason="FieldValueRequired",
    fieldPath=".workers.template.spec",
)
IMAGES_NEEDED = _unless_template(
    f"!has({_POD}) || !has({_POD}.spec) || !has({_POD}.spec.containers)"
    f" || {_POD}.spec.containers.all(one, has(one.image))",
    "each of workers.template.spec.containers needs an image, unless templateRef names a template of the"
    " platform that has one",
    reason="FieldValueRequired",
    fieldPath=".workers.template.spec.containers",
)
URI_NEEDED = _unless_template(
    "!has(self.checkpoint) || has(self.checkpoint.uri)",
    "checkpoint.uri is needed, unless templateRef names a template of the platform that has one",
    reason="FieldValueRequired",
    fieldPath=".checkpoint",
)

MERGED = (
    EXACT_NEEDS_MAXIMUM,
    EXACT_UNCOMPRESSED,
    COMPRESSION_OF_COLLECTIVES,
    COMPRESSION_OF_PUSHES,
    NO_TOP_K_WITH_TABLES,
    EXACT_WITHOUT_SERVERS,
    SHARDS_WITHOUT_SERVERS,
    SHARDS_UNCOMPRESSED,
    SERVERS_OF_A_STRATEGY,
    COPIES_ON_SERVERS,
    HYBRID_IN_COMMON_STEPS,
    GROUPS_NEED_SERVERS,
    CAPACITY_NEEDS_MAXIMUM,
)
"""Rules between fields that may come from two places: the operator checks them of a job with a template."""

_NEEDED = (TEMPLATE_NEEDED, CONTAINERS_NEEDED, IMAGES_NEEDED, URI_NEEDED)

# A name that comes or goes later would be another job: its fields are the template's.
_SAME_TEMPLATE = rule(
    "has(self.templateRef) == has(oldSelf.templateRef) && (!has(self.templateRef)"
    " || (self.templateRef.kind == oldSelf.templateRef.kind"
    " && self.templateRef.name == oldSelf.templateRef.name))",
    "templateRef is immutable, and can be neither added nor removed: create a new job",
    reason="FieldValueForbidden",
    fieldPath=".templateRef",
)
_SAME_CLASS = rule(
    "has(self.managedBy) == has(oldSelf.managedBy)"
    " && (!has(self.managedBy) || self.managedBy == oldSelf.managedBy)",
    "managedBy is immutable, and can be neither added nor removed: create a new job",
    reason="FieldValueForbidden",
    fieldPath=".managedBy",
)
_SAME_TLS = rule(
    "has(self.security.tls) == has(oldSelf.security.tls)"
    " && (!has(self.security.tls) || self.security.tls == oldSelf.security.tls)",
    "security.tls is immutable, and can be neither added nor removed: create a new job",
    reason="FieldValueForbidden",
    fieldPath=".security.tls",
)
# A rule of the field itself does not run where the whole checkpoint goes and comes again.
_CHECKPOINT_STAYS = rule(
    "!has(oldSelf.checkpoint) || has(self.checkpoint)",
    "checkpoint cannot be removed, since its uri is immutable: create a new job",
    reason="FieldValueForbidden",
    fieldPath=".checkpoint",
)
_SAME_URI = rule(
    "!has(oldSelf.checkpoint) || !has(oldSelf.checkpoint.uri) || !has(self.checkpoint)"
    " || (has(self.checkpoint.uri) && self.checkpoint.uri == oldSelf.checkpoint.uri)",
    "checkpoint.uri is immutable: create a new job with restoreFrom",
    reason="FieldValueInvalid",
    fieldPath=".checkpoint.uri",
)
# A job without a checkpoint may have its template's.
_NO_OTHER_URI = rule(
    "!has(self.templateRef) || !has(self.checkpoint) || !has(self.checkpoint.uri)"
    " || (has(oldSelf.checkpoint) && has(oldSelf.checkpoint.uri))",
    "checkpoint.uri cannot be added to a job with templateRef, whose template may have one: create a new job",
    reason="FieldValueForbidden",
    fieldPath=".checkpoint",
)

WORKERS: list[Any] = [MINIMUM_BELOW_MAXIMUM, REPLICAS_BETWEEN, STANDBYS_WITHIN_ALL]
"""Rules of spec.workers."""

SPEC: list[Any] = [
    *MERGED,
    *_NEEDED,
    _immutable("strategy.type", "'AllReduce'"),
    _immutable("strategy.allReduce.compression", "'None'"),
    _immutable("strategy.allReduce.shard", "'None'"),
    _immutable("strategy.allReduce.exact", "false"),
    _immutable("strategy.allReduce.logicalWorkers", "8"),
    _immutable("strategy.parameterServer.compression", "'None'"),
    _immutable("strategy.parameterServer.topKRatio", "0.01"),
    _immutable("strategy.parameterServer.earlyValues", "true"),
    _immutable("strategy.parameterServer.replication", "1"),
    _immutable("workers.processesPerPod", "1"),
    _immutable("workers.groupSize", "1"),
    _SAME_TEMPLATE,
    _SAME_CLASS,
    _SAME_TLS,
    _CHECKPOINT_STAYS,
    _SAME_URI,
    _NO_OTHER_URI,
]
"""Rules of the spec as a whole."""
