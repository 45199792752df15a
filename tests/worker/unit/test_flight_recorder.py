"""Torch is told to record no collectives where nobody reads them."""

from springtide.comm.flight_recorder import record_no_flights


def test_only_where_there_is_no_device() -> None:
    environ: dict[str, str] = {}
    record_no_flights(environ, on_device=True)
    assert environ == {}
    record_no_flights(environ, on_device=False)
    assert environ == {"TORCH_FR_BUFFER_SIZE": "0"}


def test_user_s_own_setting_stays() -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        environ = {name: "2000"}
        record_no_flights(environ, on_device=False)
        assert environ == {name: "2000"}
