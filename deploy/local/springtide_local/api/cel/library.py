"""The functions of Kubernetes' CEL, with the types that they take and give.

The names of overloads are those of the published cost table. Capital letters stand for any type. Functions
that cel-python cannot evaluate are declared all the same, so that an error about it says that, and not that
it does not exist.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from springtide_local.api.cel.types import Type

_OVERLOADS = """
_&&_  logical_and  (bool, bool) -> bool
_||_  logical_or  (bool, bool) -> bool
!_  logical_not  (bool) -> bool
@not_strictly_false  not_strictly_false  (bool) -> bool
_?_:_  conditional  (bool, A, A) -> A
_==_  equals  (A, A) -> bool
_!=_  not_equals  (A, A) -> bool
_+_  add_int64  (int, int) -> int
_+_  add_uint64  (uint, uint) -> uint
_+_  add_double  (double, double) -> double
_+_  add_string  (string, string) -> string
_+_  add_bytes  (bytes, bytes) -> bytes
_+_  add_list  (list(A), list(A)) -> list(A)
_+_  add_duration_duration  (duration, duration) -> duration
_+_  add_duration_timestamp  (duration, timestamp) -> timestamp
_+_  add_timestamp_duration  (timestamp, duration) -> timestamp
_-_  subtract_int64  (int, int) -> int
_-_  subtract_uint64  (uint, uint) -> uint
_-_  subtract_double  (double, double) -> double
_-_  subtract_duration_duration  (duration, duration) -> duration
_-_  subtract_timestamp_duration  (timestamp, duration) -> timestamp
_-_  subtract_timestamp_timestamp  (timestamp, timestamp) -> duration
_*_  multiply_int64  (int, int) -> int
_*_  multiply_uint64  (uint, uint) -> uint
_*_  multiply_double  (double, double) -> double
_/_  divide_int64  (int, int) -> int
_/_  divide_uint64  (uint, uint) -> uint
_/_  divide_double  (double, double) -> double
_%_  modulo_int64  (int, int) -> int
_%_  modulo_uint64  (uint, uint) -> uint
-_  negate_int64  (int) -> int
-_  negate_double  (double) -> double
_[_]  index_list  (list(A), int) -> A
_[_]  index_map  (map(A, B), A) -> B
@in  in_list  (A, list(A)) -> bool
@in  in_map  (A, map(A, B)) -> bool
size  size_string  (string) -> int
size  size_bytes  (bytes) -> int
size  size_list  (list(A)) -> int
size  size_map  (map(A, B)) -> int
size  string_size  string.() -> int
size  bytes_size  bytes.() -> int
size  list_size  list(A).() -> int
size  map_size  map(A, B).() -> int
type  type  (A) -> type(A)
dyn  to_dyn  (A) -> dyn
bool  bool_to_bool  (bool) -> bool
bool  string_to_bool  (string) -> bool
bytes  bytes_to_bytes  (bytes) -> bytes
bytes  string_to_bytes  (string) -> bytes
double  double_to_double  (double) -> double
double  int64_to_double  (int) -> double
double  uint64_to_double  (uint) -> double
double  string_to_double  (string) -> double
duration  duration_to_duration  (duration) -> duration
duration  int64_to_duration  (int) -> duration
duration  string_to_duration  (string) -> duration
int  int64_to_int64  (int) -> int
int  uint64_to_int64  (uint) -> int
int  double_to_int64  (double) -> int
int  duration_to_int64  (duration) -> int
int  string_to_int64  (string) -> int
int  timestamp_to_int64  (timestamp) -> int
string  string_to_string  (string) -> string
string  bool_to_string  (bool) -> string
string  bytes_to_string  (bytes) -> string
string  double_to_string  (double) -> string
string  duration_to_string  (duration) -> string
string  int64_to_string  (int) -> string
string  timestamp_to_string  (timestamp) -> string
string  uint64_to_string  (uint) -> string
timestamp  timestamp_to_timestamp  (timestamp) -> timestamp
timestamp  int64_to_timestamp  (int) -> timestamp
timestamp  string_to_timestamp  (string) -> timestamp
uint  uint64_to_uint64  (uint) -> uint
uint  double_to_uint64  (double) -> uint
uint  int64_to_uint64  (int) -> uint
uint  string_to_uint64  (string) -> uint
contains  contains_string  string.(string) -> bool
endsWith  ends_with_string  string.(string) -> bool
startsWith  starts_with_string  string.(string) -> bool
matches  matches  (string, string) -> bool
matches  matches_string  string.(string) -> bool
charAt  string_char_at_int  string.(int) -> string
format  string_format  string.(list(dyn)) -> string
indexOf  string_index_of_string  string.(string) -> int
indexOf  string_index_of_string_int  string.(string, int) -> int
indexOf  list_a_index_of_int  list(A).(A) -> int
join  list_join  list(string).() -> string
join  list_join_string  list(string).(string) -> string
lastIndexOf  string_last_index_of_string  string.(string) -> int
lastIndexOf  string_last_index_of_string_int  string.(string, int) -> int
lastIndexOf  list_a_last_index_of_int  list(A).(A) -> int
lowerAscii  string_lower_ascii  string.() -> string
upperAscii  string_upper_ascii  string.() -> string
replace  string_replace_string_string  string.(string, string) -> string
replace  string_replace_string_string_int  string.(string, string, int) -> string
split  string_split_string  string.(string) -> list(string)
split  string_split_string_int  string.(string, int) -> list(string)
substring  string_substring_int  string.(int) -> string
substring  string_substring_int_int  string.(int, int) -> string
trim  string_trim  string.() -> string
strings.quote  strings_quote  (string) -> string
find  string_find_string  string.(string) -> string
findAll  string_find_all_string  string.(string) -> list(string)
findAll  string_find_all_string_int  string.(string, int) -> list(string)
sets.contains  list_sets_contains_list  (list(A), list(A)) -> bool
sets.equivalent  list_sets_equivalent_list  (list(A), list(A)) -> bool
sets.intersects  list_sets_intersects_list  (list(A), list(A)) -> bool
url  string_to_url  (string) -> kubernetes.URL
isURL  is_url_string  (string) -> bool
getScheme  url_get_scheme  kubernetes.URL.() -> string
getHost  url_get_host  kubernetes.URL.() -> string
getHostname  url_get_hostname  kubernetes.URL.() -> string
getPort  url_get_port  kubernetes.URL.() -> string
getEscapedPath  url_get_escaped_path  kubernetes.URL.() -> string
getQuery  url_get_query  kubernetes.URL.() -> map(string, list(string))
quantity  string_to_quantity  (string) -> kubernetes.Quantity
isQuantity  is_quantity_string  (string) -> bool
sign  quantity_sign  kubernetes.Quantity.() -> int
isInteger  quantity_is_integer  kubernetes.Quantity.() -> bool
asInteger  quantity_as_integer  kubernetes.Quantity.() -> int
asApproximateFloat  quantity_get_float  kubernetes.Quantity.() -> double
isGreaterThan  quantity_is_greater_than  kubernetes.Quantity.(kubernetes.Quantity) -> bool
isLessThan  quantity_is_less_than  kubernetes.Quantity.(kubernetes.Quantity) -> bool
compareTo  quantity_compare_to  kubernetes.Quantity.(kubernetes.Quantity) -> int
add  quantity_add  kubernetes.Quantity.(kubernetes.Quantity) -> kubernetes.Quantity
add  quantity_add_int  kubernetes.Quantity.(int) -> kubernetes.Quantity
sub  quantity_sub  kubernetes.Quantity.(kubernetes.Quantity) -> kubernetes.Quantity
sub  quantity_sub_int  kubernetes.Quantity.(int) -> kubernetes.Quantity
ip  string_to_ip  (string) -> net.IP
isIP  is_ip  (string) -> bool
cidr  string_to_cidr  (string) -> net.CIDR
isCIDR  is_cidr  (string) -> bool
"""
_COMPARED = ("bool", "int64", "uint64", "double", "string", "bytes", "timestamp", "duration")
_CROSSED = (("int64", "double"), ("int64", "uint64"), ("uint64", "double"), ("uint64", "int64"))
_CROSSED_BACK = (("double", "int64"), ("double", "uint64"))
_SIGNS = {"_<_": "less", "_<=_": "less_equals", "_>_": "greater", "_>=_": "greater_equals"}
_SORTABLE = ("int", "uint", "double", "bool", "duration", "timestamp", "string", "bytes")
_PARTS = ["getFullYear", "getMonth", "getDayOfYear", "getDayOfMonth", "getDate", "getDayOfWeek"]
_CLOCK = ["getHours", "getMinutes", "getSeconds", "getMilliseconds"]
_NOT_EVALUATED = frozenset(
    [
        "format",
        "strings.quote",
        "sets.contains",
        "sets.equivalent",
        "sets.intersects",
        "url",
        "isURL",
        "quantity",
        "isQuantity",
        "ip",
        "isIP",
        "cidr",
        "isCIDR",
    ]
)


@dataclass(frozen=True)
class Overload:
    """One form of a function. A method has a target, which is the first of the arguments."""

    name: str
    arguments: tuple[Type, ...]
    result: Type
    method: bool


def can_be_evaluated(function: str) -> bool:
    """Tell whether cel-python, with what is added here, evaluates a function of Kubernetes."""
    return function not in _NOT_EVALUATED


@functools.cache
def functions() -> dict[str, tuple[Overload, ...]]:
    """Return all functions with their overloads."""
    found: dict[str, list[Overload]] = {}
    for line in [*_OVERLOADS.strip().splitlines(), *_generated()]:
        function, name, signature = re.split(r"\s\s+", line.strip())
        found.setdefault(function, []).append(_overload(name, signature))
    return {name: tuple(overloads) for name, overloads in found.items()}


def _generated() -> list[str]:
    lines = []
    for sign, word in _SIGNS.items():
        for kind in _COMPARED:
            given = kind.removesuffix("64")
            lines.append(f"{sign}  {word}_{kind}  ({given}, {given}) -> bool")
        for left, right in (*_CROSSED, *_CROSSED_BACK):
            pair = f"{left.removesuffix('64')}, {right.removesuffix('64')}"
            lines.append(f"{sign}  {word}_{left}_{right}  ({pair}) -> bool")
    for kind in _SORTABLE:
        lines.append(f"isSorted  list_{kind}_is_sorted_bool  list({kind}).() -> bool")
        lines.append(f"min  list_{kind}_min_{kind}  list({kind}).() -> {kind}")
        lines.append(f"max  list_{kind}_max_{kind}  list({kind}).() -> {kind}")
        if kind in ("int", "uint", "double", "duration"):
            lines.append(f"sum  list_{kind}_sum_{kind}  list({kind}).() -> {kind}")
    for part in (*_PARTS, *_CLOCK):
        lines.append(f"{part}  timestamp_{part}  timestamp.() -> int")
        lines.append(f"{part}  timestamp_{part}_with_tz  timestamp.(string) -> int")
    for part in _CLOCK:
        lines.append(f"{part}  duration_{part}  duration.() -> int")
    return lines


def _overload(name: str, signature: str) -> Overload:
    given, result = signature.split(" -> ")
    target, rest = "", given[1:-1]
    if not given.startswith("("):
        target, _, rest = given[:-1].partition(".(")
    return Overload(name, (*_types(target), *_types(rest)), _types(result)[0], bool(target))


def _types(text: str) -> tuple[Type, ...]:
    """Read types separated by commas."""
    found: list[Type] = []
    depth, start = 0, 0
    for index, char in enumerate(f"{text},"):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            found += [_type(text[start:index].strip())] if text[start:index].strip() else []
            start = index + 1
    return tuple(found)


def _type(text: str) -> Type:
    name, _, rest = text.partition("(")
    if len(name) == 1:
        return Type("parameter", name=name)
    if "." in name:
        return Type("object", name=name)
    return Type(name, _types(rest[:-1]) if rest else ())
