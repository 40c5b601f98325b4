"""Give each session of onnxruntime one thread if OMP_NUM_THREADS is 1, which onnxruntime does not
read.

`make test` runs a process on each core. Threads of onnxruntime wait for each other by spinning: a
second thread in each process takes the time of the other processes.

    python tests/one_thread.py SCRIPT ARGUMENTS

runs a script in this way.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import onnxruntime


def use_one_thread() -> None:
    """Change sessions that leave the number of their threads to onnxruntime."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        return
    begin = onnxruntime.InferenceSession.__init__

    def begin_with_one_thread(
        self: Any, path_or_bytes: Any, sess_options: Any = None, *rest: Any, **settings: Any
    ) -> None:
        options = sess_options or onnxruntime.SessionOptions()
        if options.intra_op_num_threads == 0:
            options.intra_op_num_threads = 1
        begin(self, path_or_bytes, options, *rest, **settings)

    onnxruntime.InferenceSession.__init__ = begin_with_one_thread


if __name__ == "__main__":
    use_one_thread()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
