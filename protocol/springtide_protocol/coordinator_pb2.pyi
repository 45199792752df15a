from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Standing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STANDING_UNSET: _ClassVar[Standing]
    STARTING: _ClassVar[Standing]
    PARKED: _ClassVar[Standing]
    ACTIVE: _ClassVar[Standing]
    ENDED: _ClassVar[Standing]
    AFTER: _ClassVar[Standing]

class ParkReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARK_REASON_UNSET: _ClassVar[ParkReason]
    STANDBY: _ClassVar[ParkReason]
    DROPPED: _ClassVar[ParkReason]
    REDUCTION_FAILED: _ClassVar[ParkReason]
    BOUNDARY: _ClassVar[ParkReason]
    FORMATION_FAILED: _ClassVar[ParkReason]
    SERVERS_LACK_STATE: _ClassVar[ParkReason]

class Doing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DOING_UNSET: _ClassVar[Doing]
    DOING_FETCHING: _ClassVar[Doing]
    DOING_COMPUTING: _ClassVar[Doing]
    DOING_REDUCING: _ClassVar[Doing]
    DOING_STEPPING: _ClassVar[Doing]
    DOING_BETWEEN: _ClassVar[Doing]
    DOING_EVALUATING: _ClassVar[Doing]
    DOING_ASKING: _ClassVar[Doing]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSET: _ClassVar[Phase]
    WAITING: _ClassVar[Phase]
    FORMING: _ClassVar[Phase]
    RUNNING: _ClassVar[Phase]
    ENDING: _ClassVar[Phase]
    AFTER_LOOP: _ClassVar[Phase]
STANDING_UNSET: Standing
STARTING: Standing
PARKED: Standing
ACTIVE: Standing
ENDED: Standing
AFTER: Standing
PARK_REASON_UNSET: ParkReason
STANDBY: ParkReason
DROPPED: ParkReason
REDUCTION_FAILED: ParkReason
BOUNDARY: ParkReason
FORMATION_FAILED: ParkReason
SERVERS_LACK_STATE: ParkReason
DOING_UNSET: Doing
DOING_FETCHING: Doing
DOING_COMPUTING: Doing
DOING_REDUCING: Doing
DOING_STEPPING: Doing
DOING_BETWEEN: Doing
DOING_EVALUATING: Doing
DOING_ASKING: Doing
PHASE_UNSET: Phase
WAITING: Phase
FORMING: Phase
RUNNING: Phase
ENDING: Phase
AFTER_LOOP: Phase

class Incarnation(_message.Message):
    __slots__ = ("number", "restart")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    number: int
    restart: int
    def __init__(self, number: _Optional[int] = ..., restart: _Optional[int] = ...) -> None: ...

