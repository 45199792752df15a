"""The numbers and types of all that the protocol's messages have, to compare them with the last release's.

`python tests/support/protocol_record.py` prints them; tests/protocol/last_release.json holds those of the
last release, and is written anew with each.
"""

from __future__ import annotations

import json

from google.protobuf import descriptor_pb2

from springtide_protocol import coordinator_pb2 as pb

Record = dict[str, dict[str, str]]


def record(file: descriptor_pb2.FileDescriptorProto) -> Record:
    """Return by message (or enumeration): what each number means.

    Of a field that is its type, with the name for kinds of a `oneof`, since capabilities go by it.
    """
    found: Record = {}
    waiting = [(message.name, message) for message in file.message_type]
    while waiting:
        path, message = waiting.pop()
        waiting += [(f"{path}.{inner.name}", inner) for inner in message.nested_type]
        found[path] = {str(field.number): _meaning(field) for field in message.field}
    for enumeration in file.enum_type:
        found[enumeration.name] = {str(value.number): value.name for value in enumeration.value}
    return found


def _meaning(field: descriptor_pb2.FieldDescriptorProto) -> str:
    kind = field.type_name or descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)
    repeated = field.label == descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    chosen = f" {field.name}" if field.HasField("oneof_index") else ""
    return f"{'repeated ' if repeated else ''}{kind}{chosen}"


def today() -> Record:
    """Return those of this tree."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    return record(file)


if __name__ == "__main__":
    print(json.dumps(today(), indent=1, sort_keys=True))
