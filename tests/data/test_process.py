"""`prepare` as a process: killed at any moment, and its memory."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hrmlm.data.prepare import prepare
from hrmlm.data.tokens import PreparedData
from hrmlm.errors import UserError

from .examples import corpus


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3])
def test_killed_run_leaves_nothing_that_looks_finished(delay, tmp_path):
    """A real kill -9, a while after the work has begun; the next run cleans up and succeeds."""
    texts = [f"document {number} " * 50 for number in range(3000)]
    source = corpus(tmp_path / "a.jsonl", texts)
    out = tmp_path / "runs" / "out"
    code = f"from hrmlm.data.prepare import prepare; prepare([{source!r}], {str(out)!r}, vocab_size=2000)"
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("runs/.partial-*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(UserError, match="hrmlm prepare"):
        PreparedData.open(out)
    prepare([source], out, tokenizer="bytes")
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["out"]


_PEAK = """
import sys
from pathlib import Path
from hrmlm.data.prepare import prepare
prepare([sys.argv[1]], sys.argv[2], tokenizer="bytes", valid=[sys.argv[3]])
lines = Path("/proc/self/status").read_text().splitlines()  # getrusage would count the memory of our parent
print(next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_a_document(tmp_path):
    """Loaded whole, 40 MB of text and its ids would take more than 240 MiB."""
    (tmp_path / "v.txt").write_text("v")
    peaks = []
    for megabytes in (1, 40):
        file = tmp_path / f"{megabytes}.txt"
        file.write_text("A line of a document.\n" * (megabytes * 1_000_000 // 22))
        command = [sys.executable, "-c", _PEAK, str(file), str(tmp_path / f"out{megabytes}"), str(tmp_path / "v.txt")]
        environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
        peaks.append(int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 100