class GenerationName(_message.Message):
    __slots__ = ("incarnation", "number")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    incarnation: Incarnation
    number: int
    def __init__(self, incarnation: _Optional[_Union[Incarnation, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class StateName(_message.Message):
    __slots__ = ("generation", "step")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationName
    step: int
    def __init__(self, generation: _Optional[_Union[GenerationName, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class Speaks(_message.Message):
    __slots__ = ("oldest_version", "newest_version", "capabilities")
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    oldest_version: int
    newest_version: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, oldest_version: _Optional[int] = ..., newest_version: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("id", "pod_uid", "pod_name", "local_rank", "address", "slot")
    ID_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    id: str
    pod_uid: str
    pod_name: str
    local_rank: int
    address: str
    slot: int
    def __init__(self, id: _Optional[str] = ..., pod_uid: _Optional[str] = ..., pod_name: _Optional[str] = ..., local_rank: _Optional[int] = ..., address: _Optional[str] = ..., slot: _Optional[int] = ...) -> None: ...

class Server(_message.Message):
    __slots__ = ("id", "pod_uid", "pod_name", "slot", "address", "attempt")
    ID_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    id: str
    pod_uid: str
    pod_name: str
    slot: int
    address: str
    attempt: int
    def __init__(self, id: _Optional[str] = ..., pod_uid: _Optional[str] = ..., pod_name: _Optional[str] = ..., slot: _Optional[int] = ..., address: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Consistency(_message.Message):
    __slots__ = ("mode", "staleness")
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    staleness: int
    def __init__(self, mode: _Optional[str] = ..., staleness: _Optional[int] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "parked", "store_set", "formed", "progress", "leaving", "ended", "values", "bye", "activity", "times", "evaluate", "checkpoint", "transferring", "bound_to_steps", "memory", "follow", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    STORE_SET_FIELD_NUMBER: _ClassVar[int]
    FORMED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRING_FIELD_NUMBER: _ClassVar[int]
    BOUND_TO_STEPS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    parked: Parked
    store_set: StoreEntry
    formed: Formed
    progress: Progress
    leaving: Leaving
    ended: Ended
    values: Values
    bye: Bye
    activity: Activity
    times: Times
    evaluate: Evaluate
    checkpoint: Checkpoint
    transferring: Transferring
    bound_to_steps: BoundToSteps
    memory: Memory
    follow: Follow
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., parked: _Optional[_Union[Parked, _Mapping]] = ..., store_set: _Optional[_Union[StoreEntry, _Mapping]] = ..., formed: _Optional[_Union[Formed, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., values: _Optional[_Union[Values, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., activity: _Optional[_Union[Activity, _Mapping]] = ..., times: _Optional[_Union[Times, _Mapping]] = ..., evaluate: _Optional[_Union[Evaluate, _Mapping]] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., transferring: _Optional[_Union[Transferring, _Mapping]] = ..., bound_to_steps: _Optional[_Union[BoundToSteps, _Mapping]] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., follow: _Optional[_Union[Follow, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "member", "newest_incarnation", "generation", "members", "state", "standing", "layout_hash", "leaving", "ended_stage", "opaque", "servers", "checkpoints", "consistency", "keeps_applied_batches", "bound_to_steps", "at_epoch_end", "storage", "speaks", "largest_group", "stop_seconds", "together")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NEWEST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    ENDED_STAGE_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    KEEPS_APPLIED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    BOUND_TO_STEPS_FIELD_NUMBER: _ClassVar[int]
    AT_EPOCH_END_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_GROUP_FIELD_NUMBER: _ClassVar[int]
    STOP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    member: Member
    newest_incarnation: Incarnation
    generation: GenerationName
    members: _containers.RepeatedCompositeFieldContainer[Member]
    state: StateName
    standing: Standing
    layout_hash: str
    leaving: bool
    ended_stage: int
    opaque: bool
    servers: _containers.RepeatedCompositeFieldContainer[Server]
    checkpoints: bool
    consistency: Consistency
    keeps_applied_batches: bool
    bound_to_steps: str
    at_epoch_end: bool
    storage: bool
    speaks: Speaks
    largest_group: int
    stop_seconds: int
    together: int
    def __init__(self, protocol_version: _Optional[int] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., newest_incarnation: _Optional[_Union[Incarnation, _Mapping]] = ..., generation: _Optional[_Union[GenerationName, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., state: _Optional[_Union[StateName, _Mapping]] = ..., standing: _Optional[_Union[Standing, str]] = ..., layout_hash: _Optional[str] = ..., leaving: bool = ..., ended_stage: _Optional[int] = ..., opaque: bool = ..., servers: _Optional[_Iterable[_Union[Server, _Mapping]]] = ..., checkpoints: bool = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., keeps_applied_batches: bool = ..., bound_to_steps: _Optional[str] = ..., at_epoch_end: bool = ..., storage: bool = ..., speaks: _Optional[_Union[Speaks, _Mapping]] = ..., largest_group: _Optional[int] = ..., stop_seconds: _Optional[int] = ..., together: _Optional[int] = ...) -> None: ...

class BoundToSteps(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("held_seconds",)
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    held_seconds: float
    def __init__(self, held_seconds: _Optional[float] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("parameter_bytes", "gradient_bytes", "bucket_bytes", "state_bytes", "shard", "limit_bytes", "limited_by")
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMITED_BY_FIELD_NUMBER: _ClassVar[int]
    parameter_bytes: int
    gradient_bytes: int
    bucket_bytes: int
    state_bytes: int
    shard: str
    limit_bytes: int
    limited_by: str
    def __init__(self, parameter_bytes: _Optional[int] = ..., gradient_bytes: _Optional[int] = ..., bucket_bytes: _Optional[int] = ..., state_bytes: _Optional[int] = ..., shard: _Optional[str] = ..., limit_bytes: _Optional[int] = ..., limited_by: _Optional[str] = ...) -> None: ...

class Follow(_message.Message):
    __slots__ = ("port", "secret")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    port: int
    secret: bytes
    def __init__(self, port: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class Parked(_message.Message):
    __slots__ = ("reason", "generation", "state", "layout_hash", "detail", "suspects", "restored_step", "at_epoch_end", "cannot_go_back", "reached", "largest_group", "together", "hands_over")
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_STEP_FIELD_NUMBER: _ClassVar[int]
    AT_EPOCH_END_FIELD_NUMBER: _ClassVar[int]
    CANNOT_GO_BACK_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    LARGEST_GROUP_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    HANDS_OVER_FIELD_NUMBER: _ClassVar[int]
    reason: ParkReason
    generation: GenerationName
    state: StateName
    layout_hash: str
    detail: str
    suspects: _containers.RepeatedScalarFieldContainer[str]
    restored_step: int
    at_epoch_end: bool
    cannot_go_back: bool
    reached: _containers.RepeatedScalarFieldContainer[str]
    largest_group: int
    together: int
    hands_over: bool
    def __init__(self, reason: _Optional[_Union[ParkReason, str]] = ..., generation: _Optional[_Union[GenerationName, _Mapping]] = ..., state: _Optional[_Union[StateName, _Mapping]] = ..., layout_hash: _Optional[str] = ..., detail: _Optional[str] = ..., suspects: _Optional[_Iterable[str]] = ..., restored_step: _Optional[int] = ..., at_epoch_end: bool = ..., cannot_go_back: bool = ..., reached: _Optional[_Iterable[str]] = ..., largest_group: _Optional[int] = ..., together: _Optional[int] = ..., hands_over: bool = ...) -> None: ...

class StoreEntry(_message.Message):
    __slots__ = ("generation", "key", "value")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationName
    key: str
    value: bytes
    def __init__(self, generation: _Optional[_Union[GenerationName, _Mapping]] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class StoreEntries(_message.Message):
    __slots__ = ("generation", "packed")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationName
    packed: bytes
    def __init__(self, generation: _Optional[_Union[GenerationName, _Mapping]] = ..., packed: _Optional[bytes] = ...) -> None: ...

class EntryList(_message.Message):
    __slots__ = ("entries",)
    class Entry(_message.Message):
        __slots__ = ("key", "value", "before", "after")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        BEFORE_FIELD_NUMBER: _ClassVar[int]
        AFTER_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        before: int
        after: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ..., before: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[EntryList.Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[EntryList.Entry, _Mapping]]] = ...) -> None: ...

class Formed(_message.Message):
    __slots__ = ("generation", "group_seconds", "transfer_seconds", "transfer_bytes", "restored", "server_copies", "needed_servers", "servers_unsettled")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    SERVER_COPIES_FIELD_NUMBER: _ClassVar[int]
    NEEDED_SERVERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationName
    group_seconds: float
    transfer_seconds: float
    transfer_bytes: int
    restored: Restored
    server_copies: int
    needed_servers: _containers.RepeatedScalarFieldContainer[str]
    servers_unsettled: bool
    def __init__(self, generation: _Optional[_Union[GenerationName, _Mapping]] = ..., group_seconds: _Optional[float] = ..., transfer_seconds: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., restored: _Optional[_Union[Restored, _Mapping]] = ..., server_copies: _Optional[int] = ..., needed_servers: _Optional[_Iterable[str]] = ..., servers_unsettled: bool = ...) -> None: ...

class Transferring(_message.Message):
    __slots__ = ("generation", "holder", "bytes_done", "bytes_total")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationName
    holder: str
    bytes_done: int
    bytes_total: int
    def __init__(self, generation: _Optional[_Union[GenerationName, _Mapping]] = ..., holder: _Optional[str] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...

class Restored(_message.Message):
    __slots__ = ("state", "name", "uri", "skipped")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    state: StateName
    name: str
    uri: str
    skipped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, state: _Optional[_Union[StateName, _Mapping]] = ..., name: _Optional[str] = ..., uri: _Optional[str] = ..., skipped: _Optional[_Iterable[str]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("state", "name", "uri", "error", "bytes", "seconds", "stall_seconds", "written_unix", "reason")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_UNIX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: StateName
    name: str
    uri: str
    error: str
    bytes: int
    seconds: float
    stall_seconds: float
    written_unix: float
    reason: str
    def __init__(self, state: _Optional[_Union[StateName, _Mapping]] = ..., name: _Optional[str] = ..., uri: _Optional[str] = ..., error: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., stall_seconds: _Optional[float] = ..., written_unix: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("state", "unix_time", "step_seconds", "exposed_communication_seconds", "samples", "values", "skipped", "data_seconds", "checkpoint_seconds")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_COMMUNICATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    DATA_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    state: StateName
    unix_time: float
    step_seconds: float
    exposed_communication_seconds: float
    samples: int
    values: _containers.ScalarMap[str, float]
    skipped: bool
    data_seconds: float
    checkpoint_seconds: float
    def __init__(self, state: _Optional[_Union[StateName, _Mapping]] = ..., unix_time: _Optional[float] = ..., step_seconds: _Optional[float] = ..., exposed_communication_seconds: _Optional[float] = ..., samples: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ..., skipped: bool = ..., data_seconds: _Optional[float] = ..., checkpoint_seconds: _Optional[float] = ...) -> None: ...

class Times(_message.Message):
    __slots__ = ("steps", "step_seconds", "data_seconds", "compute_seconds", "wait_seconds", "share_samples", "sample_seconds", "by_speed")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DATA_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SHARE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BY_SPEED_FIELD_NUMBER: _ClassVar[int]
    steps: int
    step_seconds: float
    data_seconds: float
    compute_seconds: float
    wait_seconds: float
    share_samples: int
    sample_seconds: float
    by_speed: bool
    def __init__(self, steps: _Optional[int] = ..., step_seconds: _Optional[float] = ..., data_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., share_samples: _Optional[int] = ..., sample_seconds: _Optional[float] = ..., by_speed: bool = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("step", "doing", "seconds", "where")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    step: int
    doing: Doing
    seconds: float
    where: str
    def __init__(self, step: _Optional[int] = ..., doing: _Optional[_Union[Doing, str]] = ..., seconds: _Optional[float] = ..., where: _Optional[str] = ...) -> None: ...

class Data(_message.Message):
    __slots__ = ("epoch", "seen", "expected", "repeated", "lost", "skipped", "total_seen", "stage", "taken")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SEEN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seen: int
    expected: int
    repeated: int
    lost: int
    skipped: int
    total_seen: int
    stage: int
    taken: Taken
    def __init__(self, epoch: _Optional[int] = ..., seen: _Optional[int] = ..., expected: _Optional[int] = ..., repeated: _Optional[int] = ..., lost: _Optional[int] = ..., skipped: _Optional[int] = ..., total_seen: _Optional[int] = ..., stage: _Optional[int] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ("step", "samples", "shards", "begun")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    step: int
    samples: int
    shards: str
    begun: str
    def __init__(self, step: _Optional[int] = ..., samples: _Optional[int] = ..., shards: _Optional[str] = ..., begun: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("commits", "data", "productive_seconds", "total_steps", "began_unix", "job_steps")
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PRODUCTIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_FIELD_NUMBER: _ClassVar[int]
    JOB_STEPS_FIELD_NUMBER: _ClassVar[int]
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    data: Data
    productive_seconds: float
    total_steps: int
    began_unix: float
    job_steps: int
    def __init__(self, commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., data: _Optional[_Union[Data, _Mapping]] = ..., productive_seconds: _Optional[float] = ..., total_steps: _Optional[int] = ..., began_unix: _Optional[float] = ..., job_steps: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("generation", "state", "stage")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationName
    state: StateName
    stage: int
    def __init__(self, generation: _Optional[_Union[GenerationName, _Mapping]] = ..., state: _Optional[_Union[StateName, _Mapping]] = ..., stage: _Optional[int] = ...) -> None: ...

class Values(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Evaluate(_message.Message):
    __slots__ = ("ask", "state", "index", "samples", "unit", "start", "stop", "sums", "weights", "kind")
    class SumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ASK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ask: int
    state: StateName
    index: int
    samples: int
    unit: int
    start: int
    stop: int
    sums: _containers.ScalarMap[str, float]
    weights: _containers.ScalarMap[str, float]
    kind: str
    def __init__(self, ask: _Optional[int] = ..., state: _Optional[_Union[StateName, _Mapping]] = ..., index: _Optional[int] = ..., samples: _Optional[int] = ..., unit: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., sums: _Optional[_Mapping[str, float]] = ..., weights: _Optional[_Mapping[str, float]] = ..., kind: _Optional[str] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ("outcome", "detail", "step", "samples")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    detail: str
    step: int
    samples: str
    def __init__(self, outcome: _Optional[str] = ..., detail: _Optional[str] = ..., step: _Optional[int] = ..., samples: _Optional[str] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "prepare", "start", "store_entry", "boundary", "leave", "end_ok", "refused", "known", "evaluation", "save", "store_entries", "feed", "feeding", "running_loop")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STORE_ENTRY_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    END_OK_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    STORE_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    FEEDING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_LOOP_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    prepare: Prepare
    start: Start
    store_entry: StoreEntry
    boundary: Boundary
    leave: Leave
    end_ok: EndOk
    refused: Refused
    known: Known
    evaluation: Evaluation
    save: Save
    store_entries: StoreEntries
    feed: Feed
    feeding: Feeding
    running_loop: RunningLoop
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., store_entry: _Optional[_Union[StoreEntry, _Mapping]] = ..., boundary: _Optional[_Union[Boundary, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., end_ok: _Optional[_Union[EndOk, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., known: _Optional[_Union[Known, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., save: _Optional[_Union[Save, _Mapping]] = ..., store_entries: _Optional[_Union[StoreEntries, _Mapping]] = ..., feed: _Optional[_Union[Feed, _Mapping]] = ..., feeding: _Optional[_Union[Feeding, _Mapping]] = ..., running_loop: _Optional[_Union[RunningLoop, _Mapping]] = ...) -> None: ...

class Feed(_message.Message):
    __slots__ = ("follower", "address", "secret", "index", "count")
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    follower: str
    address: str
    secret: bytes
    index: int
    count: int
    def __init__(self, follower: _Optional[str] = ..., address: _Optional[str] = ..., secret: _Optional[bytes] = ..., index: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Feeding(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("incarnation", "protocol_version", "known", "training", "wanted", "speaks", "running_loop", "lifeline")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_LOOP_FIELD_NUMBER: _ClassVar[int]
    LIFELINE_FIELD_NUMBER: _ClassVar[int]
    incarnation: Incarnation
    protocol_version: int
    known: StateName
    training: int
    wanted: int
    speaks: Speaks
    running_loop: RunningLoop
    lifeline: Lifeline
    def __init__(self, incarnation: _Optional[_Union[Incarnation, _Mapping]] = ..., protocol_version: _Optional[int] = ..., known: _Optional[_Union[StateName, _Mapping]] = ..., training: _Optional[int] = ..., wanted: _Optional[int] = ..., speaks: _Optional[_Union[Speaks, _Mapping]] = ..., running_loop: _Optional[_Union[RunningLoop, _Mapping]] = ..., lifeline: _Optional[_Union[Lifeline, _Mapping]] = ...) -> None: ...

class Lifeline(_message.Message):
    __slots__ = ("host", "port", "key")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    key: bytes
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class RunningLoop(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: int
    def __init__(self, stage: _Optional[int] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("generation", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationName
    reason: str
    def __init__(self, generation: _Optional[_Union[GenerationName, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("receiver", "holder")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    receiver: str
    holder: str
    def __init__(self, receiver: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("generation", "members", "state", "transfers", "fresh", "known", "reason", "servers", "leaving_servers", "consistency", "had_state", "minimum", "traceparent")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_SERVERS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    HAD_STATE_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationName
    members: _containers.RepeatedCompositeFieldContainer[Member]
    state: StateName
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    fresh: bool
    known: StateName
    reason: str
    servers: _containers.RepeatedCompositeFieldContainer[Server]
    leaving_servers: _containers.RepeatedCompositeFieldContainer[Server]
    consistency: Consistency
    had_state: bool
    minimum: int
    traceparent: str
    def __init__(self, generation: _Optional[_Union[GenerationName, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., state: _Optional[_Union[StateName, _Mapping]] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., fresh: bool = ..., known: _Optional[_Union[StateName, _Mapping]] = ..., reason: _Optional[str] = ..., servers: _Optional[_Iterable[_Union[Server, _Mapping]]] = ..., leaving_servers: _Optional[_Iterable[_Union[Server, _Mapping]]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., had_state: bool = ..., minimum: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Save(_message.Message):
    __slots__ = ("state", "writers", "attempt")
    STATE_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    state: StateName
    writers: _containers.RepeatedScalarFieldContainer[str]
    attempt: int
    def __init__(self, state: _Optional[_Union[StateName, _Mapping]] = ..., writers: _Optional[_Iterable[str]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Boundary(_message.Message):
    __slots__ = ("generation", "reason", "at_epochs_end")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AT_EPOCHS_END_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationName
    reason: str
    at_epochs_end: bool
    def __init__(self, generation: _Optional[_Union[GenerationName, _Mapping]] = ..., reason: _Optional[str] = ..., at_epochs_end: bool = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason", "finished")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    finished: bool
    def __init__(self, reason: _Optional[str] = ..., finished: bool = ...) -> None: ...

class EndOk(_message.Message):
    __slots__ = ("generation", "stage")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationName
    stage: int
    def __init__(self, generation: _Optional[_Union[GenerationName, _Mapping]] = ..., stage: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "retry")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    retry: bool
    def __init__(self, reason: _Optional[str] = ..., retry: bool = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("ask", "start", "stop", "values", "samples", "problem")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ASK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ask: int
    start: int
    stop: int
    values: _containers.ScalarMap[str, float]
    samples: int
    problem: str
    def __init__(self, ask: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ..., samples: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class Known(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: StateName
    def __init__(self, state: _Optional[_Union[StateName, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("hello", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: ServerHello
    leaving: ServerLeaving
    def __init__(self, hello: _Optional[_Union[ServerHello, _Mapping]] = ..., leaving: _Optional[_Union[ServerLeaving, _Mapping]] = ...) -> None: ...

class ServerHello(_message.Message):
    __slots__ = ("protocol_version", "server", "newest_incarnation", "leaving", "speaks")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    NEWEST_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    server: Server
    newest_incarnation: Incarnation
    leaving: bool
    speaks: Speaks
    def __init__(self, protocol_version: _Optional[int] = ..., server: _Optional[_Union[Server, _Mapping]] = ..., newest_incarnation: _Optional[_Union[Incarnation, _Mapping]] = ..., leaving: bool = ..., speaks: _Optional[_Union[Speaks, _Mapping]] = ...) -> None: ...

class ServerLeaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ServerOrder(_message.Message):
    __slots__ = ("welcome", "refused", "leave")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    leave: ServerLeave
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., leave: _Optional[_Union[ServerLeave, _Mapping]] = ...) -> None: ...

class ServerLeave(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Pod(_message.Message):
    __slots__ = ("uid", "name", "slot", "started", "leave_by", "unheard", "leave_in_seconds")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_BY_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FIELD_NUMBER: _ClassVar[int]
    LEAVE_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    uid: str
    name: str
    slot: int
    started: bool
    leave_by: float
    unheard: bool
    leave_in_seconds: float
    def __init__(self, uid: _Optional[str] = ..., name: _Optional[str] = ..., slot: _Optional[int] = ..., started: bool = ..., leave_by: _Optional[float] = ..., unheard: bool = ..., leave_in_seconds: _Optional[float] = ...) -> None: ...

class SyncRequest(_message.Message):
    __slots__ = ("target", "minimum", "maximum", "living", "observed", "processes_per_pod", "incarnation_number", "generation", "hang_seconds", "hung", "pause_seconds", "servers", "living_servers", "suspend", "suspend_by", "consistency", "saved", "speaks", "suspend_in_seconds", "standby")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    LIVING_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_PER_POD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HANG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HUNG_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    LIVING_SERVERS_FIELD_NUMBER: _ClassVar[int]
    SUSPEND_FIELD_NUMBER: _ClassVar[int]
    SUSPEND_BY_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_FIELD_NUMBER: _ClassVar[int]
    SUSPEND_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    target: int
    minimum: int
    maximum: int
    living: _containers.RepeatedCompositeFieldContainer[Pod]
    observed: bool
    processes_per_pod: int
    incarnation_number: int
    generation: int
    hang_seconds: float
    hung: _containers.RepeatedScalarFieldContainer[str]
    pause_seconds: float
    servers: int
    living_servers: _containers.RepeatedCompositeFieldContainer[Pod]
    suspend: bool
    suspend_by: float
    consistency: Consistency
    saved: str
    speaks: Speaks
    suspend_in_seconds: float
    standby: int
    def __init__(self, target: _Optional[int] = ..., minimum: _Optional[int] = ..., maximum: _Optional[int] = ..., living: _Optional[_Iterable[_Union[Pod, _Mapping]]] = ..., observed: bool = ..., processes_per_pod: _Optional[int] = ..., incarnation_number: _Optional[int] = ..., generation: _Optional[int] = ..., hang_seconds: _Optional[float] = ..., hung: _Optional[_Iterable[str]] = ..., pause_seconds: _Optional[float] = ..., servers: _Optional[int] = ..., living_servers: _Optional[_Iterable[_Union[Pod, _Mapping]]] = ..., suspend: bool = ..., suspend_by: _Optional[float] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., saved: _Optional[str] = ..., speaks: _Optional[_Union[Speaks, _Mapping]] = ..., suspend_in_seconds: _Optional[float] = ..., standby: _Optional[int] = ...) -> None: ...

class ServerStatus(_message.Message):
    __slots__ = ("server", "connected", "serving", "leaving", "speaks")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_FIELD_NUMBER: _ClassVar[int]
    server: Server
    connected: bool
    serving: bool
    leaving: bool
    speaks: Speaks
    def __init__(self, server: _Optional[_Union[Server, _Mapping]] = ..., connected: bool = ..., serving: bool = ..., leaving: bool = ..., speaks: _Optional[_Union[Speaks, _Mapping]] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("member", "standing", "connected", "step_seconds", "leaving", "data_seconds", "compute_seconds", "wait_seconds", "speaks", "share_samples", "sample_seconds", "by_speed")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    DATA_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_FIELD_NUMBER: _ClassVar[int]
    SHARE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BY_SPEED_FIELD_NUMBER: _ClassVar[int]
    member: Member
    standing: Standing
    connected: bool
    step_seconds: float
    leaving: bool
    data_seconds: float
    compute_seconds: float
    wait_seconds: float
    speaks: Speaks
    share_samples: int
    sample_seconds: float
    by_speed: bool
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., standing: _Optional[_Union[Standing, str]] = ..., connected: bool = ..., step_seconds: _Optional[float] = ..., leaving: bool = ..., data_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., speaks: _Optional[_Union[Speaks, _Mapping]] = ..., share_samples: _Optional[int] = ..., sample_seconds: _Optional[float] = ..., by_speed: bool = ...) -> None: ...

class Slow(_message.Message):
    __slots__ = ("pod_name", "busy_seconds", "median_seconds", "since_unix")
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_FIELD_NUMBER: _ClassVar[int]
    pod_name: str
    busy_seconds: float
    median_seconds: float
    since_unix: float
    def __init__(self, pod_name: _Optional[str] = ..., busy_seconds: _Optional[float] = ..., median_seconds: _Optional[float] = ..., since_unix: _Optional[float] = ...) -> None: ...

class Late(_message.Message):
    __slots__ = ("pod_uid", "pod_name", "activity", "since_unix")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    pod_name: str
    activity: Activity
    since_unix: float
    def __init__(self, pod_uid: _Optional[str] = ..., pod_name: _Optional[str] = ..., activity: _Optional[_Union[Activity, _Mapping]] = ..., since_unix: _Optional[float] = ...) -> None: ...

class Stall(_message.Message):
    __slots__ = ("seconds", "since_unix", "step", "late", "waiting")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    since_unix: float
    step: int
    late: _containers.RepeatedCompositeFieldContainer[Late]
    waiting: int
    def __init__(self, seconds: _Optional[float] = ..., since_unix: _Optional[float] = ..., step: _Optional[int] = ..., late: _Optional[_Iterable[_Union[Late, _Mapping]]] = ..., waiting: _Optional[int] = ...) -> None: ...

class SizeRate(_message.Message):
    __slots__ = ("workers", "samples_per_second", "seconds", "steps")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    samples_per_second: float
    seconds: float
    steps: int
    def __init__(self, workers: _Optional[int] = ..., samples_per_second: _Optional[float] = ..., seconds: _Optional[float] = ..., steps: _Optional[int] = ...) -> None: ...

class Recovery(_message.Message):
    __slots__ = ("generation", "cause", "seconds", "at_unix", "number", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: GenerationName
    cause: str
    seconds: float
    at_unix: float
    number: int
    reason: str
    def __init__(self, generation: _Optional[_Union[GenerationName, _Mapping]] = ..., cause: _Optional[str] = ..., seconds: _Optional[float] = ..., at_unix: _Optional[float] = ..., number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Poison(_message.Message):
    __slots__ = ("step", "samples", "workers", "detail")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    step: int
    samples: str
    workers: _containers.RepeatedScalarFieldContainer[str]
    detail: str
    def __init__(self, step: _Optional[int] = ..., samples: _Optional[str] = ..., workers: _Optional[_Iterable[str]] = ..., detail: _Optional[str] = ...) -> None: ...

class ChangeTrace(_message.Message):
    __slots__ = ("traceparent", "lost_pods")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    LOST_PODS_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    lost_pods: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, traceparent: _Optional[str] = ..., lost_pods: _Optional[_Iterable[str]] = ...) -> None: ...

class SyncReply(_message.Message):
    __slots__ = ("incarnation", "phase", "generation", "state", "members", "waiting_for", "reason", "message", "data", "samples_per_second", "goodput", "step_seconds", "last_recovery", "recoveries", "failures", "states_lost", "ended_stages", "values", "unix_time", "last_commit_unix", "silent", "vanished", "stall", "poison", "rates", "lost_seconds", "slow", "servers", "opaque", "servers_settled", "put_away", "checkpoint", "checkpoint_error", "restored", "consistency", "consistency_refused", "consistency_pending", "all_saved", "speaks", "held_back", "memory", "planned_steps", "seconds_per_step", "steps_in", "former_members", "traces")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LostSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_RECOVERY_FIELD_NUMBER: _ClassVar[int]
    RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    STATES_LOST_FIELD_NUMBER: _ClassVar[int]
    ENDED_STAGES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMIT_UNIX_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    VANISHED_FIELD_NUMBER: _ClassVar[int]
    STALL_FIELD_NUMBER: _ClassVar[int]
    POISON_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    LOST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    OPAQUE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_SETTLED_FIELD_NUMBER: _ClassVar[int]
    PUT_AWAY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ERROR_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_REFUSED_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_PENDING_FIELD_NUMBER: _ClassVar[int]
    ALL_SAVED_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BACK_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PLANNED_STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FIELD_NUMBER: _ClassVar[int]
    FORMER_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    incarnation: Incarnation
    phase: Phase
    generation: GenerationName
    state: StateName
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    message: str
    data: Data
    samples_per_second: float
    goodput: float
    step_seconds: float
    last_recovery: Recovery
    recoveries: int
    failures: _containers.RepeatedCompositeFieldContainer[Recovery]
    states_lost: int
    ended_stages: int
    values: _containers.ScalarMap[str, float]
    unix_time: float
    last_commit_unix: float
    silent: _containers.RepeatedScalarFieldContainer[str]
    vanished: _containers.RepeatedScalarFieldContainer[str]
    stall: Stall
    poison: Poison
    rates: _containers.RepeatedCompositeFieldContainer[SizeRate]
    lost_seconds: _containers.ScalarMap[str, float]
    slow: Slow
    servers: _containers.RepeatedCompositeFieldContainer[ServerStatus]
    opaque: bool
    servers_settled: bool
    put_away: bool
    checkpoint: Checkpoint
    checkpoint_error: str
    restored: Restored
    consistency: Consistency
    consistency_refused: str
    consistency_pending: str
    all_saved: bool
    speaks: Speaks
    held_back: str
    memory: Memory
    planned_steps: int
    seconds_per_step: float
    steps_in: str
    former_members: _containers.RepeatedScalarFieldContainer[str]
    traces: _containers.RepeatedCompositeFieldContainer[ChangeTrace]
    def __init__(self, incarnation: _Optional[_Union[Incarnation, _Mapping]] = ..., phase: _Optional[_Union[Phase, str]] = ..., generation: _Optional[_Union[GenerationName, _Mapping]] = ..., state: _Optional[_Union[StateName, _Mapping]] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., waiting_for: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., data: _Optional[_Union[Data, _Mapping]] = ..., samples_per_second: _Optional[float] = ..., goodput: _Optional[float] = ..., step_seconds: _Optional[float] = ..., last_recovery: _Optional[_Union[Recovery, _Mapping]] = ..., recoveries: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[Recovery, _Mapping]]] = ..., states_lost: _Optional[int] = ..., ended_stages: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ..., unix_time: _Optional[float] = ..., last_commit_unix: _Optional[float] = ..., silent: _Optional[_Iterable[str]] = ..., vanished: _Optional[_Iterable[str]] = ..., stall: _Optional[_Union[Stall, _Mapping]] = ..., poison: _Optional[_Union[Poison, _Mapping]] = ..., rates: _Optional[_Iterable[_Union[SizeRate, _Mapping]]] = ..., lost_seconds: _Optional[_Mapping[str, float]] = ..., slow: _Optional[_Union[Slow, _Mapping]] = ..., servers: _Optional[_Iterable[_Union[ServerStatus, _Mapping]]] = ..., opaque: bool = ..., servers_settled: bool = ..., put_away: bool = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., checkpoint_error: _Optional[str] = ..., restored: _Optional[_Union[Restored, _Mapping]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., consistency_refused: _Optional[str] = ..., consistency_pending: _Optional[str] = ..., all_saved: bool = ..., speaks: _Optional[_Union[Speaks, _Mapping]] = ..., held_back: _Optional[str] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., planned_steps: _Optional[int] = ..., seconds_per_step: _Optional[float] = ..., steps_in: _Optional[str] = ..., former_members: _Optional[_Iterable[str]] = ..., traces: _Optional[_Iterable[_Union[ChangeTrace, _Mapping]]] = ...) -> None: ...
