"""TensorBoard's event files; imported when the TensorBoard callback is first used."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from onnxfit.environment import uninstalled
from onnxfit.files import append_whole, make_folder

# tensorboardX imports torch only to annotate its methods, at a cost of 2 s and 200 MB. A method
# that is given a tensor of torch imports torch itself.
with uninstalled("torch"):
    from tensorboardX import SummaryWriter
    from tensorboardX.proto.api_pb2 import (
        DataType,
        Experiment,
        HParamInfo,
        MetricInfo,
        MetricName,
        Status,
    )
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.plugin_hparams_pb2 import (
        HParamsPluginData,
        SessionEndInfo,
        SessionStartInfo,
    )
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboardX.record_writer import masked_crc32c
    from tensorboardX.writer import FileWriter

__all__ = ["EventFile", "RunWriter", "hparams_of_end", "hparams_of_run"]

MAX_SECONDS_BETWEEN_FLUSHES = 10.0
MAX_UNWRITTEN_BYTES = 2**24


class RunWriter(SummaryWriter):  # type: ignore[misc]  # tensorboardX has no types
    """tensorboardX's SummaryWriter on an EventFile: `flush` writes every event to the file.

    - `folder`: the folder of the run.
    - `session`: a word in the name of every file of this training.
    - `failed`: called with an OSError of the disk.
    """

    def __init__(self, folder: str, session: str, failed: Callable[[OSError], None]) -> None:
        # The base's constructor creates a file writer, which needs these two attributes.
        self._session = session
        self._failed = failed
        # add_scalars opens other files and uses the suffix.
        super().__init__(folder, filename_suffix=f".{uuid.uuid4().hex}")

    def add_event(self, event: Any) -> None:
        """Write an Event unchanged.

        - `event`: the protocol buffer.
        """
        self._get_file_writer().add_event(event)

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is None:
            self.file_writer: Any = _RunFileWriter(self.logdir, self._session, self._failed)
            self.all_writers = {self.logdir: self.file_writer}
        return self.file_writer


class _RunFileWriter(FileWriter):  # type: ignore[misc]
    # The base's constructor is not called: it opens a file and starts a thread at once.
    def __init__(self, folder: str, session: str, failed: Callable[[OSError], None]) -> None:
        self.event_writer = EventFile(folder, session, failed)
        self._default_metadata: dict[str, Any] = {}


class EventFile:
    """One event file in a folder; both are created at the first event.

    - `folder`: the folder of the run.
    - `session`: a word in the file's name.
    - `failed`: called with an OSError of the disk, after which training continues. Up to 16 MB of
      events stay in memory, and are written when the disk accepts them.

    No other writer chooses the same name, even in the same second. The names sort in the order in
    which a process creates the files, because TensorBoard reads the files of a run in the order of
    their names. Events reach the file at `flush`, at `close`, or ten seconds after the last flush.
    """

    def __init__(self, folder: str, session: str, failed: Callable[[OSError], None]) -> None:
        self._folder = folder
        self._session = session
        self._failed = failed
        self._file: BinaryIO | None = None
        self._unwritten = b""
        self._lock = threading.Lock()
        self._last_flush = 0.0

    def get_logdir(self) -> str:
        """Return the folder."""
        return self._folder

    def add_event(self, event: Any) -> None:
        """Write an `event`, a protocol buffer."""
        with self._lock:
            record = _record(event)
            if len(self._unwritten) + len(record) > MAX_UNWRITTEN_BYTES:
                self._flush()
            if len(self._unwritten) <= MAX_UNWRITTEN_BYTES:
                self._unwritten += record
            if time.monotonic() - self._last_flush > MAX_SECONDS_BETWEEN_FLUSHES:
                self._flush()

    def flush(self) -> None:
        """Write the events in memory to the file."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Close the file; a later event begins another one."""
        with self._lock:
            self._flush()
            if self._file is not None:
                self._file.close()
                self._file = None

    def reopen(self) -> None:
        """Do nothing: an event after `close` begins another file."""

    def _open(self) -> BinaryIO:
        make_folder(Path(self._folder))
        now = time.time_ns()
        process = f"{socket.gethostname()}.{os.getpid()}"
        unique = f"{now}.{self._session}.{uuid.uuid4().hex[:8]}"
        name = f"events.out.tfevents.{now // 10**9:010d}.{process}.{unique}"
        return cast("BinaryIO", open(os.path.join(self._folder, name), "xb", buffering=0))

    def _flush(self) -> None:
        self._last_flush = time.monotonic()
        if not self._unwritten:
            return
        try:
            if self._file is None:
                self._file = self._open()
            data = self._unwritten
            if not self._file.tell():
                data = _record(Event(wall_time=time.time(), file_version="brain.Event:2")) + data
            append_whole(self._file, data)
            self._unwritten = b""
        except OSError as error:
            self._failed(error)


def _record(event: Any) -> bytes:
    """Return an event as bytes of TensorBoard's files: length and data, each with a checksum."""
    data: bytes = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + checksums[0] + data + checksums[1]


def hparams_of_run(
    hparams: Mapping[str, Any], metrics: Mapping[str, tuple[str, str]], began: float
) -> list[Event]:
    """Return the events of a run that began, for the hparams tab.

    - `hparams`: name -> number, string or bool.
    - `metrics`: title of a column -> (run folder, tag whose last value it shows).
    - `began`: the time of the beginning, in seconds since 1970.
    """
    start = SessionStartInfo(start_time_secs=began)
    infos = []
    for name, value in hparams.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
            kind = "DATA_TYPE_BOOL"
        elif isinstance(value, (int, float)):
            start.hparams[name].number_value = value
            kind = "DATA_TYPE_FLOAT64"
        else:
            start.hparams[name].string_value = str(value)
            kind = "DATA_TYPE_STRING"
        infos.append(HParamInfo(name=name, type=DataType.Value(kind)))
    names = [
        MetricInfo(name=MetricName(group=group, tag=tag), display_name=title)
        for title, (group, tag) in metrics.items()
    ]
    return [
        _hparams_event(
            "_hparams_/experiment", experiment=Experiment(hparam_infos=infos, metric_infos=names)
        ),
        _hparams_event("_hparams_/session_start_info", session_start_info=start),
    ]


def hparams_of_end(succeeded: bool) -> Event:
    """Return the event of a run that ended, for the hparams tab.

    - `succeeded`: False after an exception.
    """
    status = Status.Value("STATUS_SUCCESS" if succeeded else "STATUS_FAILURE")
    return _hparams_event(
        "_hparams_/session_end_info",
        session_end_info=SessionEndInfo(status=status, end_time_secs=time.time()),
    )


def _hparams_event(tag: str, **content: Any) -> Event:
    data = SummaryMetadata.PluginData(
        plugin_name="hparams", content=HParamsPluginData(version=0, **content).SerializeToString()
    )
    return Event(
        summary=Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=data))])
    )
