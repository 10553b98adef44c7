"""Chat templates in a process of their own: a template is a program of the checkpoint's, and one that loops, or eats
memory, must not take the server with it. The sandbox keeps it from reaching out; the process bounds time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from moestro.errors import RequestError
from moestro.text.chat_template import ChatTemplate, check_kwargs

TIME_LIMIT_S = 5.0
MEMORY_BYTES = 1 << 30  # beyond what the process has when it starts
_PATIENCE_S = 30.0  # for the process to start, beside the time limit that it keeps itself


class TemplateRenderer:
    """The template of one folder, rendered elsewhere. close() ends the process, which also ends with this one."""

    def __init__(self, folder: str | Path, time_limit_s: float = TIME_LIMIT_S) -> None:
        """Loads the template here too, so that a wrong one is known at once: raises CheckpointError."""
        self.template = ChatTemplate.load(folder)
        self._folder = str(folder)
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        # A thread of its own: conversations that wait for a slow one must not take the threads that others need.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="template")
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process ahead of the first conversation; without a template there is nothing to start."""
        with self._lock:
            if self.template is not None and self._process is None and not self._closed:
                self._launch()

    async def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any]) -> str:
        """As ChatTemplate.render. Raises RequestError("messages") also when the template takes too long or too much."""
        assert self.template is not None, "the caller has checked"
        check_kwargs(kwargs)
        if self._closed:
            raise RequestError("the server is stopping", "messages")
        job = (messages, add_generation_prompt, kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._render, job)

    def close(self) -> None:
        self._closed = True
        if (process := self._process) is not None:
            with contextlib.suppress(ValueError):  # it has ended by itself meanwhile
                process.kill()  # before the lock, which a conversation that is being rendered holds
        with self._lock:
            self._end()
        self._thread.shutdown(wait=False)

    def _render(self, job: tuple[Any, ...]) -> str:
        with self._lock:
            if self._closed:
                raise RequestError("the server is stopping", "messages")
            answer = None
            while answer is None:
                is_fresh = self._process is None or not self._process.is_alive()
                if is_fresh:
                    self._launch()
                answer = self._ask(job)
                # A process that somebody else has ended gets this job another chance, on a fresh one.
                if answer is None and (self._end() == -signal.SIGPROF or is_fresh or self._closed):
                    raise self._too_much()
        text, refusal, field = answer
        if refusal is not None:
            raise RequestError(refusal, field)
        return text

    def _too_much(self) -> RequestError:
        return RequestError(
            f"the model's chat template takes more than {self._time_limit_s:g} s of CPU time or {MEMORY_BYTES >> 30} "
            "GiB on these messages",
            "messages",
        )

    def _ask(self, job: tuple[Any, ...]) -> tuple[str, str | None, str | None] | None:
        """The process's answer; None when it ended instead."""
        assert self._pipe is not None
        try:
            self._pipe.send(job)
            if not self._pipe.poll(self._time_limit_s + _PATIENCE_S):
                return None
            answer: tuple[str, str | None, str | None] = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return answer

    def _launch(self) -> None:
        self._end()
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        arguments = (theirs, self._folder, self._time_limit_s)
        self._process = spawn.Process(target=_run, args=arguments, name="moestro-template", daemon=True)
        self._process.start()
        theirs.close()

    def _end(self) -> int | None:
        """End the process. Returns its exit code, None when there was none."""
        code = None
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.join(0.2)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            code = self._process.exitcode
            self._process.close()
        self._process = self._pipe = None
        return code


def _run(pipe: Connection, folder: str, time_limit_s: float) -> None:
    """Main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, in mid-instruction of a C function too
    template = ChatTemplate.load(folder)
    if template is None:
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        try:
            messages, add_generation_prompt, kwargs = pipe.recv()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, time_limit_s)
        answer: tuple[str, str | None, str | None]
        try:
            answer = template.render(messages, add_generation_prompt, **kwargs), None, None
        except RequestError as error:
            answer = "", str(error), error.field
        except MemoryError:
            answer = (
                "",
                f"the model's chat template takes more than {MEMORY_BYTES >> 30} GiB on these messages",
                "messages",
            )
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(answer)
