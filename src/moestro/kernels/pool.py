"""Threads for CPU kernels: helpers that join a job when they are running, and that nobody waits for when they are not.

The thread that calls a kernel publishes a job, works on it itself, closes it, and waits only for the helpers that are
inside. On a machine whose cores others use too, a helper may not run for milliseconds; then the caller does the work
alone. With an OpenMP region, which ends when all its threads have come, a 10 us kernel took 12 ms whenever another
process held one of two cores.

The body of a job is a function of one tuple that takes shares of the work from a shared counter until none is left; it
is called once by each thread that takes part.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from moestro import settings
from moestro.kernels.jit import device, intrinsic, kernel
from moestro.kernels.memory import I32, I64, load_int64, new_counter, store_int64

# State of the pool, an int64 a cache line apart where threads write often.
DOOR, JOB, ARGUMENTS, OWNER, STOP, PARKED, HELPERS, PIPE = 0, 8, 9, 16, 24, 32, 40, 41  # PIPE + 1: its writing end
STATE_SIZE = 48

# The door: how many helpers are inside, whether more may come in, and the number of the job.
OPEN = 1 << 32
INSIDE = OPEN - 1
NEXT_JOB = OPEN << 1

# A helper looks for work this many times at full speed (about 20 us), then yielding (about 1 ms), then sleeps.
SPINS, YIELDS = 500, 1500

_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
_read: Any = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_write: Any = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def exchange_if_equal(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Replace the int64 behind an address if it is `expected`; returns whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        pair = builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def add_release(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 behind an address, ordered with all memory before and after; returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        machine = os.uname().machine
        if machine == "x86_64":
            function = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.sse2.pause"), [])
        elif machine in ("aarch64", "arm64"):
            function = ir.FunctionType(ir.VoidType(), [I32])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.aarch64.hint"), [I32(1)])
        return context.get_dummy_value()

    return types.void(), codegen


def worker(function: Any) -> Any:
    """Make a function of one tuple the body of a job: kernels call `run(pool, function((...)))`.

    What is returned takes the tuple and gives two addresses: of a C function that calls the body, and of the tuple,
    which is kept in the caller's frame. (Numba does not keep compiled kernels that pass functions on as values.)
    """
    body = device(function)

    @intrinsic
    def job(typingctx: Any, arguments: Any) -> Any:
        call: Any = types.Dispatcher(body).get_call_type(typingctx, (arguments,), {})

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            compiled = body.overloads[call.args]
            context.active_code_library.add_linking_library(compiled.library)
            pointer = cgutils.alloca_once_value(builder, args[0])
            name = f"{compiled.fndesc.llvm_func_name}_job"
            entry = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [I64]), name)
            entry.linkage = "internal"
            inner = ir.IRBuilder(entry.append_basic_block())
            value = inner.load(inner.inttoptr(entry.args[0], pointer.type))
            context.call_internal_no_propagate(inner, compiled.fndesc, call, (value,))
            inner.ret_void()
            both = [builder.ptrtoint(entry, I64), builder.ptrtoint(pointer, I64)]
            return context.make_tuple(builder, signature.return_type, both)

        return types.containers.UniTuple(types.int64, 2)(arguments), codegen

    return job


@intrinsic
def _call_job(typingctx: Any, function: Any, arguments: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@device
def run(pool: int, job: tuple[int, int]) -> None:
    """Do a job on this thread and on the helpers that join; returns when all of it is done.

    pool: address of the pool's state, 0 to work alone. Also alone when another thread uses the pool.
    """
    if pool == 0 or not exchange_if_equal(pool + OWNER * 8, 0, 1):
        _call_job(job[0], job[1])
        return
    store_int64(pool, JOB, job[0])
    store_int64(pool, ARGUMENTS, job[1])
    door = load_int64(pool, DOOR)
    store_release(pool + DOOR * 8, door + NEXT_JOB + OPEN)
    if load_acquire(pool + PARKED * 8) > 0:
        _wake(pool)
    _call_job(job[0], job[1])
    add_release(pool + DOOR * 8, -OPEN)
    waits = 0
    while load_acquire(pool + DOOR * 8) & INSIDE:
        waits += 1
        if waits < SPINS:
            pause()
        else:
            _sched_yield()
    store_release(pool + OWNER * 8, 0)


@device
def _wake(pool: int) -> None:
    """Write a byte for each sleeping helper to the pipe that they read."""
    parked = load_int64(pool, PARKED)
    while parked > 0 and not exchange_if_equal(pool + PARKED * 8, parked, 0):
        parked = load_int64(pool, PARKED)
    byte = new_counter()
    for _ in range(parked):
        _write(np.int32(load_int64(pool, PIPE + 1)), byte, 1)


@kernel
def _help(pool: int) -> None:
    """A helper's life: join open jobs; look for them ever less eagerly; sleep on the pipe; end when told to stop."""
    byte = new_counter()
    last = 0
    looks = 0
    while load_acquire(pool + STOP * 8) == 0:
        door = load_acquire(pool + DOOR * 8)
        if door & OPEN and door & ~INSIDE != last and (door & INSIDE) < load_int64(pool, HELPERS):
            if exchange_if_equal(pool + DOOR * 8, door, door + 1):
                last = door & ~INSIDE
                _call_job(load_int64(pool, JOB), load_int64(pool, ARGUMENTS))
                add_release(pool + DOOR * 8, -1)
                looks = 0
            continue
        looks += 1
        if looks < SPINS:
            pause()
        elif looks < SPINS + YIELDS:
            _sched_yield()
        else:
            add_release(pool + PARKED * 8, 1)
            _read(np.int32(load_int64(pool, PIPE)), byte, 1)
            looks = 0


