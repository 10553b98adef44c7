"""A served model for the serving benchmarks: the real command in a process of its own, and what it holds."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moestro.checkpoint.synth import TINY, write_checkpoint

RESULTS = Path(__file__).parent / "results"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def write_tiny(folder: Path) -> Path:
    """A random Qwen3-MoE whose tokens are bytes, for runs in which the model does not matter."""
    write_checkpoint(TINY["qwen3_moe"] | {"eos_token_id": 2, "max_position_embeddings": 4096}, folder, seed=7)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@dataclass
class ServerProcess:
    """A running server. log: where its stderr goes."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine: the child that has loaded the model, the largest one."""
        children = _children(self.process.pid)
        return max(children, key=lambda pid: memory_bytes([pid]), default=None)

    @property
    def pids(self) -> list[int]:
        return [self.process.pid, *_children(self.process.pid)]

    def memory_bytes(self) -> int:
        """Resident memory of all its processes."""
        return memory_bytes(self.pids)

    def open_files(self) -> int:
        """File handles of all its processes."""
        return sum(_count_fds(pid) for pid in self.pids)

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics by name; samples that differ in labels are added up."""
        found: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=20, trust_env=False).text.splitlines():
            if not line.startswith("#"):
                name = line.split("{")[0].split(" ")[0]
                found[name] = found.get(name, 0.0) + float(line.split()[-1])
        return found

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_idle(self, timeout_s: float = 60.0) -> dict[str, float]:
        """Wait until no request is open; the metrics then."""
        deadline = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            if not metrics.get("moestro:num_requests_running") and not metrics.get("moestro:num_requests_waiting"):
                return metrics
            if time.monotonic() > deadline:
                raise TimeoutError("the server does not become idle")
            time.sleep(0.1)


@contextmanager
def served(model: str, *options: str) -> Iterator[ServerProcess]:
    """`moestro serve MODEL` on a free port, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as stderr:
            command = [sys.executable, "-m", "moestro", "serve", model, "--port", str(port), *options]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        server = ServerProcess(f"http://127.0.0.1:{port}", process, log)
        try:
            deadline = time.monotonic() + 300
            while not server.is_healthy():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server does not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def memory_bytes(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Write a result with the machine that it is from."""
    RESULTS.mkdir(exist_ok=True)
    machine = {
        "cpu": next((x.split(":")[1].strip() for x in _cpuinfo() if x.startswith("model name")), platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine} | result, indent=1, ensure_ascii=False) + "\n")
    return path


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _count_fds(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, PermissionError):
        return 0