@device
def num_workers(pool: int) -> int:
    """Threads that may work on a job: the caller and the helpers."""
    return 1 if pool == 0 else load_int64(pool, HELPERS) + 1


class Pool:
    """The helpers of this process; kernels take its `address`. Helpers start when it is first asked for."""

    def __init__(self, num_threads: int) -> None:
        """num_threads: the calling thread and its helpers together."""
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._address: int | None = None
        self._state = np.zeros(STATE_SIZE, np.int64)
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.stop)

    @property
    def address(self) -> int:
        """Address of the pool's state for kernels; 0 when the caller is to work alone."""
        if self._address is None:
            self.limit(self._num_threads)
        return self._address or 0

    def limit(self, num_threads: int) -> None:
        """Let a job have num_threads threads, the caller included; starts the helpers that are missing."""
        if self._address is None:
            self._state[[PIPE, PIPE + 1]] = os.pipe()
            self._address = self._state.ctypes.data
        self._num_threads = num_threads
        self._state[HELPERS] = num_threads - 1
        while len(self._threads) < num_threads - 1:
            if not self._threads:
                stopped = np.zeros(STATE_SIZE, np.int64)
                stopped[STOP] = 1
                _help(stopped.ctypes.data)  # compiled here, once, and not by each helper
            thread = threading.Thread(target=_help, args=(self._address,), name="moestro-kernels", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End the helpers; the next use starts new ones."""
        self._state[STOP] = 1
        for _ in self._threads:
            os.write(int(self._state[PIPE + 1]), b"x")
        for thread in self._threads:
            thread.join()
        if self._address is not None:
            os.close(int(self._state[PIPE]))
            os.close(int(self._state[PIPE + 1]))
        self._forget()

    def _forget(self) -> None:
        """Begin anew. A forked child has the state of the parent's pool, but not its threads."""
        self._state = np.zeros(STATE_SIZE, np.int64)
        self._threads = []
        self._address = None


# Threads belong to the process, so their pool does too.
POOL = Pool(settings.num_threads())
